"""Owners round means to nearest, and send what that loses with the next mean."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp.codecs import QSGD, Dense, EightBit, Natural, OneBit, Ternary
from gradcomp.exchange import Hierarchical, TwoShot
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.cases.exchange import transformation

WORKERS = 3
RANDOM = [
  QSGD(bits=4, bucket_size=32),
  QSGD(bits=2, bucket_size=32, levels="nonuniform"),
  Ternary(bucket_size=32, share_scale=False),
  EightBit(bucket_size=32, rounding="stochastic"),
  Natural(),
  Dense(dtype=jnp.bfloat16, rounding="stochastic"),
]
ONE_BIT = QSGD(bits=1, bucket_size=32, levels="uniform")


def steps(count, size=1100, workers=WORKERS):
  rng = np.random.default_rng(count)
  x = rng.standard_normal((count, workers, size)).astype(np.float32)
  return [{"w": jnp.asarray(step)} for step in x]


def run(codec, exchange, given, mode="vmap", **options):
  """Each step's mean, and the arrays that owners keep behind the last one."""
  workers = given[0]["w"].shape[0]
  options = dict(feedback=None, min_leaf_size=0) | options
  tx = transformation(codec, exchange, workers, **options)
  outputs, _, owned = modes.run_all(mode, tx, given)
  owned = [np.asarray(x) for arrays in (owned or {}).values() for x in arrays]
  return np.stack([np.asarray(out["w"][0]) for out in outputs]), owned


def started(tx, params):
  """The shapes of the state that is made inside a map."""
  return jax.eval_shape(jax.vmap(tx.init, axis_name="data"), params)


@pytest.mark.parametrize("codec", [RANDOM[0], *slow(*RANDOM[1:])], ids=laws.name)
def test_what_owners_lose_is_sent_later(codec):
  """All that two_shot adds to the workers' own errors is what waits at last."""
  given = steps(4)
  once, none = run(codec, "all_gather", given)
  twice, (kept,) = run(codec, "two_shot", given)
  assert not none
  waiting = kept.reshape(-1)[: once.shape[1]]
  assert np.abs(waiting).max() > 0
  # Four sums of numbers below 8, each rounded to 24 bits, and the means' own.
  np.testing.assert_allclose(twice.sum(axis=0) + waiting, once.sum(axis=0), atol=1e-5)


def test_the_sum_of_errors_stays_bounded():
  """Of a hundred steps it is no more than half a level of a mean. At random it grows.

  A bucket of a mean has a largest element below 3, and seven levels.
  """
  given = steps(100, size=256)
  codec = RANDOM[0]
  once, _ = run(codec, "all_gather", given)
  kept, _ = run(codec, "two_shot", given)
  forgotten, _ = run(codec, TwoShot(feedback=False), given)
  assert np.abs((kept - once).sum(axis=0)).max() < 0.5 * 3 / 7
  assert np.abs((forgotten - once).sum(axis=0)).max() > 2 * 0.5 * 3 / 7


@pytest.mark.parametrize(
  "codec, exchange, bound",
  [
    (QSGD(bits=4), "two_shot", 0.037),
    *slow((QSGD(bits=2), "two_shot", 1.8), (QSGD(bits=4), "hierarchical", 0.038)),
  ],
)
def test_a_step_has_half_the_error(codec, exchange, bound):
  """Relative to the mean's square, of 8 workers; 0.073 and 5.7 with random draws."""
  given = steps(1, size=2**19, workers=8)
  mean = np.asarray(given[0]["w"]).mean(axis=0)
  (output,), _ = run(codec, exchange, given)
  assert np.square(output - mean).sum() / np.square(mean).sum() <= bound


@pytest.mark.parametrize("mode", ["shard_map", *slow("pmap", "shard_map_unchecked")])
def test_owners_keep_the_same_in_every_mode(mode):
  given = steps(2)
  chex.assert_trees_all_equal(
    run(RANDOM[0], "two_shot", given, mode), run(RANDOM[0], "two_shot", given)
  )


def test_one_bit_stays_random_and_keeps_nothing_without_feedback():
  """To nearest it has no value near zero, and random errors would add up."""
  given = steps(2)
  output, kept = run(ONE_BIT, "two_shot", given)
  forgotten, _ = run(ONE_BIT, TwoShot(feedback=False), given)
  assert not kept
  np.testing.assert_array_equal(output, forgotten)
  _, kept = run(ONE_BIT, "two_shot", given, feedback="error")
  assert kept


