"""Computes FloatCast, its scaling and its exchanges in plain NumPy.

From docs/inside/wire-format.md, section FloatCast, and Han et al. 2021, algorithm 1.
"""

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from tests.oracles import qsgd
from tests.oracles.float_sums import ordered
from tests.oracles.floats import Format, decode, encode

WORDS = 128  # of a row
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
  with np.errstate(over="ignore"):
    result = np.ldexp(x.astype(np.float64), exponent).astype(np.float32)
  tiny = (np.abs(x) < TINY) | (np.abs(np.ldexp(x.astype(np.float64), exponent)) < TINY)
  return np.where(tiny, np.copysign(np.float32(0), x), result)


class Cast(NamedTuple):
  """A leaf's FloatCast: the format, the rounding, and how it is scaled.

  Attributes:
    fmt: the format.
    rounding: as in :func:`encode`.
    byte: the agreed byte of APS, or None.
    scale: the constant factor where there is no byte.
    addends: N.
  """

  fmt: Format
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
    flat = qsgd.as_leaf(x)
    draws = None
    if self.rounding == "stochastic":
      tiles = -(-flat.size // (32 // self.width * WORDS))
      lanes = qsgd.random_lanes(key, tiles, bits=self.width, bucket_size=WORDS)
      lanes = qsgd.signed_lanes(lanes.ravel()[: flat.size], flat)
      draws = lanes.astype(np.int64) << 16
    codes = encode(
      self.scaled(flat),
      self.fmt,
      self.rounding,
      draws=draws,
      saturate=self.byte is not None,
    )
    return qsgd.pack(codes, self.width, WORDS)

  def values(self, rows, size):
    """What codes stand for, scale included: float32[size]. m = 0 has NaN alone."""
    values = decode(qsgd.unpack(rows, size, self.width), self.fmt)
    return np.where(np.isinf(values), np.nan, values) if self.fmt.m == 0 else values

  def decode(self, rows, size):
    return self.unscaled(self.values(rows, size))


def exchange(x, cast, order, *, group_size=None, accumulate="format", keys=None):
  """The mean of the leaves x[N, size] of N workers, and what each one sent.

  Args:
    x: float32[N, size].
    cast: a :class:`Cast`, with the agreed byte.
    order: the name of an exchange.
    group_size: of "hierarchical".
    accumulate: as in :func:`ordered`.
    keys: a key for each worker, for stochastic rounding.

  Returns:
    float32[size] and float32[N, size].
  """
  workers, size = x.shape
  rows = [cast.encode(x[i], keys and keys[i]) for i in range(workers)]
  tile = 32 // cast.width * WORDS
  tiles = -(-size // tile)
  share = -(-tiles // workers) * tile
  values = np.zeros((workers, workers * share), np.float32)
  for i in range(workers):
    values[i, :size] = cast.values(rows[i], size)
  shares = values.reshape(workers, workers, share)
  sums = ordered(
    shares, cast.fmt, order, group_size, accumulate, saturate=cast.byte is not None
  )
  mean = sums.ravel()[:size] * (np.float32(1) / np.float32(workers))
  sent = np.stack([cast.decode(row, size) for row in rows])
  return cast.unscaled(mean), sent
