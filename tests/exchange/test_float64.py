"""float64 gradients: added as they are by dense(), and in float32 by all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.exchange import Hierarchical
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits

WORKERS = 4  # a mean of four is exact where the sum is

# Lost in float32: too large, too small, and too close to 1.
SPECIAL = [1e200, -3e-60, 1 + 1e-12, 0.0]


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


def gradients():
  rng = np.random.default_rng(0)
  w = rng.standard_normal((WORKERS, 8, 16))
  half, single = w.astype(np.float16), w[:, 1].astype(np.float32)
  w[:, 0, :4] = SPECIAL
  return {"half": half, "single": single, "w": w}


def mean(x):
  """In the order of the workers, in float64 for float64 and else in float32."""
  wide = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
  return (sum(wide) / len(wide)).astype(x.dtype)


@pytest.mark.parametrize("mode", ["shard_map", modes.EXPLICIT, *slow("pmap", "vmap")])
@pytest.mark.parametrize(
  "options",
  [
    {},
    {"exchange": "two_shot", "feedback": "error"},
    *slow({"exchange": "all_gather"}, {"exchange": Hierarchical(group_size=2)}),
  ],
  ids=str,
)
def test_the_dense_mean_is_that_of_float64(mode, options):
  """Bit for bit, but for the order of the addends, which backends choose."""
  trees = [gradients()] * 2
  tx = gradcomp.dense(axis_name="data", **options)
  outputs, residual = modes.run(mode, tx, trees)
  for output in outputs:
    for name, x in trees[0].items():
      got = np.asarray(output[name])
      assert got.dtype == x.dtype
      few = 4 * np.finfo(x.dtype).eps
      np.testing.assert_allclose(got, np.stack([mean(x)] * WORKERS), few, atol=few)
      assert_same_bits(list(got), [got[0]] * WORKERS)
    np.testing.assert_array_equal(output["w"][0, 0, :4], SPECIAL)
  for name in residual or ():  # of half precision, what the cast of the mean loses
    leaf, info = residual[name], np.finfo(trees[0][name].dtype)
    assert leaf.dtype == np.float32
    assert np.abs(leaf).max(initial=0) <= (info.bits < 32) * 8 * info.eps


def test_one_device_changes_no_bit():
  grads = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), gradients())
  for tx in (gradcomp.dense(), gradcomp.dense(feedback="error")):
    update, _ = jax.jit(tx.update)(grads, tx.init(grads))
    assert_same_bits(update, grads)


def test_float64_crosses_the_wire():
  grads = {"w": jnp.zeros((WORKERS, 64)), "v": jnp.zeros((WORKERS, 64), jnp.float32)}
  tx = gradcomp.dense(axis_name="data")

  def update(grads):
    grads = jax.tree.map(lambda leaf: leaf[0], grads)
    return tx.update(grads, tx.init(grads))[0]

  mapped = jax.shard_map(
    update, mesh=modes.mesh(WORKERS), in_specs=P("data"), out_specs=P()
  )
  report = gradcomp.wire_report(jax.jit(mapped).lower(grads))
  params = jax.tree.map(lambda leaf: leaf[0], grads)
  explained = gradcomp.explain(tx, params, workers=WORKERS)
  assert report.bytes_sent == explained.bytes_sent == 3 * 64 * (8 + 4) // 2


@pytest.mark.parametrize(
  "make, inf",
  [
    (lambda: gradcomp.qsgd(8, bucket_size=32), np.nan),
    (lambda: gradcomp.dense(jnp.bfloat16, feedback=None), np.inf),
    *slow((gradcomp.redsync, np.inf), (gradcomp.eight_bit, np.nan)),
  ],
)
def test_others_compute_in_float32(make, inf):
  """And give the dtype back, and keep the dtypes of their state."""
  tx = make()
  grads = {"w": jnp.asarray(gradients()["w"][0].repeat(64, axis=0))}
  state = tx.init(grads)
  update, after = jax.jit(tx.update)(grads, state)
  single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)
  expected, _ = jax.jit(tx.update)(single, state)
  assert update["w"].dtype == jnp.float64
  assert_same_bits(update["w"].astype(jnp.float32), expected["w"])
  np.testing.assert_array_equal(update["w"][0, 0], inf)
  assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, after)
