"""Signs are the page's, their sums are counted exactly, and most workers decide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp.codecs import Sign
from tests.specs import sign
from tests.support import laws, modes
from tests.support.assertions import assert_same_floats

MEAN = Sign(bucket_size=32)
ONE = Sign(bucket_size=32, scale="one")
VOTE = Sign(bucket_size=32, scale="one", vote="majority")


def hyper(codec):
  return dict(bucket_size=codec.bucket_size, scale=codec.scale)


def leaf(size, seed=0):
  """Normal numbers, a bucket of zeros, one with a NaN, zeros and their negatives."""
  x = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
  x[::7], x[3::11] = 0.0, -0.0
  x[32:64], x[100] = 0.0, np.nan
  return x


@pytest.mark.parametrize("codec", [MEAN, ONE], ids=laws.name)
@pytest.mark.parametrize("size", [131, 1024, 2100])
def test_payload_is_the_oracles(codec, size):
  x = leaf(size)
  payload = laws.encoder(codec)(jnp.asarray(x), None)
  rows = np.asarray(payload.rows)
  scales = sign.scales_of(x, **hyper(codec))
  if codec is MEAN:
    own = rows[:, 32:].view(np.float32)
    # Sums of 32 magnitudes in binary32, by halves: five roundings.
    np.testing.assert_allclose(own, scales, rtol=5 * 2.0**-24)
    scales = own
  np.testing.assert_array_equal(rows, sign.encode(x, **hyper(codec), scales=scales))
  expected = sign.values(x, **hyper(codec))
  if codec is ONE:
    assert_same_floats(laws.decoder(codec, x.shape)(payload), expected)


def test_a_bucket_of_zeros_is_zeros_and_a_zero_is_positive():
  x = np.zeros(96, np.float32)
  x[70] = -2.0
  for codec, scale in ((MEAN, 2.0 / 32), (ONE, 1.0)):
    expected = np.zeros(96, np.float32)
    expected[64:] = scale
    expected[70] = -scale
    assert_same_floats(laws.round_trip(codec, x), expected)


def test_equal_magnitudes_are_exact():
  x = np.float32(0.3) * np.where(np.random.default_rng(1).random(999) < 0.5, -1, 1)
  x = x.astype(np.float32)
  assert_same_floats(laws.round_trip(Sign(), x), x)


def test_it_is_a_contraction():
  """``|x - Q(x)|^2 = |x|^2 - d s^2`` in each bucket, as EF-signSGD has it."""
  x = laws.gaussian(64 * 40).reshape(40, 64)
  left = np.float64(x) - np.float64(laws.round_trip(Sign(), x))
  energy, found = (np.float64(x) ** 2).sum(1), (left**2).sum(1)
  scale = np.abs(np.float64(x)).mean(1)
  # Two roundings of a scale in binary32.
  np.testing.assert_allclose(found, energy - 64 * scale**2, rtol=1e-5)
  assert (found < energy).all()


def averaged(codec, x, exchange):
  tx = gradcomp.compress(codec, axis_name="data", exchange=exchange, feedback=None)
  outputs, *_ = modes.run_all("vmap", tx, [{"w": jnp.asarray(x)}])
  return np.asarray(outputs[0]["w"][0])


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
@pytest.mark.parametrize("codec", [ONE, VOTE], ids=laws.name)
@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_signs_are_counted_exactly(codec, exchange, workers):
  """By hand: ties, buckets that abstain, and a NaN of one worker."""
  x = np.stack([leaf(2500, seed) for seed in range(workers)])
  x[1, 32:64] = -1.0  # here the others do not vote
  x[:, 200:232] = np.random.default_rng(9).choice([-1.0, 1.0], (workers, 32))
  values = [sign.values(one, **hyper(codec)) for one in x]
  expected = sign.vote(values, codec.vote)
  assert np.isnan(expected[96:128]).all()
  assert_same_floats(averaged(codec, x, exchange), expected)


def test_a_tie_is_zero():
  x = np.ones((4, 64), np.float32)
  x[:2, :32] = -1
  expected = np.where(np.arange(64) < 32, 0.0, 1.0)
  for exchange in ("all_gather", "two_shot"):
    np.testing.assert_array_equal(averaged(VOTE, x, exchange), expected)


@pytest.mark.parametrize("codec", [ONE, VOTE], ids=laws.name)
@pytest.mark.parametrize("workers", [1, 3, 7, 200])
def test_owners_send_the_pages_words(codec, workers):
  """In as few bits as hold every count, with NaN as the code 0, which is free."""
  rng = np.random.default_rng(workers)
  most = workers if codec.vote == "mean" else 1
  counts = np.float32(rng.integers(-most, most + 1, (3, 32, 32)))
  counts[0, 0, 0], counts[0, 0, 1], counts[1, 3] = most, -most, np.nan

  @jax.jit
  def finished(counts):
    partial, nothing = gradcomp.codecs.Partial(counts), gradcomp.codecs.NOTHING
    return codec.sums.finish(partial, nothing, None, workers, keep=False).rows

  words = np.asarray(finished(counts))
  told = dict(bucket_size=32, vote=codec.vote)
  assert_same_floats(
    sign.unpack_votes(words, counts.size, workers, **told), counts.ravel()
  )
  bits = int(np.ceil(np.log2(2 * most + 2)))
  assert len(words) == -(-3 * 32 // (32 // bits))


def test_small_leaves_are_encoded_too():
  """Their plain mean would be a gradient among signs."""
  tx = gradcomp.compress(VOTE, axis_name="data", feedback=None)
  grads = {"w": jnp.full((3, 4096), -5.0), "b": jnp.full((3, 2), 0.01)}
  outputs, *_ = modes.run_all("vmap", tx, [grads])
  np.testing.assert_array_equal(outputs[0]["b"], 1.0)
  np.testing.assert_array_equal(outputs[0]["w"], -1.0)


def test_ef_signsgd_keeps_what_it_does_not_send():
  tx = gradcomp.compress(Sign())
  x = jnp.asarray(laws.gaussian(4096))
  update, state = tx.update(x, tx.init(x))
  np.testing.assert_array_equal(state.residual, x - update)
