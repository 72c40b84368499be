"""Rounds to floats of few bits, by the page's section FloatCast and Han et al. 2021."""

from fractions import Fraction
from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
  """The arguments of ``FloatFormat``, and what the definition says of them."""

  e: int
  m: int
  specials: str = "ieee"
  subnormals: bool = True
  given_bias: int | None = None

  @property
  def options(self):
    """The keyword arguments of ``FloatFormat``."""
    special = {"specials": self.specials, "subnormals": self.subnormals}
    return special | {"bias": self.given_bias}

  @property
  def bias(self):
    if self.given_bias is not None:
      return self.given_bias
    return 2 ** (self.e - 1) - (0 if self.specials == "negative_zero" else 1)

  @property
  def bits(self):
    return 1 + self.e + self.m

  @property
  def max_code(self):
    """The code of the largest number."""
    if self.specials == "ieee":
      return (2**self.e - 1) * 2**self.m - 1
    return 2 ** (self.e + self.m) - (2 if self.specials == "nan" else 1)

  @property
  def nan_code(self):
    """The quiet NaN; for `none`, which has no NaN, what is not checked."""
    if self.specials == "ieee":
      return self.max_code + 1 + (2 ** (self.m - 1) if self.m else 0)
    return self.max_code + 1

  @property
  def infinity_code(self):
    """What is too large; finite for `none`, NaN where there is no infinity."""
    return self.max_code + (self.specials != "none")


def magnitudes(fmt):
  """All numbers that are not negative, by their codes, and the one after the last."""
  code = np.arange(fmt.max_code + 2)
  field, mantissa = code >> fmt.m, code % 2**fmt.m
  small = np.ldexp(mantissa.astype(np.float64), 1 - fmt.bias - fmt.m)
  if not fmt.subnormals:
    small[:] = 0
  large = np.ldexp(1 + mantissa / 2**fmt.m, field - fmt.bias)
  return np.where(field == 0, small, large)


def decode(codes, fmt):
  """What codes stand for, float32."""
  codes = np.asarray(codes, np.int64)
  magnitude = codes % 2 ** (fmt.bits - 1)
  field, mantissa = magnitude >> fmt.m, magnitude % 2**fmt.m
  whole = np.where(field > 0, mantissa + 2**fmt.m, mantissa * fmt.subnormals)
  value = np.ldexp(whole.astype(np.float64), np.maximum(field, 1) - fmt.bias - fmt.m)
  value = np.where(magnitude > fmt.max_code, np.nan, value)
  if fmt.specials == "ieee":
    value = np.where(magnitude == fmt.max_code + 1, np.inf, value)
  negative = codes >= 2 ** (fmt.bits - 1)
  if fmt.specials == "negative_zero":
    value = np.where(codes == 2 ** (fmt.bits - 1), np.nan, value)
    negative = negative & (value != 0)  # nor is an unused code minus zero
  return np.where(negative, -value, value).astype(np.float32)


def _finished(code, x, fmt, to_largest):
  """Codes of magnitudes with overflow, infinities, NaN and signs: uint32."""
  top = fmt.max_code if to_largest else fmt.infinity_code
  code = np.where(code > fmt.max_code, top, code)
  code = np.where(np.isinf(x), fmt.infinity_code, code)
  code = np.where(np.isnan(x), fmt.nan_code, code)
  sign = np.signbit(x)
  if fmt.specials == "negative_zero":
    code = np.where(code > fmt.max_code, 0, code)
    sign = (sign & (code > 0)) | (np.abs(x) > magnitudes_top(fmt)) & (code == 0)
    sign |= np.isnan(x)
  return (code + (sign.astype(np.int64) << (fmt.bits - 1))).astype(np.uint32)


def magnitudes_top(fmt):
  """The largest number."""
  return float(decode(np.array([fmt.max_code]), fmt)[0])


