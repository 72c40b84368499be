"""Signs are the page's, their sums are counted exactly, and most workers decide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.codecs.sums.records import NOTHING
from gradcomp._src.codecs.sums.sum import Partial
from gradcomp.codecs import Sign
from tests.plugins.slow_cases import slow
from tests.specs import sign
from tests.support import laws, modes
from tests.support.assertions import assert_same_floats

MEAN = Sign(bucket_size=32)
ONE = Sign(bucket_size=32, scale="one")
VOTE = Sign(bucket_size=32, scale="one", vote="majority")


def leaf(size, seed=0):
  """Normal numbers, a bucket of zeros, one with a NaN, zeros and their negatives."""
  x = laws.gaussian(size, seed)
  x[::7], x[3::11] = 0.0, -0.0
  x[32:64], x[100] = 0.0, np.nan
  return x


def test_a_bucket_of_zeros_is_zeros_and_a_zero_is_positive():
  x = np.zeros(96, np.float32)
  x[70] = -2.0
  for codec, scale in ((MEAN, 2.0 / 32), (ONE, 1.0)):
    expected = np.zeros(96, np.float32)
    expected[64:] = scale
    expected[70] = -scale
    assert_same_floats(laws.round_trip(codec, x), expected)


def test_it_is_a_contraction():
  """``|x - Q(x)|^2 = |x|^2 - d s^2`` in each bucket, as EF-signSGD has it."""
  x = laws.gaussian(64 * 40).reshape(40, 64)
  left = np.float64(x) - np.float64(laws.round_trip(Sign(), x))
  energy, found = (np.float64(x) ** 2).sum(1), (left**2).sum(1)
  scale = np.abs(np.float64(x)).mean(1)
  # Two roundings of a scale in binary32.
  np.testing.assert_allclose(found, energy - 64 * scale**2, rtol=1e-5)
  assert (found < energy).all()


@pytest.mark.parametrize(
  "codec, exchange, workers",
  [
    (ONE, "two_shot", 3),
    (VOTE, "two_shot", 4),
    (VOTE, "all_gather", 4),
    *slow(*((x, "all_gather", n) for x in (ONE, VOTE) for n in (2, 3, 5))),
    *slow(*((x, "two_shot", n) for x in (ONE, VOTE) for n in (2, 5))),
  ],
  ids=str,
)
def test_signs_are_counted_exactly(codec, exchange, workers):
  """By hand: ties, which are zero, buckets that abstain, and a NaN of one worker."""
  x = np.stack([leaf(2500, seed) for seed in range(workers)])
  x[1, 32:64] = -1.0  # here the others do not vote
  x[:, 200:232] = np.random.default_rng(9).choice([-1.0, 1.0], (workers, 32))
  x[:, 320:352], x[: workers // 2, 320:352] = 1, -1
  values = [sign.values(one, bucket_size=32, scale=codec.scale) for one in x]
  expected = sign.vote(values, codec.vote)
  assert np.isnan(expected[96:128]).all()
  assert workers % 2 or not expected[320:352].any()
  (output,), _ = modes.run("vmap", laws.compressed(codec, exchange), [{"w": x}])
  assert_same_floats(output["w"][0], expected)


@pytest.mark.parametrize("codec", [ONE, VOTE], ids=laws.name)
@pytest.mark.parametrize("workers", [1, 3, 200])
def test_owners_send_the_pages_words(codec, workers):
  """In as few bits as hold every count, with NaN as the code 0, which is free."""
  rng = np.random.default_rng(workers)
  most = workers if codec.vote == "mean" else 1
  counts = np.float32(rng.integers(-most, most + 1, (3, 32, 32)))
  counts[0, 0, 0], counts[0, 0, 1], counts[1, 3] = most, -most, np.nan
  finish = lambda x: codec.sums.finish(Partial(x), NOTHING, workers, keep=False).rows
  words = np.asarray(jax.jit(finish)(counts))
  read = sign.unpack_votes(words, counts.size, workers, bucket_size=32, vote=codec.vote)
  assert_same_floats(read, counts.ravel())
  bits = int(np.ceil(np.log2(2 * most + 2)))
  assert len(words) == -(-3 * 32 // (32 // bits))


def test_small_leaves_are_encoded_too():
  """Their plain mean would be a gradient among signs."""
  tx = gradcomp.compress(VOTE, axis_name="data", feedback=None)
  grads = {"w": jnp.full((3, 4096), -5.0), "b": jnp.full((3, 2), 0.01)}
  (output,), _ = modes.run("vmap", tx, [grads])
  np.testing.assert_array_equal(output["b"], 1.0)
  np.testing.assert_array_equal(output["w"], -1.0)
