"""Laws of everything public that makes a transformation."""

import functools
import inspect
import re
import types

import jax.numpy as jnp
import optax
import pytest

import gradcomp
from gradcomp import optimizers, wrappers
from gradcomp.codecs import QSGD
from tests.support import factories
from tests.support.cases.recipe import NEEDED

PARAMS = {"w": jnp.ones((4, 64))}
OVER = {"axis_name": "data"}
SGD = optax.sgd(0.1)
# What a factory cannot do without.
ARGUMENTS = {
  **NEEDED,
  "compress": {"codec": QSGD()},
  "skip_nonfinite": {"inner": SGD, "max_consecutive_errors": 2},
  "allow_frozen": {"optimizer": SGD},
  "clip_by_local_norm": {"max_norm": 1.0},
  "on_each_worker": {"transformation": SGD},
  "replicable": {"optimizer": SGD, "workers": 2, **OVER},
  "switch": {"boundaries": [1], "transformations": [SGD, SGD]},
  "zero": {"inner": SGD, "grads": QSGD(), "params": QSGD(), **OVER},
  "compress_in_scan": {"codec": QSGD(), "exchange": "all_gather", **OVER},
  "local_steps": {"inner": SGD, "outer": SGD, "every": 2, "codec": QSGD(), **OVER},
  "dion": {"learning_rate": 0.1, "rank": 2},
}


FACTORIES = factories.found()


def make(name):
  needed = {"learning_rate": 0.1}
  needed = (
    needed if "learning_rate" in inspect.signature(FACTORIES[name]).parameters else {}
  )
  return FACTORIES[name](**{**needed, **ARGUMENTS.get(name, {})})


def parts(value):
  """What tools that walk closures, like equinox's, go to from a value."""
  if isinstance(value, types.FunctionType):
    return [cell.cell_contents for cell in value.__closure__ or ()]
  if isinstance(value, functools.partial):
    return [value.func, *value.args, *value.keywords.values()]
  if isinstance(value, dict):
    return [*value.values()]
  return [*value] if isinstance(value, tuple | list) else []


def circle(value, around=()):
  """The names on a way from a value back to itself, or None."""
  if any(value is x for x in around):
    return [getattr(x, "__qualname__", type(x).__name__) for x in around]
  for part in parts(value):
    if found := circle(part, (*around, value)):
      return found
  return None


@pytest.mark.parametrize("name", FACTORIES)
def test_no_closures_go_in_a_circle(name):
  assert circle(tuple(make(name))) is None


def test_a_circle_is_found():
  def update():
    return mapped()

  mapped = functools.partial(update)
  assert circle(update)


@pytest.mark.parametrize(
  "factory, options, expected",
  [
    (optimizers.adam, {"learning_rate": 0.1}, ("b1", "b2", "floor")),
    (gradcomp.qsgd, {"bits": 4, "bucket_size": 64}, ("bits", "bucket_size")),
    (gradcomp.redsync, {"max_norm": 1.0}, ("density", "max_norm")),
    (wrappers.clip_by_local_norm, {"max_norm": 1.0}, ("max_norm",)),
  ],
)
def test_the_error_lists_all_arguments_that_a_trace_must_know(
  factory, options, expected
):
  """Those that it names are all that `static_args` needs, and no more."""
  with pytest.raises(ValueError, match="static_args=") as error:
    optax.inject_hyperparams(factory)(**options).init(PARAMS)
  (listed,) = re.findall(r"static_args=\((.*?)\)", str(error.value))
  names = re.findall(r"'(\w+)'", listed)
  assert set(expected) <= set(names) and len(set(names)) == len(names)
  optax.inject_hyperparams(factory, static_args=names)(**options).init(PARAMS)
  for name in names:
    rest = [x for x in names if x != name]
    with pytest.raises(ValueError, match=f"`{name}`"):
      optax.inject_hyperparams(factory, static_args=rest)(**options).init(PARAMS)
