"""Each option of each public transformation is in what processes compare."""

import copy
import dataclasses
import inspect
from typing import Literal, get_args, get_origin

import jax.numpy as jnp
import optax
import pytest

import gradcomp
from gradcomp._src.mesh import agreement
from gradcomp.codecs import QSGD, TopK
from tests.support import factories
from tests.support.cases.agreement import GRADS, assert_told, processes, trace
from tests.support.cases.recipe import RECIPES

SGD, MOMENTUM = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)
QSGD4, NEAREST = QSGD(bits=4), QSGD(bits=4, rounding="nearest")
FIRST, LATER = (gradcomp.compress(QSGD(bits=x), axis_name="data") for x in (4, 8))

# What has no option of its own that decides messages.
OF_STATES = {"allow_frozen", "on_each_worker", "replicable"}

# What transformations are given beside axis_name.
GIVEN = {
  "compress": {"codec": QSGD4},
  "compress_in_scan": {"codec": QSGD4, "feedback": None},
  "dense": {"dtype": jnp.bfloat16},
  "policy": {"rules": [("v", QSGD4)]},
  "eight_bit": {"dtype": "static_tree"},
  "redsync": {"max_norm": 1.0},
  "loss_scaling_cast": {"factor": 8.0},
  "zero": {"inner": SGD, "grads": QSGD4, "params": QSGD(bits=8, rounding="nearest")},
  "local_steps": {"inner": MOMENTUM, "outer": SGD, "every": 4, "codec": TopK()},
  "switch": {"boundaries": [2], "transformations": [optax.identity(), FIRST]},
  "skip_nonfinite": {"inner": optax.chain(FIRST, SGD), "max_consecutive_errors": 5},
  "clip_by_local_norm": {"max_norm": 1.0},
  "adam": {"learning_rate": 0.1, "warmup": 2, "weight_decay": 0.1},
  "dion": {"learning_rate": 0.1, "rank": 2, "weight_decay": 0.1},
}

# Another value of an option, of one transformation or of all that have it.
OTHER = {
  "adam.codec": NEAREST,
  "policy.rules": [("w", QSGD4)],
  "local_steps.inner": SGD,
  "skip_nonfinite.inner": optax.chain(FIRST, MOMENTUM),
  "inner": MOMENTUM,
  "outer": MOMENTUM,
  "boundaries": [3],
  "transformations": [optax.identity(), LATER],
  "codec": QSGD(bits=8),
  "grads": QSGD(bits=8),
  "params": NEAREST,
  "exchange": "all_gather",
  "feedback": "error",
  "adam.feedback": None,
  "compress_in_scan.feedback": "auto",
  "local_steps.feedback": None,
  "min_leaf_size": 1,
  "message_bytes": 1000,
  "dither": "independent",
  "policy": lambda *_, **__: True,
  "mask": {"v": True, "w": False},
  "dion.mask": {"w": False},
  "local": 3,
  "bucket_size": 128,
  "dtype": jnp.float16,
  "eight_bit.dtype": "linear",
  "exponent_offset": 1,
  "block_size": 128,
  "rotate": 32,
}

# How the error names an option that has another name there.
SHOWN = {
  "zero.inner": r"inner_state\[",
  "local_steps.inner": r"inner_state\[",
  "local_steps.outer": r"outer_state\[",
  "zero.grads": "codec",
  "skip_nonfinite.inner": r"inner_state\[",
  "switch.transformations": "codec",
}


def options_of(function):
  """Its options with their annotations and defaults, by name."""
  found = dict(inspect.signature(function).parameters)
  if function in RECIPES.values():  # which hands on what is compress's
    shared = inspect.signature(gradcomp.compress).parameters
    found = {name: x for name, x in found.items() if name not in shared}
  return {name: x for name, x in found.items() if name != "axis_name"}


def other(name, option, parameter):
  """Returns another value than the default."""
  for key in (f"{name}.{option}", option):
    if key in OTHER:
      return OTHER[key]
  kinds = [parameter.annotation, *get_args(parameter.annotation)]
  literals = [get_args(x) for x in kinds if get_origin(x) is Literal]
  default = GIVEN.get(name, {}).get(option, parameter.default)
  if isinstance(default, bool):
    return not default
  if literals:
    return next(x for x in literals[0] if x != default)
  return default + 1 if isinstance(default, int) else default / 2


FOUND = {x: f for x, f in factories.found().items() if x not in OF_STATES}
CASES = [(name, option) for name in sorted(FOUND) for option in options_of(FOUND[name])]


@pytest.fixture
def together(monkeypatch):
  run = processes(monkeypatch)
  monkeypatch.setenv("GRADCOMP_PATIENCE_SECONDS", "5")
  return run


def assert_compared(together, name, option, value, **given):
  # All of Dion's leaves are matrices.
  grads = {"w": GRADS["w"]} if name == "dion" else GRADS
  axes = {"axis_name": "data"} if name != "switch" else {}
  given = GIVEN.get(name, {}) | axes | given
  run = lambda **options: trace(FOUND[name](**given | options), grads)
  told = together(run, lambda: run(**{option: value}))
  shown = SHOWN.get(f"{name}.{option}", option)
  shown = "" if FOUND[name] in RECIPES.values() else shown
  for error in told:
    assert_told(error, f"`{shown}.*` must be the same in all processes, ")


@pytest.mark.parametrize("name, option", CASES, ids=map(".".join, CASES))
def test_another_option_is_an_error_on_both_hosts(name, option, together):
  value = other(name, option, options_of(FOUND[name])[option])
  assert_compared(together, name, option, value)


@pytest.mark.parametrize(
  "option, values",
  [
    ("learning_rate", [optax.linear_schedule(0.1, x, 200) for x in (0.01, 0.02)]),
    ("weight_decay", [optax.constant_schedule(x) for x in (0.1, 0.2)]),
    ("mask", [lambda tree, x=x: {"v": x, "w": True} for x in (False, True)]),
  ],
  ids=["rate", "decay", "mask"],
)
@pytest.mark.parametrize("local", [None, 2])
def test_functions_are_compared_by_what_they_return(option, values, local, together):
  first, second = values
  assert_compared(together, "adam", option, second, local=local, **{option: first})


def dataclasses_of_options():
  """Public dataclasses that are made without arguments, and a policy."""
  kinds = [x for x in factories.names().values() if inspect.isclass(x)]
  for kind in filter(dataclasses.is_dataclass, kinds):
    fields = inspect.signature(kind).parameters.values()
    if all(x.default is not x.empty for x in fields):
      yield kind()
  yield gradcomp.codecs.Policy(rules=[("v", QSGD4)])


VALUES = [*dataclasses_of_options()]
of = lambda value: agreement._part("a transformation", {"option": value})["option"]


@pytest.mark.parametrize("value", VALUES, ids=[type(x).__name__ for x in VALUES])
def test_each_field_is_in_the_words_of_an_option(value):
  for field in dataclasses.fields(value):
    changed = copy.copy(value)
    object.__setattr__(changed, field.name, "something else")
    assert of(changed) != of(value), field.name


def test_all_elements_of_an_array_are_in_its_words():
  zeros = jnp.zeros(3000)
  assert of({"decay": zeros}) != of({"decay": zeros.at[1500].set(1e-9)})
