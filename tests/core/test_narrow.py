"""Sums, means, divisions and casts never leave the range of a narrow type."""

import functools

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
from gradcomp.codecs import (
  NOTHING,
  QSGD,
  Dense,
  EightBit,
  FloatCast,
  Natural,
  OneBit,
  TopK,
)
from gradcomp.exchange import Hierarchical, TwoShot
from gradcomp.testing import BrokenLaw, laws
from tests.plugins.slow_cases import slow
from tests.support import laws as suite
from tests.support import modes
from tests.support.assertions import assert_same_bits, says

UNIT = 2.0**-24  # the smallest number of float16
TOP = 65504.0
HALF = Dense(dtype=jnp.float16)
BFLOAT = Dense(dtype=jnp.bfloat16)
GROUPS = Hierarchical(group_size=2)
EXCHANGES = ("all_gather", "two_shot", "ring", GROUPS, "psum", "local")


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


every_end = pytest.mark.parametrize(
  "numbers", [near_the_top, near_the_smallest], ids=["top", "smallest"]
)


def of_any_range(codec):
  """Says whether a codec sends float16 gradients of any size, and sums of four of them.

  A constant factor or scale has a range of its own, and signs have no size.
  """
  if isinstance(codec, FloatCast) and codec.scale != "auto":
    return codec.format.max_finite / codec.scale > 4 * TOP
  return getattr(codec, "exponent_offset", None) is None and not codec.facts.own_units


# Codecs that cast to floats; the others have scales.
CASTING = [HALF, BFLOAT, TopK(density=0.5, dtype=jnp.float16)]
KEEPING = [x for x in suite.CODECS if x not in CASTING and of_any_range(x)]


def allowed(codec, exchange):
  """The exchanges that a codec's sums do not refuse."""
  try:
    gradcomp.compress(codec, axis_name="data", exchange=exchange, feedback=None)
  except ValueError:
    return False
  return True


LAW = [
  pytest.param(
    codec,
    exchange,
    id=f"{suite.name(codec)}-{getattr(exchange, 'name', exchange)}",
    marks=() if codec is HALF and exchange in ("ring", GROUPS) else pytest.mark.slow,
  )
  for codec in (*CASTING, *KEEPING)
  for exchange in EXCHANGES[:-1]
  if allowed(codec, exchange)
]


@pytest.mark.parametrize(("codec", "exchange"), LAW)
def test_every_codec_in_every_exchange_keeps_the_range(codec, exchange):
  laws.half_precision_keeps_its_range(suite.here(codec), exchange)


@pytest.mark.parametrize(
  "codec",
  [
    pytest.param(
      codec,
      id=suite.name(codec),
      marks=() if codec in (HALF, suite.CODECS[0]) else pytest.mark.slow,
    )
    for codec in (*CASTING, *KEEPING)
  ],
)
def test_large_numbers_keep_their_size(codec):
  laws.large_numbers_keep_their_size(suite.here(codec))


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


def encoder(codec):
  return jax.vmap(lambda parts: codec.encode_rows(parts, NOTHING))


def by_all(total, parts):
  """The mean that every worker has that adds all rows."""
  rows = encoder(total.codec)(parts)
  return total.gathered(rows, None, 1 / len(parts))(0, rows.shape[1])


@every_end
@pytest.mark.parametrize("workers", [2, 8, 512, *slow(3, 5, 64)])
@pytest.mark.parametrize("codec", [HALF, *slow(BFLOAT, EightBit(bucket_size=32))])
def test_any_number_of_workers_by_arithmetic(codec, workers, numbers):
  """The arithmetic of each exchange, with N too large to be emulated."""
  gradients = numbers(workers)
  total = codec.sums
  size = next(c for c in (8, 2, 1) if workers % c == 0)
  rows = encoder(codec)
  ways = {
    "ring": around_a_ring,
    "hierarchical": functools.partial(in_groups, size=size),
    "two_shot": lambda total, x: from_owner(total, rows(x), 1 / workers),
    "all_gather": by_all,
  }

  @jax.jit
  def run(parts):
    return {name: way(total, parts) for name, way in ways.items()}

  exact = gradients.astype(np.float64).mean(axis=0)
  # What a number loses where it is encoded, of its bucket's largest.
  rounding = {HALF: 2.0**-11, BFLOAT: 2.0**-8}.get(codec, 2.0**-5)
  largest = float(np.abs(gradients).max())
  for name, mean in run(parts_of(codec, gradients)).items():
    found = np.asarray(mean, np.float64).ravel()[: exact.size]
    hops = workers / 2 if name == "ring" else 1
    bound = (2 * hops + 1) * rounding * largest + 1.5 * UNIT
    np.testing.assert_allclose(found, exact, rtol=0, atol=bound, err_msg=name)


