"""Laws of everything public that makes a transformation.

Types alone show them: nothing is compiled. Under jax_enable_x64 what has no dtype of
its own becomes float64: a number of zeros, or one of Python to the power of a count.
"""

import functools
import re
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import gradcomp
from gradcomp import contrib, local, optimizers, parallel, wrappers
from gradcomp.codecs import QSGD, Dense, TopK
from tests.support import factories
from tests.support.cases import recipe

N = 2
DATA = {"axis_name": "data"}
FOUR_BITS = QSGD(bits=4, bucket_size=32)
SAMPLED = TopK(density=0.1, selection="sampled")
SGD = optax.sgd(0.1, 0.9)
RATE, CLIP = optax.cosine_decay_schedule(0.1, 9), optax.clip_by_global_norm(1.0)
LEAVES = {"w": ((8, 64), "float32"), "h": ((4, 64), "bfloat16"), "one": ((), "float32")}

_rounds = functools.partial(local.local_steps, SGD, optax.adam(0.1), **DATA)
_adam = functools.partial(optimizers.adam, RATE, warmup=2, weight_decay=0.1, **DATA)
_qsgd, _dense = gradcomp.qsgd(**DATA), gradcomp.dense(**DATA)

# By the name of the public function, and what makes other programs of it.
TRANSFORMATIONS = {
  **{name: functools.partial(recipe.make, name, **DATA) for name in recipe.RECIPES},
  "compress": lambda: gradcomp.compress(FOUR_BITS, feedback="error", **DATA),
  "compress, sampled": lambda: gradcomp.compress(SAMPLED, min_leaf_size=64, **DATA),
  "allow_frozen": lambda: wrappers.allow_frozen(_qsgd),
  "clip_by_local_norm": lambda: wrappers.clip_by_local_norm(1.0, **DATA),
  "on_each_worker": lambda: wrappers.on_each_worker(CLIP, **DATA),
  "replicable": lambda: wrappers.replicable(_qsgd, workers=N, **DATA),
  "skip_nonfinite": lambda: gradcomp.skip_nonfinite(_qsgd, 3, **DATA),
  "switch": lambda: wrappers.switch([1], [_dense, _qsgd]),
  "adam": _adam,
  "adam, doubling": lambda: _adam(variance="doubling", warmup=optimizers.Stable()),
  "adam, local": lambda: _adam(local=optimizers.DoublingGaps(), floor=0.0),
  "dion": lambda: contrib.dion(RATE, rank=2, **DATA),
  "zero": lambda: parallel.zero(SGD, grads=FOUR_BITS, params=QSGD(bits=8), **DATA),
  "local_steps": lambda: _rounds(every=2, codec=FOUR_BITS),
  "local_steps, delay": lambda: _rounds(
    every=4, codec=Dense(), fragments=2, delay=1, start=2
  ),
  "compress_in_scan": lambda: parallel.compress_in_scan(Dense(), **DATA),
}


def test_each_public_transformation_is_here():
  names = {name.partition(",")[0] for name in TRANSFORMATIONS}
  assert factories.found().keys() == names


def structs(name, dtype=None):
  like = lambda shape, own: jax.ShapeDtypeStruct((N, *shape), dtype or own)
  skipped = "one" if name == "dion" else None  # which takes matrices alone
  return {leaf: like(*x) for leaf, x in LEAVES.items() if leaf != skipped}


def traced(name, *, x64, dtype=None):
  """The types of updates, of the first state, and of that behind a step.

  Around it is what users put around one, which hands over arguments that it ignores.
  """

  def worker(grads):
    tx = optax.chain(TRANSFORMATIONS[name](), optax.scale(-1.0))
    tx = optax.masked(tx, jax.tree.map(lambda _: True, grads))
    state = tx.init(grads)
    extra = dict(value=jnp.float32(1), value_fn=print, anything=None)
    return *tx.update(grads, state, grads, **extra), state

  with jax.enable_x64(x64):
    return jax.eval_shape(jax.vmap(worker, axis_name="data"), structs(name, dtype))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_states_and_dtypes_are_stable(name):
  """From step to step, and with jax_enable_x64."""
  plain, double = (traced(name, x64=x64) for x64 in (False, True))
  wide = traced(name, x64=True, dtype="float64")
  for updates, after, before in (plain, double, wide):
    assert after == before
    assert updates == structs(name, "float64" if updates is wide[0] else None)
  assert double == plain


def parts(value):
  """Returns what a walk of closures, like equinox's, goes to from a value."""
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
  found = (circle(part, (*around, value)) for part in parts(value))
  return next(filter(None, found), None)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_no_closures_go_in_a_circle(name):
  assert circle(tuple(TRANSFORMATIONS[name]())) is None


@pytest.mark.parametrize(
  "make, options, expected",
  [
    (optimizers.adam, {"learning_rate": 0.1}, {"b1", "b2", "floor"}),
    (gradcomp.qsgd, {"bits": 4, "bucket_size": 64}, {"bits", "bucket_size"}),
    (gradcomp.redsync, {"max_norm": 1.0}, {"density", "max_norm"}),
    (wrappers.clip_by_local_norm, {"max_norm": 1.0}, {"max_norm"}),
  ],
)
def test_the_error_lists_all_arguments_that_a_trace_must_know(make, options, expected):
  """Those that it names are all that `static_args` needs, and no more."""

  def init(*names):
    injected = optax.inject_hyperparams(make, static_args=names)
    return injected(**options).init(jnp.ones((4, 64)))

  with pytest.raises(ValueError, match="static_args=") as error:
    init()
  (listed,) = re.findall(r"static_args=\((.*?)\)", str(error.value))
  names = re.findall(r"'(\w+)'", listed)
  assert expected <= set(names) and len(set(names)) == len(names)
  init(*names)
  for name in names:
    with pytest.raises(ValueError, match=f"`{name}`"):
      init(*(x for x in names if x != name))
