"""Under jax_enable_x64 scans and updates lower, and keep the dtypes of all else."""

import jax
import jax.numpy as jnp
import pytest

from gradcomp import parallel
from gradcomp.codecs import QSGD
from tests.support import modes
from tests.support.cases.recipe import make

GIVEN = {"axis_name": "data", "codec": QSGD(bits=4, bucket_size=32)}
SHARDS = {"params": QSGD(bits=8), "axis": 0}
KEY = jax.random.PRNGKey(0)


def scanned(layers, residual):
  layer, given = lambda x, w: (x * w, x.sum()), {"residual": residual, "key": KEY}
  return parallel.scan(layer, layers[0], layers, **given, **GIVEN)


def scanned_shards(shards, _):
  layer = lambda x, w: (x * w.sum(0), x.sum())
  return parallel.scan(layer, shards[0, 0], shards, key=KEY, **SHARDS, **GIVEN)


@pytest.mark.parametrize(
  "scan, shape", [(scanned, (8, 64)), (scanned_shards, (4, 2, 64))]
)
def test_a_scan_keeps_its_dtypes(scan, shape):
  def grads(layers):
    loss = lambda *x: sum(map(jnp.sum, scan(*x)))
    first = parallel.compress_in_scan(feedback="error", **GIVEN).init(layers)
    return jax.grad(loss, (0, 1))(layers, first.residual)

  def types(x64):
    of_two = jax.ShapeDtypeStruct((2, *shape), "float32")
    with jax.enable_x64(x64):
      found = jax.eval_shape(jax.vmap(grads, axis_name="data"), of_two)
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), found)

  assert types(True) == types(False)


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "aps", "redsync"])
def test_an_update_of_large_leaves_in_a_loop_lowers_and_keeps_its_dtypes(name):
  tx = make(name, axis_name="data")
  leaves = [jax.ShapeDtypeStruct((512, 300), "float32")] * 4
  specs = {"in_specs": jax.P(), "out_specs": jax.P("data"), "check_vma": False}

  def types(x64):
    update = lambda grads: tx.update(grads, tx.init(grads))[0]
    step = jax.jit(jax.shard_map(update, mesh=modes.mesh(2), **specs))
    with jax.enable_x64(x64):
      return [x.dtype for x in step.lower(leaves).out_info]

  assert types(True) == types(False)