LOSSY = OneBit(), QSGD(rounding="nearest"), Dense(dtype=jnp.bfloat16)
EXACT = Dense(), Ternary()


@pytest.mark.parametrize("codec", [*LOSSY, *EXACT], ids=laws.name)
@pytest.mark.parametrize("exchange", [TwoShot(), Hierarchical(group_size=1)])
def test_owners_keep_where_something_is_lost(exchange, codec):
  if codec == Ternary() and isinstance(exchange, Hierarchical):
    return  # which is refused
  tx = gradcomp.compress(
    codec, axis_name="data", exchange=exchange, feedback=None, min_leaf_size=0
  )
  kept = started(tx, jnp.zeros((WORKERS, 2048))).server_residual
  assert bool(kept) == (codec in LOSSY)


def test_a_state_from_outside_the_map_still_works():
  """Nobody knew the number of workers there: the means are rounded at random."""
  given = steps(1)
  tx = transformation(RANDOM[0], "two_shot", WORKERS, min_leaf_size=0)
  state = tx.init({"w": jnp.zeros(1100)})
  assert state.server_residual is None
  update = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")
  output, after = jax.jit(update)(given[0], state)
  forgotten, _ = run(RANDOM[0], TwoShot(feedback=False), given)
  np.testing.assert_array_equal(output["w"][0], forgotten[0])
  assert after.server_residual is None
  explained = gradcomp.explain(
    tx, {"w": jnp.zeros(1100)}, workers=WORKERS, opt_state=state
  )
  assert "Owners forget" in str(explained)
  assert explained.forgets
  assert not explained.bytes_kept


def test_explain_counts_what_owners_keep():
  tx = transformation(RANDOM[0], "two_shot", WORKERS, min_leaf_size=0)
  params = {"w": jnp.zeros(1100)}
  state = started(tx, {"w": jnp.zeros((WORKERS, 1100))})
  explained = gradcomp.explain(tx, params, workers=WORKERS)
  (kept,) = state.server_residual[("data",)]
  assert explained.bytes_kept == 4 * kept.size // WORKERS
  assert f"{explained.bytes_kept:,} bytes" in str(explained)
  assert gradcomp.explain(tx, params, workers=WORKERS, opt_state=state) == explained


def test_a_mean_that_is_not_finite_is_not_kept():
  given = steps(2)
  bad = given[1]["w"].at[1, 40].set(jnp.nan)
  _, (before,) = run(RANDOM[0], "two_shot", given[:1])
  output, (after,) = run(RANDOM[0], "two_shot", [given[0], {"w": bad}])
  assert np.isnan(output[1][32:64]).all()
  assert np.isfinite(after).all()
  assert np.array_equal(after.reshape(-1)[32:64], before.reshape(-1)[32:64])
  assert not np.array_equal(after, before)


@pytest.mark.parametrize("codec", RANDOM, ids=laws.name)
def test_rows_to_nearest_decode_alike(codec):
  """The form to nearest has the rows of the codec, and is the nearest value."""
  x = laws.gaussian(codec.tile_size)
  nearest = codec.to_nearest()
  assert nearest == dataclasses.replace(codec, rounding="nearest")
  assert not nearest.unbiased
  assert not nearest.needs_key
  payload = jax.jit(nearest.encode)(jnp.asarray(x))
  value = laws.decoder(codec, x.shape)(payload)
  random = laws.round_trip(codec, x)
  chex.assert_trees_all_equal(value, laws.decoder(nearest, x.shape)(payload))
  assert np.square(value - x).sum() < np.square(random - x).sum()


@pytest.mark.parametrize("codec", [RANDOM[0], *RANDOM[2:]], ids=laws.name)
def test_nearest_values_of_negative_numbers_are_negative_ones(codec):
  """Also of numbers in the middle between two values: 14 is seven steps of 4 bits."""
  x = np.random.default_rng(0).integers(-14, 15, codec.tile_size).astype(np.float32)
  trip = lambda x: laws.round_trip(codec.to_nearest(), x, None)
  np.testing.assert_array_equal(trip(-x), -trip(x))


def test_switching_may_leave_what_only_owners_keep():
  """Without feedback. With it, what waits would be lost."""
  dense = gradcomp.dense(axis_name="data")
  make = lambda feedback: gradcomp.wrappers.switch(
    [1],
    [
      gradcomp.qsgd(axis_name="data", exchange="two_shot", feedback=feedback),
      dense,
    ],
  )
  params = jnp.zeros((WORKERS, 2048))
  started(make(None), params)
  with pytest.raises(ValueError, match="must keep the residuals of owners"):
    started(make("error"), params)
