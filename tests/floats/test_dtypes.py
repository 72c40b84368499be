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
from gradcomp._src.codecs.sums.sum import Partial, Sent
from gradcomp._src.codecs.tiles import to_tiles
from gradcomp.codecs import NOTHING, QSGD, Dense, EightBit, Natural
from gradcomp.exchange import Hierarchical
from gradcomp.testing import laws
from tests.plugins.slow_cases import slow
from tests.support import laws as suite
from tests.support import modes
from tests.support.assertions import assert_same_bits

UNIT = 2.0**-24  # the smallest number of float16
TOP = 65504.0
HALF = Dense(dtype=jnp.float16)
BFLOAT = Dense(dtype=jnp.bfloat16)
GROUPS = Hierarchical(group_size=2)


def near_the_top(workers, size=300, seed=0):
  """Of one sign an element, so that their sum is N times as large as their mean."""
  rng = np.random.default_rng(seed)
  numbers = rng.uniform(0.5, 0.99, (workers, size)) * rng.choice([-1, 1], size)
  return (TOP * numbers).astype(np.float16)


def near_the_smallest(workers, size=300, seed=0):
  """Some units of float16; the first element is one unit of each worker."""
  numbers = np.random.default_rng(seed).integers(-8, 9, (workers, size))
  numbers[:, 0] = 1
  return (numbers * UNIT).astype(np.float16)


@pytest.mark.parametrize(
  ("codec", "exchange"),
  [
    (HALF, "ring"),
    (HALF, GROUPS),
    *slow(
      *((x, way) for x in (HALF, BFLOAT) for way in ("all_gather", "two_shot")),
      *((x, way) for x in (QSGD(bits=8), EightBit()) for way in ("ring", "two_shot")),
      *((Dense(), "psum"), (QSGD(bits=4, share_scale=True), "psum")),
    ),
  ],
)
def test_every_exchange_keeps_the_range_at_both_ends(codec, exchange):
  laws.half_precision_keeps_its_range(suite.here(codec), exchange)


def parts_of(codec, gradients):
  """The tiles of all workers, ``[N, rows, P, B]``."""
  return jnp.stack([to_tiles(jnp.float32(x), codec) for x in gradients])


def around_a_ring(total, parts):
  """The mean that a ring of N workers has, by the arithmetic of its hops alone."""
  count = len(parts)
  first = total.start(parts[0], NOTHING, keep=True)

  def hop(k, message):
    partial = total.add(Sent(*message), parts[k], keep=True)
    return total.hop(partial, NOTHING, keep=True)[:2]

  message = jax.lax.fori_loop(1, count - 1, hop, first[:2])
  whole = total.like_one(total.add(Sent(*message), parts[-1], keep=True), count)
  last = total.send(whole, NOTHING, keep=True)
  return total.gathered(last.rows[None], None, last.scale / count)(0, len(last.rows))


def in_groups(total, parts, size):
  """The mean that groups have, whose sums one owner adds and encodes."""
  groups = parts.reshape(-1, size, *parts.shape[1:])

  def inside(own):
    partial = total.like_one(total.add_all(own, keep=False), size)
    return total.send(partial, NOTHING, keep=False).rows

  scale = total.like_one(Partial(parts[0]), size).scale / len(parts)
  return from_owner(total, jax.lax.map(inside, groups), scale)


def from_owner(total, rows, scale):
  """The mean of encoded rows ``[K, ...]`` that an owner sends on."""
  whole = total.fold(rows, scale, keep=False)
  sent = total.finish(whole, NOTHING, None, len(rows), keep=False)
  return total.gathered(sent.rows[None], None, sent.scale)(0, len(sent.rows))


