"""Dense rounds 16-bit floats at random to their neighbors, and is unbiased."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gradcomp
from gradcomp._src.testing.noise import mean_is_the_leaf
from gradcomp.codecs import Dense
from tests.specs import dense
from tests.support import laws

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def codec_of(dtype):
  return Dense(dtype=dtype, rounding="stochastic")


def edges(dtype):
  """Numbers of the format, what is just beside them, and floats of all sizes."""
  rng = np.random.default_rng(0)
  words = rng.integers(0, 2**32, 2**14, dtype=np.uint32).view(np.float32)
  words = words[~np.isnan(words)]  # NaN has many codes
  with np.errstate(over="ignore"):
    numbers = words.astype(DTYPES[dtype]).astype(np.float32)
  beside = np.float32(-np.inf), np.float32(np.inf)
  sizes = laws.gaussian(2**14) * 2.0 ** rng.integers(-45, 20, 2**14)
  parts = [words, numbers, *(np.nextafter(numbers, side) for side in beside), sizes]
  return np.concatenate(parts).astype(np.float32)


@every_dtype
def test_codes_are_the_neighbors_of_the_definition(dtype):
  """Exactly, with the same bits: subnormal numbers, overflow and infinities too."""
  x = edges(dtype)
  found = laws.encoder(codec_of(dtype))(jnp.asarray(x), laws.KEY)
  expected = dense.encode(x, dtype=DTYPES[dtype], key=np.asarray(laws.KEY))
  np.testing.assert_array_equal(found.rows, expected)


@every_dtype
def test_the_definition_is_unbiased(dtype):
  """All 2^16 draws have the number as mean, where docs/methods/codecs.md says so."""
  draws = np.arange(2**16)
  rng = np.random.default_rng(1)
  exact = 2.0 ** rng.integers(-17 if dtype == "float16" else -126, 15, 40)
  tiny = 2.0 ** rng.integers(-44, -17, 40)
  for scale, short in ((exact, 0), (tiny, 0 if dtype == "bfloat16" else 2.0**-40)):
    for x in (rng.uniform(1, 2, 40) * scale * rng.choice([-1, 1], 40)).astype("f4"):
      values = dense.stochastic(np.full(2**16, x), DTYPES[dtype], draws)
      mean = np.float64(values).mean()  # exact: 2^16 multiples of one power of two
      assert 0 <= abs(x) - abs(mean) <= short


@every_dtype
def test_stochastic_rounding_is_unbiased(dtype):
  x = np.concatenate([laws.gaussian(300), 1e-5 * laws.gaussian(200, 1)])
  steps = np.spacing(np.abs(x).astype(DTYPES[dtype])).astype(np.float32)
  mean_is_the_leaf(codec_of(dtype), x, draws=600, step=steps)


@every_dtype
def test_what_the_nearest_rounding_makes_infinite_is_infinite(dtype):
  """And nothing else: numbers above the largest stay at the largest until halfway."""
  info = ml_dtypes.finfo(DTYPES[dtype])
  largest = np.float32(info.max)
  halfway = largest + np.float32(2.0 ** (info.maxexp - info.nmant - 2))
  below = np.nextafter(halfway, np.float32(0))
  finite = np.float32([largest, np.nextafter(largest, np.float32(np.inf)), below])
  infinite = np.float32([halfway, np.nextafter(halfway, np.float32(np.inf)), np.inf])
  x = np.repeat(np.concatenate([finite, infinite]), 100)
  x = np.concatenate([x, -x])
  expected = np.repeat(np.float32([largest] * 3 + [np.inf] * 3), 100)
  expected = np.concatenate([expected, -expected])
  np.testing.assert_array_equal(laws.round_trip(codec_of(dtype), x), expected)
  np.testing.assert_array_equal(laws.round_trip(Dense(dtype=dtype), x), expected)


@every_dtype
def test_nan_never_becomes_a_number_nor_an_infinity(dtype):
  """Whatever its bits are: adding random ones could carry out of them."""
  words = np.uint32([0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0x7F80FFFF])
  x = np.repeat(np.concatenate([words, words | 1 << 31]).view(np.float32), 100)
  assert np.isnan(laws.round_trip(codec_of(dtype), x)).all()


@every_dtype
def test_no_residual_is_kept_and_the_mean_of_workers_is_unbiased(dtype):
  """Each worker draws bits of its own, in both stages, and sums are in float32."""
  x = jnp.asarray(laws.gaussian(512))
  exchange = gradcomp.exchange.TwoShot(feedback=False)
  tx = gradcomp.dense(
    dtype, rounding="stochastic", axis_name="data", exchange=exchange, min_leaf_size=0
  )
  state = tx.init({"w": x})
  assert state.residual is None and state.server_residual is None
  update = lambda x: tx.update({"w": x}, state)[0]["w"]
  means = jax.jit(jax.vmap(update, axis_name="data"))(jnp.stack([x] * 64))
  np.testing.assert_array_equal(means, jnp.stack([means[0]] * 64))
  steps = np.spacing(np.abs(np.asarray(x)).astype(DTYPES[dtype])).astype(np.float32)
  # The mean of 64 workers is rounded once more, and is up to a step off. Errors of all
  # elements together have a standard error of half a step, over the root of 512: five.
  error = np.asarray(means[0]) - x
  assert (np.abs(error) <= 1.5 * steps).all()
  assert abs((error / steps).mean()) <= 5 * 0.5 / np.sqrt(512)


def test_facts():
  for dtype in DTYPES:
    codec, nearest = codec_of(dtype), Dense(dtype=dtype)
    assert codec.unbiased and codec.needs_key
    assert not nearest.unbiased and not nearest.needs_key
    assert codec != nearest
  assert Dense().unbiased and not Dense().needs_key
