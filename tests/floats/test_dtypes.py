"""Sums, means, divisions and casts never leave the range of a narrow type.

The table of codecs has float16 gradients whose sums overflow, over every exchange.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp.codecs import QSGD, Dense, EightBit, Natural
from gradcomp.exchange import Hierarchical
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits

UNIT = 2.0**-24  # the smallest number of float16
TOP = 65504.0
HALF = Dense(dtype=jnp.float16)
BFLOAT = Dense(dtype=jnp.bfloat16)
GROUPS = Hierarchical(group_size=8)


def near_the_top(workers, size=300):
  """Of one sign an element, so that their sum is N times as large as their mean."""
  rng = np.random.default_rng(0)
  numbers = rng.uniform(0.5, 0.99, (workers, size)) * rng.choice([-1, 1], size)
  return (TOP * numbers).astype(np.float16)


def near_the_smallest(workers):
  """Some units of float16; the first element is one unit of each worker."""
  numbers = np.random.default_rng(0).integers(-8, 9, (workers, 300))
  numbers[:, 0] = 1
  return (numbers * UNIT).astype(np.float16)


# What a number loses where it is encoded, or returned, of its bucket's largest.
ROUNDING = {
  **{HALF: 2.0**-11, BFLOAT: 2.0**-8, EightBit(bucket_size=32): 2.0**-5},
  **{Dense(): 2.0**-11, QSGD(bits=4, share_scale=True): 1 / 7},
}
WAYS = ("all_gather", "two_shot", "ring", GROUPS)
MANY = [(x, way, 512) for x in [*ROUNDING][:3] for way in WAYS]
MANY += [(x, "psum", 512) for x in [*ROUNDING][3:]]
CASES = [*((HALF, way, 64) for way in WAYS), *slow(*MANY)]


@pytest.mark.parametrize("codec, exchange, workers", CASES)
def test_means_of_many_workers_are_right_at_both_ends(codec, exchange, workers):
  tx = laws.compressed(codec, exchange, min_leaf_size=0)
  update = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data"))
  for gradients in (near_the_top(workers), near_the_smallest(workers)):
    found = np.float64(update(gradients)[0])
    hops = workers / 2 if exchange == "ring" else 1
    bound = (2 * hops + 1) * ROUNDING[codec] * np.abs(np.float64(gradients)).max()
    exact = gradients.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(found, exact, rtol=0, atol=bound + 1.5 * UNIT)


def test_value_and_grad_divides_what_is_float32():
  """In plain jit the mean is that of a shard_map, and has the parameter's dtype."""
  loss_fn = lambda w, x: sum(jnp.sum(w[name] * x[name][0]) for name in w)
  tx = gradcomp.compress(HALF, axis_name="data", feedback=None, min_leaf_size=0)

  def step(w, state, x):
    _, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(w, x)
    return tx.update(grads, state, w)[0]

  gradients = {"top": near_the_top(4), "small": near_the_smallest(4)}
  explicit, mesh = modes.mesh(4, AxisType.Explicit), modes.mesh(4)
  with jax.set_mesh(explicit):
    w = {name: jnp.zeros(300, jnp.float16) for name in gradients}
    x = jax.device_put(gradients, NamedSharding(explicit, P("data")))
    plain = jax.jit(step)(w, tx.init(w), x)
  with jax.set_mesh(mesh):
    local = jax.shard_map(
      step, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False
    )
    w = jax.tree.map(np.asarray, w)
    assert_same_bits(plain, jax.jit(local)(w, tx.init(w), gradients))
  assert {x.dtype for x in plain.values()} == {jnp.dtype(jnp.float16)}


def test_the_loss_is_averaged_in_float32():
  grad_fn = gradcomp.value_and_grad(lambda w, x: w * x, axis_name="data")
  run = jax.vmap(grad_fn, in_axes=(None, 0), axis_name="data")
  loss, _ = run(np.float16(2.0), np.full(4, 30000.0, np.float16))
  np.testing.assert_array_equal(np.asarray(loss), np.full(4, 60000.0, np.float16))


