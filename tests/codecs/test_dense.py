"""Dense rounds to the neighbors among floats of 16 bits, and at random is unbiased."""

import ml_dtypes
import numpy as np
import pytest

from gradcomp.codecs import Dense
from tests.specs import dense
from tests.support import laws

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def edges(dtype):
  """Numbers of the format, what is just beside them, and floats of all sizes."""
  rng = np.random.default_rng(0)
  words = rng.integers(0, 2**32, 2**14, dtype=np.uint32).view(np.float32)
  words = words[~np.isnan(words)]  # NaN has many codes
  with np.errstate(over="ignore"):
    numbers = words.astype(DTYPES[dtype]).astype(np.float32)
  beside = np.float32(-np.inf), np.float32(np.inf)
  sizes = laws.gaussian(2**14) * 2.0 ** rng.integers(-45, 20, 2**14)
  info = ml_dtypes.finfo(DTYPES[dtype])
  largest = np.float32(info.max)
  ends = np.float32([largest, largest + 2.0 ** (info.maxexp - info.nmant - 2)])
  numbers = np.concatenate([numbers, np.repeat(ends, 100), np.repeat(-ends, 100)])
  parts = [words, numbers, *(np.nextafter(numbers, side) for side in beside), sizes]
  return np.concatenate(parts).astype(np.float32)


@every_dtype
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_codes_are_the_neighbors_of_the_definition(dtype, rounding):
  """Exactly, with the same bits: subnormal numbers, overflow and infinities too."""
  codec = Dense(dtype=dtype, rounding=rounding)
  x = edges(dtype)
  if rounding == "nearest":  # XLA:CPU flushes subnormal floats to zero in casts
    x = x[(np.abs(x) >= 2.0**-126) | (x == 0)]
  key = laws.KEY if codec.needs_key else None
  expected = dense.encode(x, dtype=DTYPES[dtype], key=key)
  np.testing.assert_array_equal(laws.encoder(codec)(x, laws.KEY).rows, expected)
  # Whatever the bits of a NaN are: adding random ones could carry out of them.
  words = np.uint32([0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0x7F80FFFF])
  bad = np.repeat(np.concatenate([words, words | 1 << 31]).view(np.float32), 100)
  assert np.isnan(laws.round_trip(codec, bad)).all()


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
