"""Under jax_enable_x64 each transformation traces, and keeps the dtypes of all else.

What has no dtype of its own becomes float64 there: a number of zeros, or one of Python
to the power of a count.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import gradcomp
from gradcomp import contrib, local, optimizers, parallel, wrappers
from gradcomp.codecs import QSGD, Dense
from tests.support import factories
from tests.support.cases import recipe

N = 2
DATA = {"axis_name": "data"}
FOUR_BITS = QSGD(bits=4, bucket_size=32)
SGD = optax.sgd(0.1, 0.9)
RATE = optax.cosine_decay_schedule(0.1, 9)
LEAVES = {"w": ((8, 64), "float32"), "h": ((4, 64), "bfloat16"), "one": ((), "float32")}

_scan = functools.partial(parallel.compress_in_scan, **DATA)
_rounds = functools.partial(local.local_steps, SGD, optax.adam(0.1), **DATA)
_adam = functools.partial(optimizers.adam, RATE, warmup=2, weight_decay=0.1, **DATA)

# By the name of the public function, and what makes other programs of it.
TRANSFORMATIONS = {
  **{name: functools.partial(recipe.make, name, **DATA) for name in recipe.RECIPES},
  "compress": lambda: gradcomp.compress(FOUR_BITS, feedback="error", **DATA),
  "allow_frozen": lambda: wrappers.allow_frozen(gradcomp.qsgd(**DATA)),
  "clip_by_local_norm": lambda: wrappers.clip_by_local_norm(1.0, **DATA),
  "on_each_worker": lambda: wrappers.on_each_worker(
    optax.clip_by_global_norm(1.0), **DATA
  ),
  "replicable": lambda: wrappers.replicable(gradcomp.qsgd(**DATA), workers=N, **DATA),
  "skip_nonfinite": lambda: wrappers.skip_nonfinite(gradcomp.qsgd(**DATA), 3, **DATA),
  "switch": lambda: wrappers.switch(
    [1], [gradcomp.dense(**DATA), gradcomp.qsgd(**DATA)]
  ),
  "adam": _adam,
  "adam, doubling": lambda: _adam(variance="doubling", warmup=optimizers.Stable()),
  "adam, local": lambda: _adam(local=optimizers.DoublingGaps(), floor=0.0),
  "dion": lambda: optax.masked(
    contrib.dion(RATE, rank=2, **DATA), {"w": True, "h": True, "one": False}
  ),
  "zero": lambda: parallel.zero(SGD, grads=FOUR_BITS, params=QSGD(bits=8), **DATA),
  "local_steps": lambda: _rounds(every=2, codec=FOUR_BITS),
  "local_steps, delay": lambda: _rounds(
    every=4, codec=Dense(), options=local.LocalOptions(fragments=2, delay=1, start=2)
  ),
  "compress_in_scan": lambda: _scan(Dense()),
}


def structs(dtype=None):
  like = lambda shape, own: jax.ShapeDtypeStruct((N, *shape), dtype or own)
  return {name: like(*leaf) for name, leaf in LEAVES.items()}


def types_of(function, grads):
  """The dtypes of what each worker returns."""
  with jax.enable_x64(True):
    found = jax.eval_shape(jax.vmap(function, axis_name="data"), grads)
  return jax.tree.map(lambda x: str(x.dtype), found)


def no_64(types):
  return not any("64" in dtype for dtype in jax.tree.leaves(types))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_transformation_keeps_its_dtypes(name):
  def worker(grads):
    tx = TRANSFORMATIONS[name]()
    state = tx.init(grads)
    return *tx.update(grads, state, grads), state

  updates, after, before = types_of(worker, structs())
  assert updates == {leaf: dtype for leaf, (_, dtype) in LEAVES.items()}
  assert after == before and no_64(before)
  updates, after, before = types_of(worker, structs("float64"))
  assert set(updates.values()) == {"float64"} and after == before


def test_each_public_transformation_is_here():
  assert factories.found().keys() == {
    name.partition(",")[0] for name in TRANSFORMATIONS
  }


def _scanned(grads):
  layers, key = jax.tree.map(lambda x: x, grads["w"]), jax.random.key(0)
  way = {"codec": FOUR_BITS, "axis_name": "data"}

  def loss(layers, residual):
    layer = lambda x, w: (x * w, x.sum())
    given = {"residual": residual, "key": key} | way
    carry, ys = parallel.scan(layer, layers[0], layers, **given)
    return jnp.sum(carry) + jnp.sum(ys)

  return jax.grad(loss, (0, 1))(layers, parallel.scan_residual(layers, **way))


def _scanned_shards(grads):
  def loss(shards):
    layer = lambda x, w: (x * w.sum(0), x.sum())
    given = {"params": QSGD(bits=8), "grads": FOUR_BITS, "key": jax.random.key(0)}
    carry, ys = parallel.scan_shards(layer, shards[0, 0], shards, **given, **DATA)
    return jnp.sum(carry) + jnp.sum(ys)

  return jax.grad(loss)(grads["w"].reshape(4, 2, 64))


@pytest.mark.parametrize("function", [_scanned, _scanned_shards])
def test_a_scan_keeps_its_dtypes(function):
  types = types_of(function, structs())
  assert jax.tree.leaves(types) and no_64(types)