@pytest.mark.parametrize("workers", [512, *slow(2, 3, 64)])
@pytest.mark.parametrize("codec", [HALF, *slow(BFLOAT, EightBit(bucket_size=32))])
def test_any_number_of_workers_by_arithmetic(codec, workers):
  """The arithmetic of each exchange, with N too large to be emulated."""
  total = codec.sums
  size = next(c for c in (8, 2, 1) if workers % c == 0)
  encoded = jax.vmap(lambda parts: codec.encode_rows(parts, NOTHING))

  @jax.jit
  def run(parts):
    rows = encoded(parts)
    return {
      "ring": around_a_ring(total, parts),
      "hierarchical": in_groups(total, parts, size),
      "two_shot": from_owner(total, rows, 1 / workers),
      # Every worker adds all rows.
      "all_gather": total.gathered(rows, None, 1 / workers)(0, rows.shape[1]),
    }

  # What a number loses where it is encoded, of its bucket's largest.
  rounding = {HALF: 2.0**-11, BFLOAT: 2.0**-8}.get(codec, 2.0**-5)
  for gradients in (near_the_top(workers), near_the_smallest(workers)):
    exact = gradients.astype(np.float64).mean(axis=0)
    largest = float(np.abs(gradients).max())
    for name, mean in run(parts_of(codec, gradients)).items():
      found = np.asarray(mean, np.float64).ravel()[: exact.size]
      hops = workers / 2 if name == "ring" else 1
      bound = (2 * hops + 1) * rounding * largest + 1.5 * UNIT
      np.testing.assert_allclose(found, exact, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize(
  ("codec", "exchange"),
  [(HALF, "ring"), *slow((HALF, "two_shot"), (Dense(), "psum"), (HALF, "local"))],
)
def test_all_places_have_the_same_bits_at_both_ends(codec, exchange):
  """Plain jit too, which divides by N before anything is encoded."""
  tx = gradcomp.compress(
    codec, axis_name="data", exchange=exchange, feedback="error", min_leaf_size=0
  )
  trees = [
    {"top": near_the_top(4, seed=seed), "small": near_the_smallest(4, seed=seed)}
    for seed in range(2)
  ]
  # Updates that are not averaged are not equal, and stay addends under Explicit axes.
  places = ["shard_map_unchecked", "pmap"] if exchange == "local" else None
  laws.same_bits_in_every_mode(tx, jax.tree.map(jnp.asarray, trees), places)


def loss_fn(w, x):
  return sum(jnp.sum(w[name] * x[name][0]) for name in w)


def test_value_and_grad_divides_what_is_float32():
  """In plain jit the mean is that of a shard_map, and has the parameter's dtype."""
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
    mapped = jax.jit(local)(w, tx.init(w), gradients)
  assert {x.dtype for x in plain.values()} == {jnp.dtype(jnp.float16)}
  assert_same_bits(plain, mapped)


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
  steps = [{"w": jnp.asarray(top, dtype)}] * 5
  outputs, state = modes.run_with_state("vmap", tx, steps)
  largest = max(np.abs(np.float32(x["w"])).max() for x in outputs)
  assert largest <= float(jnp.finfo(dtype).max)
  assert {x["w"].dtype for x in outputs} == {jnp.dtype(dtype)}
  assert np.isfinite(np.asarray(state.residual["w"])).all()
  laws.nothing_is_lost(tx, steps)


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
  tx = gradcomp.compress(
    HALF, axis_name="data", exchange=exchange, feedback="error", min_leaf_size=0
  )
  given, sent = np.full((4, 300), 0.75 * UNIT, np.float32), 3 * UNIT
  if exchange == "all_gather":
    given, sent = np.zeros((4, 300), np.float16), UNIT
    given[0] = UNIT
  outputs, _ = modes.run_with_state("vmap", tx, [given] * 4)
  assert float(sum(np.float64(x[0, 0]) for x in outputs)) == sent


@pytest.mark.parametrize("axis_name", [None, "data"])
def test_an_update_that_is_not_finite_is_skipped(axis_name):
  """The gradients are finite, and so is what waits; a factor is too large."""
  scale = optax.scale_by_schedule(lambda step: jnp.where(step == 1, 100.0, 1.0))
  skipping = gradcomp.skip_nonfinite(scale, 3, axis_name=axis_name)
  init, update = skipping.init, skipping.update
  grads = np.full((2, 3), 3e4, np.float16)
  if axis_name is None:
    grads = grads[0]
  else:
    init, update = (jax.vmap(f, axis_name=axis_name) for f in (init, update))
  update, found = jax.jit(update), []
  state = init(grads)
  for _ in range(3):
    updates, state = update(grads, state)
    found.append((float(np.max(updates)), int(np.max(state.total_notfinite))))
  assert found == [(3e4, 0), (0.0, 1), (0.0, 2)]


def test_a_resharded_sum_waits_for_what_does_not_fit():
  """A sum of addends may be too large; what is above the largest number waits."""
  addends = np.full((4, 8), 20000.0, np.float16)
  addends[:, 1] = 1.0

  def local(x, residual):
    return parallel.reshard(x, axis_name="data", codec=Dense(), residual=residual)

  result, residual = jax.jit(jax.vmap(local, axis_name="data"))(
    addends, np.zeros((4, 8), np.float32)
  )
  exact = addends.astype(np.float64).sum(axis=0)
  found = np.asarray(result, np.float64)[0]
  assert np.isfinite(found).all()
  np.testing.assert_array_equal(found + np.asarray(residual).sum(axis=0), exact)