@pytest.mark.parametrize("dtype", [jnp.float16, *slow(jnp.bfloat16)])
def test_what_does_not_fit_waits(dtype):
  """What waits makes the mean larger than float16; nothing is infinite or lost."""
  tx = gradcomp.redsync(0.02, axis_name="data", momentum=None, min_leaf_size=0)
  top = np.abs(near_the_top(4, 600)).reshape(4, 20, 30)
  found = gradcomp.testing.modes.run("vmap", tx, [{"w": jnp.asarray(top, dtype)}] * 5)
  largest = max(np.abs(np.float32(x["w"])).max() for x in found.outputs)
  assert largest <= float(jnp.finfo(dtype).max)
  assert {x["w"].dtype for x in found.outputs} == {jnp.dtype(dtype)}
  assert np.isfinite(np.asarray(found.state.residual["w"])).all()
  gradcomp.testing.laws.nothing_is_lost(found)


def test_what_a_codec_makes_too_large_is_the_largest_number():
  """60,000 becomes 2**16, as does a sum of numbers that become 2**14; NaN stays NaN."""
  codec = Natural(rounding="nearest")
  own = {"axis_name": "data", "codec": codec}
  coded = own | {"own": "coded"}

  def every(whole, part):
    _, pull = jax.vjp(lambda x: parallel.sum_gradients(x, **own), part)
    tx = gradcomp.compress(codec, axis_name="data", exchange="two_shot", feedback=None)
    return {
      "roundtrip": codec.roundtrip(whole),
      "update": tx.update(whole, tx.init(whole))[0],
      "psum": parallel.psum(part, **own),
      "sum_gradients": pull(part)[0],
      "psum_scatter": parallel.psum_scatter(part, **coded),
      "all_gather": parallel.all_gather(whole, **coded),
      "all_to_all": parallel.all_to_all(whole, split_axis=0, concat_axis=0, **coded),
      "ppermute": parallel.ppermute(whole, perm=[(i, i ^ 1) for i in range(4)], **own),
      "gather": parallel.gather(whole, axis_name="data", params=codec, grads=codec),
    }

  whole, part = (np.full((4, 4096), x, np.float16) for x in (60000.0, 15000.0))
  whole[:, 0] = part[:, 0] = np.nan
  for name, found in jax.jit(jax.vmap(every, axis_name="data"))(whole, part).items():
    numbers = np.asarray(found)
    assert numbers.dtype == np.float16 and np.isnan(numbers).any(), name
    assert (numbers[~np.isnan(numbers)] == TOP).all(), name


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
def test_what_vanishes_in_the_cast_waits(exchange):
  """One unit of one worker in four is less than half a unit of the mean.

  So is the rest of a float32 mean of three quarters of one, which owners keep.
  """
  tx = laws.compressed(HALF, exchange, "error", min_leaf_size=0)
  given, sent = np.full((4, 300), 0.75 * UNIT, np.float32), 3 * UNIT
  if exchange == "all_gather":
    given, sent = np.zeros((4, 300), np.float16), UNIT
    given[0] = UNIT
  outputs, _ = modes.run_with_state("vmap", tx, [given] * 4)
  assert float(sum(np.float64(x[0, 0]) for x in outputs)) == sent


def test_an_update_that_is_not_finite_is_skipped():
  """The gradients are finite, and so is what waits; a factor is too large."""
  scale = optax.scale_by_schedule(lambda step: jnp.where(step == 1, 100.0, 1.0))
  skipping = gradcomp.skip_nonfinite(scale, 3, axis_name="data")
  update = jax.jit(jax.vmap(lambda *x: skipping.update(*x), axis_name="data"))
  grads, found = np.full((2, 3), 3e4, np.float16), []
  state = jax.vmap(skipping.init, axis_name="data")(grads)
  for _ in range(3):
    updates, state = update(grads, state)
    found.append((float(np.max(updates)), int(np.max(state.total_notfinite))))
  assert found == [(3e4, 0), (0.0, 1), (0.0, 2)]


def test_a_resharded_sum_waits_for_what_does_not_fit():
  """A sum of addends may be too large; what is above the largest number waits."""
  addends = np.full((4, 8), 20000.0, np.float16)
  addends[:, 1] = 1.0
  zeros = np.zeros((4, 8), np.float32)
  local = lambda x, e: parallel.reshard(x, axis_name="data", codec=Dense(), residual=e)
  result, residual = jax.jit(jax.vmap(local, axis_name="data"))(addends, zeros)
  exact = addends.astype(np.float64).sum(axis=0)
  found = np.asarray(result, np.float64)[0]
  assert np.isfinite(found).all()
  np.testing.assert_array_equal(found + np.asarray(residual).sum(axis=0), exact)
