"""Computes natural compression in plain NumPy, for the library to agree with.

From Horvath et al. 2019, definition 2, with the range and the random numbers of
docs/inside/wire-format.md, section Natural.
"""

import numpy as np

from tests.oracles import qsgd

SMALLEST, LARGEST = 2.0**-62, 2.0**63
WORDS = 128  # of a row


def neighbors(x):
  """The numbers around each magnitude, and the chance of the upper one, float64.

  They are powers of two; below the smallest one, zero and that one.
  """
  with np.errstate(invalid="ignore"):  # NaN, and infinity less a power of two
    size = np.abs(np.float64(x))
    _, exponent = np.frexp(size)  # size = f * 2^exponent with f from 1/2 on, below 1
    lower = np.where(size < SMALLEST, 0.0, np.ldexp(1.0, exponent - 1))
    upper = np.where(size < SMALLEST, SMALLEST, 2 * lower)
    return lower, upper, (size - lower) / (upper - lower)


def natural(x, r):
  """The values that elements become, float64, by 16-bit integers `r`.

  All is exact in binary64: a chance has 24 significant bits, and 16 with `r`.
  """
  lower, upper, chance = neighbors(x)
  value = np.where(chance + r / 2.0**16 >= 1, upper, lower)
  seen = ~np.isfinite(x) | (value > LARGEST)
  value = np.where(seen, np.nan, value)
  return np.where(np.signbit(x), -value, value)


def nearest(x):
  """The nearest values, float64; of two equally near, the one with the even code."""
  lower, upper, chance = neighbors(x)
  even = np.where(upper > SMALLEST, np.frexp(upper)[1] % 2 == 0, False)
  value = np.where((chance > 0.5) | ((chance == 0.5) & even), upper, lower)
  value = np.where(~np.isfinite(x) | (value > LARGEST), np.nan, value)
  return np.where(np.signbit(x), -value, value)


def natural_encode(x, key):
  """The payload, uint32[tiles, 128]; without a key rounded to nearest."""
  flat = qsgd.as_leaf(x)
  if key is None:
    return codes(flat, nearest(flat))
  tiles = -(-flat.size // (4 * WORDS))
  lanes = qsgd.random_lanes(key, tiles, bits=8, bucket_size=WORDS)
  return codes(flat, natural(flat, qsgd.signed_lanes(lanes.ravel()[: flat.size], flat)))


def codes(flat, value):
  """The rows of values, with the signs of `flat`."""
  _, exponent = np.frexp(value)  # of a power of two, one above its own
  field = np.where(value == 0, 0, exponent + 62)
  field = np.where(np.isnan(value), 127, field)
  return qsgd.pack(field + 128 * np.signbit(flat), 8, WORDS)
