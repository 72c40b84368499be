"""FloatCast, its scaling and its exchanges, as in Han et al. 2021, algorithm 1."""

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from tests.specs import dithers, floats, planes
from tests.specs.float_sums import ordered

TINY = 2.0**-126  # the smallest normal number of float32


def aps_byte(x, addends=1):
  """The exponent that a leaf needs, an integer from 0 to 255: exact, in integers."""
  largest = np.abs(np.asarray(x, np.float32)).max(initial=0)
  if not np.isfinite(x).all():
    return 255
  if largest < TINY:
    return 0
  n, d = (addends * Fraction(float(largest))).as_integer_ratio()
  return max(1, _ceil_log2(n, d) - _ceil_log2(addends) + 126)


def aps_shift(byte, e, addends=1):
  """The f of the page: elements are cast after a product with 2^f."""
  return 0 if byte == 0 else 2 ** (e - 1) - 1 - (byte - 126 + _ceil_log2(addends))


def _ceil_log2(n, d=1):
  """The smallest k for which 2^k >= n / d."""
  k = n.bit_length() - d.bit_length() - 1
  while Fraction(2) ** k * d < n:
    k += 1
  return k


def shifted(x, exponent):
  """x * 2^exponent, float32; zero below 2^-126, as are subnormal elements."""
  x = np.asarray(x, np.float32)
  wide = np.ldexp(x.astype(np.float64), exponent)
  with np.errstate(over="ignore"):
    result = wide.astype(np.float32)
  tiny = (np.abs(x) < TINY) | (np.abs(wide) < TINY)
  return np.where(tiny, np.copysign(np.float32(0), x), result)


class Cast(NamedTuple):
  """A leaf's FloatCast: by APS' agreed byte for N addends, or a constant scale."""

  fmt: floats.Format
  rounding: str = "nearest_even"
  byte: int | None = None
  scale: float = 1.0
  addends: int = 1

  @property
  def width(self):
    """The bits that a code travels in."""
    return next(b for b in (4, 8, 16, 32) if b >= self.fmt.bits)

  @property
  def shift(self):
    return aps_shift(self.byte, self.fmt.e, self.addends)

  def scaled(self, x):
    x = np.asarray(x, np.float32)
    if self.byte is not None:
      return shifted(x, self.shift)
    with np.errstate(over="ignore", invalid="ignore"):
      return x * np.float32(self.scale)

  def unscaled(self, values):
    """Takes the scale off; with a byte of 255 all is NaN."""
    values = np.asarray(values, np.float32)
    if self.byte == 255:
      return np.full_like(values, np.nan)
    if self.byte is not None:
      return shifted(values, -self.shift)
    with np.errstate(over="ignore", invalid="ignore"):
      return values * np.float32(1 / self.scale)

  def encode(self, x, key=None):
    """The payload, uint32[tiles, 128]."""
    flat, draws = planes.as_leaf(x), None
    if self.rounding == "stochastic":
      draws = dithers.of_leaf(key, flat, bits=self.width).astype(np.int64) << 16
    options = dict(draws=draws, saturate=self.byte is not None)
    codes = floats.encode(self.scaled(flat), self.fmt, self.rounding, **options)
    return planes.pack(codes, self.width, planes.ROW_WORDS)

  def values(self, rows, size):
    """What codes stand for, scale included: float32[size]. m = 0 has NaN alone."""
    rows = planes.checked_rows(rows, size, 32 // self.width, planes.ROW_WORDS)
    codes, used = planes.unpack(rows, self.width), self.fmt.bits
    if used < 32 and (codes >> np.uint32(used)).any():
      raise ValueError(f"bits {used} to {self.width - 1} of a code must be zero.")
    if self.byte != 255:
      planes.refuse_filler(codes[size:])
    values = floats.decode(codes[:size], self.fmt)
    if self.byte not in (None, 255) and not np.isfinite(values).all():
      raise ValueError("with a byte every code must be that of a number.")
    return np.where(np.isinf(values), np.nan, values) if self.fmt.m == 0 else values

  def decode(self, rows, size):
    return self.unscaled(self.values(rows, size))


def cast_of(*, exponent_bits, mantissa_bits, **how):
  """The cast of a codec's fields; ``how`` has other fields of :class:`Cast`."""
  return Cast(floats.Format(exponent_bits, mantissa_bits), **how)


def encode(x, *, key=None, **fields):
  """The rows of a leaf, uint32[tiles, 128]; fields of :func:`cast_of`."""
  return cast_of(**fields).encode(x, key)


def decode(rows, size, **fields):
  """The values of a payload, float32[size]; fields of :func:`cast_of`."""
  return cast_of(**fields).decode(rows, size)


def exchange(x, cast, order, *, group_size=None, accumulate="format", keys=None):
  """The mean of the leaves x[N, size] of N workers, and what each one sent."""
  workers, size = x.shape
  rows = [cast.encode(x[i], keys and keys[i]) for i in range(workers)]
  tile = 32 // cast.width * planes.ROW_WORDS
  share = -(-size // (tile * workers)) * tile
  values = np.stack([cast.values(row, size) for row in rows])
  padded = np.pad(values, ((0, 0), (0, workers * share - size)))
  shares, saturate = padded.reshape(workers, workers, share), cast.byte is not None
  sums = ordered(shares, cast.fmt, order, group_size, accumulate, saturate)
  mean = sums.ravel()[:size] * (np.float32(1) / np.float32(workers))
  sent = np.stack([cast.decode(row, size) for row in rows])
  return cast.unscaled(mean), sent