PLACES = [
  (HALF, "ring"),
  (HALF, "two_shot"),
  *slow(
    *((HALF, exchange) for exchange in (GROUPS, "all_gather", "local")),
    *((QSGD(bits=8), exchange) for exchange in EXCHANGES[:4]),
    *((Dense(), exchange) for exchange in EXCHANGES),
    *((BFLOAT, exchange) for exchange in ("ring", "two_shot")),
    (TopK(density=0.2, dtype=jnp.float16), "two_shot"),
    (FloatCast(), "ring"),
    (OneBit(), "ring"),
    (QSGD(bits=4, share_scale=True), "psum"),
  ),
]


@pytest.mark.parametrize(("codec", "exchange"), PLACES)
@pytest.mark.parametrize("feedback", ["error", *slow(None)])
def test_all_places_have_the_same_bits_at_both_ends(codec, exchange, feedback):
  """Plain jit too, which divides by N before anything is encoded."""
  if isinstance(codec, OneBit) and feedback is None:
    pytest.skip("it always keeps a residual")
  tx = gradcomp.compress(
    codec, axis_name="data", exchange=exchange, feedback=feedback, min_leaf_size=0
  )
  trees = [
    {"top": near_the_top(4, seed=seed), "small": near_the_smallest(4, seed=seed)}
    for seed in range(2)
  ]
  # Updates that are not averaged are not equal, and stay addends under Explicit axes.
  places = ["shard_map_unchecked", "pmap"] if exchange == "local" else None
  laws.same_bits_in_every_mode(tx, jax.tree.map(jnp.asarray, trees), places)


@functools.cache
def explicit_mesh():
  return jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:4])


def loss_fn(w, x):
  return jnp.sum(w * x[0])


@every_end
@pytest.mark.parametrize("codec", [Dense(), HALF, *slow(QSGD(bits=8))], ids=str)
def test_value_and_grad_divides_what_is_float32(codec, numbers):
  """In plain jit the mean is that of a shard_map, and has the parameter's dtype."""
  tx = gradcomp.compress(codec, axis_name="data", feedback=None, min_leaf_size=0)

  def step(w, state, x):
    loss, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(w, x)
    return tx.update(grads, state, w)[0], loss

  gradients = numbers(4)
  with jax.set_mesh(explicit_mesh()):
    w = jnp.zeros(300, jnp.float16)
    x = jax.device_put(gradients, NamedSharding(explicit_mesh(), P("data")))
    state = tx.init(w)
    plain, _ = jax.jit(step)(w, state, x)
  mesh = modes.mesh(4)
  with jax.set_mesh(mesh):
    local = jax.shard_map(
      step, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False
    )
    mapped, _ = jax.jit(local)(w, tx.init(w), gradients)
  assert plain.dtype == jnp.float16
  assert_same_bits(np.asarray(plain), np.asarray(mapped))


def test_the_loss_is_averaged_in_float32():
  grad_fn = gradcomp.value_and_grad(lambda w, x: w * x, axis_name="data")
  x = jnp.full(4, 30000.0, jnp.float16)
  run = jax.vmap(grad_fn, in_axes=(None, 0), axis_name="data")
  loss, _ = run(jnp.float16(2.0), x)
  np.testing.assert_array_equal(np.asarray(loss), np.full(4, 60000.0, np.float16))


RESIDUALS = {
  "redsync": gradcomp.redsync(0.02, axis_name="data", momentum=None, min_leaf_size=0),
  "momentum": gradcomp.redsync(0.02, axis_name="data", min_leaf_size=0),
  "onebit": gradcomp.onebit_sgd(axis_name="data", exchange="ring", min_leaf_size=0),
  "qsgd": gradcomp.qsgd(3, axis_name="data", feedback="error", min_leaf_size=0),
  "powersgd": gradcomp.powersgd(2, axis_name="data", min_leaf_size=0),
  "natural": gradcomp.compress(
    Natural(), axis_name="data", feedback="error", min_leaf_size=0
  ),
}
FED = ["redsync", *slow(*list(RESIDUALS)[1:])]


@pytest.mark.parametrize("name", FED)
@pytest.mark.parametrize("dtype", [jnp.float16, *slow(jnp.bfloat16)])
def test_what_does_not_fit_waits(name, dtype):
  """What waits makes the mean larger than float16; nothing is infinite or lost."""
  tx = RESIDUALS[name]
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


def test_what_vanishes_in_the_cast_waits():
  """One unit of one worker in four is less than half a unit of the mean."""
  tx = gradcomp.dense(
    jnp.float16, axis_name="data", exchange="all_gather", min_leaf_size=0
  )
  first = np.zeros((4, 300), np.float16)
  first[0] = UNIT
  steps = [jnp.asarray(first)] * 4
  outputs, _ = modes.run_with_state("vmap", tx, steps)
  assert float(sum(np.float64(x[0, 0]) for x in outputs)) == UNIT


