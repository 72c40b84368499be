"""Under jax_enable_x64 a scan of layers traces, and keeps the dtypes of all else."""

import jax
import jax.numpy as jnp
import pytest

from gradcomp import parallel
from gradcomp.codecs import QSGD

N = 2
DATA = {"axis_name": "data"}
FOUR_BITS = QSGD(bits=4, bucket_size=32)


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
  def types(x64):
    with jax.enable_x64(x64):
      found = jax.eval_shape(
        jax.vmap(function, axis_name="data"),
        {"w": jax.ShapeDtypeStruct((N, 8, 64), "float32")},
      )
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), found)

  assert types(True) == types(False)
