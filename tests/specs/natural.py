"""Natural: definition 2 of Horvath et al. 2019, with the page's range and bits."""

import numpy as np

from tests.specs import dithers, planes

SMALLEST, LARGEST = 2.0**-62, 2.0**63


def neighbors(x):
  """The numbers around each magnitude, and the chance of the upper one, float64."""
  with np.errstate(invalid="ignore"):  # NaN, and infinity less a power of two
    size = np.abs(np.float64(x))
    _, exponent = np.frexp(size)  # size = f * 2^exponent with f from 1/2 on, below 1
    lower = np.where(size < SMALLEST, 0.0, np.ldexp(1.0, exponent - 1))
    upper = np.where(size < SMALLEST, SMALLEST, 2 * lower)
    return lower, upper, (size - lower) / (upper - lower)


def values(x, r=None):
  """The values that elements become, float64, by 16-bit integers `r`."""
  lower, upper, chance = neighbors(x)
  if r is None:
    even = (upper > SMALLEST) & (np.frexp(upper)[1] % 2 == 0)
    up = (chance > 0.5) | ((chance == 0.5) & even)
  else:
    up = chance + r / 2.0**16 >= 1
  value = np.where(up, upper, lower)
  value = np.where(~np.isfinite(x) | (value > LARGEST), np.nan, value)
  return np.where(np.signbit(x), -value, value)


def encode(x, *, key=None):
  """The rows of a leaf, uint32[tiles, 128]; without a key rounded to nearest."""
  flat = planes.as_leaf(x)
  r = None if key is None else dithers.of_leaf(key, flat, bits=8)
  value = values(flat, r)
  _, exponent = np.frexp(value)  # of a power of two, one above its own
  field = np.where(value == 0, 0, exponent + 62)
  field = np.where(np.isnan(value), 127, field)
  return planes.pack(field + 128 * np.signbit(flat), 8, planes.ROW_WORDS)


def decode(rows, size):
  codes = planes.unpack(planes.checked_rows(rows, size, 4, planes.ROW_WORDS), 8)
  planes.refuse_filler(codes[size:])
  negative, field = np.divmod(codes[:size].astype(np.int64), 128)
  value = np.where(field == 0, 0.0, np.ldexp(1.0, field - 63))
  value = np.where(field == 127, np.nan, value)
  return np.where(negative == 1, -value, value).astype(np.float32)