def encode_by_table(x, fmt):
  """The codes of the nearest numbers; between two equally near ones, the even code."""
  x = np.asarray(x, np.float32)
  table = magnitudes(fmt)
  codes = np.arange(len(table))
  if not fmt.subnormals:
    keep = (codes == 0) | (codes >= 2**fmt.m)
    table, codes = table[keep], codes[keep]
  size = np.where(np.isnan(x), 0, np.abs(x)).astype(np.float64)
  above = np.clip(np.searchsorted(table, size, "right"), 1, len(table) - 1)
  middle = (table[above - 1] + table[above]) / 2  # exact: neighbors
  odd = codes[above - 1] % 2 == 1
  up = (size > middle) | (size == middle) & odd
  return _finished(codes[above - 1 + up], x, fmt, to_largest=False)


def encode(x, fmt, rounding="nearest_even", *, draws=None, saturate=False):
  """The codes of numbers, uint32; draws are the 32-bit R of stochastic rounding."""
  x = np.asarray(x)
  to_largest = saturate or rounding == "toward_zero" or fmt.specials == "none"
  if rounding == "stochastic":
    return _finished(_stochastic(x, fmt, draws), x, fmt, to_largest)
  # Quanta are counted in float64, where every step is exact.
  size = np.where(np.isfinite(x), np.abs(x), 0).astype(np.float64)
  exponent = np.where(size > 0, np.frexp(size)[1].astype(np.int64) - 1, -2000)
  exponent = np.maximum(exponent, 1 - fmt.bias)
  field = exponent + fmt.bias  # 1 for subnormal numbers, which share the quantum
  below = (size < 2.0 ** (1 - fmt.bias)) & (not fmt.subnormals)
  count = np.ldexp(size, np.where(below, -exponent, fmt.m - exponent))
  whole = np.floor(count)
  code = whole.astype(np.int64) + ((field - 1) << fmt.m)
  if rounding == "nearest_even":
    rest = count - whole
    # Without subnormal numbers half of the smallest is zero: both codes may be even.
    code = code + ((rest > 0.5) | (rest == 0.5) & (code % 2 == 1) & ~below)
  code = np.where(below, code << fmt.m, code)
  return _finished(code, x, fmt, to_largest)


def _stochastic(x, fmt, draws):
  """The page's rule: random bits are added to those that are dropped."""
  word = x.astype(np.float32).view(np.uint32).astype(np.int64)
  field, mantissa = word >> 23 & 255, word & (2**23 - 1)
  significand = np.where(field > 0, mantissa + 2**23, mantissa)
  field = np.maximum(field, 1) - 127 + fmt.bias
  drop = 23 - fmt.m + np.maximum(1 - field, 0)
  step = np.where((field < 1) & (not fmt.subnormals), fmt.m, 0)
  drop = drop + step
  significand >>= np.maximum(drop - 31, 0)
  drop = np.minimum(drop, 31)
  random = np.asarray(draws, np.int64) >> (32 - drop)
  code = (significand + random >> drop) << step
  return code + (np.maximum(field, 1) - 1 << fmt.m)


def quantize(x, fmt, rounding="nearest_even", **options):
  """The numbers of the format that numbers round to, float32; NaN stays NaN."""
  values = decode(encode(x, fmt, rounding, **options), fmt)
  return np.where(np.isnan(x), np.float32(np.nan), values)


def round_exactly(x, fmt):
  """A rational number to the nearest one of the format: a float, for any format."""
  size, exponent = abs(Fraction(x)), 1 - fmt.bias
  while size >= Fraction(2) ** (exponent + 1):
    exponent += 1
  quantum = Fraction(2) ** (exponent - fmt.m)
  whole, rest = divmod(size, quantum)
  code = int(whole) + (exponent + fmt.bias - 1 << fmt.m)
  code += 2 * rest > quantum or (2 * rest == quantum and code % 2 == 1)
  if code > fmt.max_code:
    code = fmt.infinity_code
  value = float(decode(np.array([code]), fmt)[0])
  return -value if x < 0 else value