def test_the_law_sees_what_became_infinite():
  """As the cast of a mean that waited made it before."""
  tx = gradcomp.onebit_sgd(axis_name="data", exchange="all_gather", min_leaf_size=0)

  def update(updates, state, params=None):
    updates, state = tx.update(updates, state, params)
    over = lambda x: jnp.where(jnp.abs(x) > 4e4, jnp.inf, x)
    return jax.tree.map(over, updates), state

  steps = [laws.gradients_like({"w": jnp.zeros(300, jnp.float16)}, 2)] * 2
  with pytest.raises(BrokenLaw, match=says("nothing_is_lost", "of ['w'] element")):
    laws.nothing_is_lost(optax.GradientTransformation(tx.init, update), steps)


@pytest.mark.parametrize("axis_name", [None, "data"])
def test_an_update_that_is_not_finite_is_skipped(axis_name):
  """The gradients are finite, and so is what waits; a factor is too large."""
  scale = optax.scale_by_schedule(lambda step: jnp.where(step == 1, 100.0, 1.0))
  skipping = gradcomp.skip_nonfinite(scale, 3, axis_name=axis_name)
  init, update = skipping.init, skipping.update
  grads = jnp.full((2, 3), 3e4, jnp.float16)
  if axis_name is None:
    grads = grads[0]
  else:
    init, update = (jax.vmap(f, axis_name=axis_name) for f in (init, update))
  state, found = init(grads), []
  for _ in range(3):
    updates, state = update(grads, state)
    found.append((float(updates.max()), int(np.max(state.total_notfinite))))
  assert found == [(3e4, 0), (0.0, 1), (0.0, 2)]


@pytest.mark.parametrize("target", [P(), *slow(P("data"))], ids=str)
def test_a_resharded_sum_waits_for_what_does_not_fit(target):
  """A sum of addends may be too large; what is above the largest number waits."""
  codec = Dense()
  addends = np.full((4, 8), 20000.0, np.float16)
  addends[:, 1] = 1.0

  def local(x, residual):
    over = {"spec": target} if target else {"axis_name": "data"}
    return parallel.reshard(x, **over, codec=codec, residual=residual)

  result, residual = jax.jit(jax.vmap(local, axis_name="data"))(
    addends, jnp.zeros((4, 8), jnp.float32)
  )
  exact = addends.astype(np.float64).sum(axis=0)
  found = np.asarray(result, np.float64)
  whole = found[0] if found.shape == (4, 8) else found.ravel()
  assert np.isfinite(whole).all()
  np.testing.assert_array_equal(whole + np.asarray(residual).sum(axis=0), exact)


def test_a_gradient_norm_is_added_in_float32():
  """The square of 20,000 is no float16."""
  tx = optax.chain(gradcomp.dense(axis_name="data"), optax.sgd(0.0))
  mesh = modes.mesh(4)
  step = gradcomp.make_train_step(
    loss_fn,
    tx,
    axis_name="data",
    mesh=mesh,
    donate=False,
    options=gradcomp.TrainOptions(report=True),
  )
  with jax.set_mesh(mesh):
    w = jnp.zeros(300, jnp.float16)
    _, _, metrics = step(w, tx.init(w), near_the_top(4))
  assert np.isfinite(float(metrics["gradient_norm"]))


def test_norms_of_a_step_have_the_range_of_float32():
  """Squares of numbers near 2^100 are none of float32, nor are those near 2^-100."""
  tx = optax.chain(gradcomp.dense(axis_name="data"), optax.sgd(0.5))
  mesh = modes.mesh(4)
  step = gradcomp.make_train_step(
    lambda w, x: jnp.sum(w * x[0]),
    tx,
    axis_name="data",
    mesh=mesh,
    donate=False,
    options=gradcomp.TrainOptions(report=True),
  )
  x = suite.gaussian((4, 300))
  length = np.sqrt((np.float64(x) ** 2).sum() / 4)
  moved = np.linalg.norm(np.float64(x).mean(axis=0)) / 2
  with jax.set_mesh(mesh):
    w = jnp.zeros(300)
    for power in (-100, -45, 0, 45, 100):
      *_, metrics = step(w, tx.init(w), x * np.float32(2.0**power))
      found = [metrics["gradient_norm"], metrics["update_norm"]]
      # Some 300 additions in binary32, by XLA's order.
      expected = np.ldexp([length, moved], power)
      np.testing.assert_allclose(np.float64(found), expected, rtol=1e-5)


def test_owners_keep_what_a_half_does_not():
  """A mean of float32 gradients near the smallest float16 is sent over two steps."""
  tx = gradcomp.compress(
    HALF, axis_name="data", exchange=TwoShot(), feedback="error", min_leaf_size=0
  )
  steps = [jnp.full((4, 300), 0.75 * UNIT, jnp.float32)] * 4
  outputs, _ = modes.run_with_state("vmap", tx, steps)
  assert float(sum(np.float64(x[0, 0]) for x in outputs)) == 3 * UNIT
