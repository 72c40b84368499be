"""Rules of fixed levels for a plane: QSGD's, TernGrad's and 8-bit types'."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common import fixed_point, planes
from gradcomp._src.kernels.common.fixed_point import Divide, Lane, divide
from gradcomp._src.kernels.gpu.tiles import Operand
from gradcomp._src.kernels.quantize import Line, ScaledForm, coordinate

Packing = Literal["2bit", "base3"]

_TRITS = 20  # in a word: 3**20 < 2**32
# floor(2**64 * (2**32 - 3**20) / 3**20), as two words.
_EXCESS = ((2**32 - 3**_TRITS) << 64) // 3**_TRITS
_EXCESS_HIGH, _EXCESS_LOW = _EXCESS >> 32, _EXCESS & (2**32 - 1)

_SIGN = 1 << 7  # of a code of 8 bits
_LARGEST = np.finfo(np.float32).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class Equal(ScaledForm):
  """The options of QSGD: equal levels under a scale."""

  levels: Literal["sign_magnitude", "uniform"] = "sign_magnitude"

  name: ClassVar[str] = "qsgd"

  @property
  def intervals(self) -> int:
    """``s``: equal intervals on [0, norm], or on [-norm, norm] for ``uniform``."""
    signs = self.levels == "sign_magnitude"
    return 2 ** (self.bits - 1) - 1 if signs else 2**self.bits - 1

  @property
  def top(self) -> int:
    """The largest distance from zero in fixed point: ``s``; ``s / 2`` on two sides."""
    return self.intervals << (fixed_point.FRACTION - (self.levels == "uniform"))

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(self, x: Array, factor: Array, lane: Lane, limit: Operand = None) -> Array:
    """Returns the codes of one plane; the clamp keeps a NaN's inside its own bits."""
    top = np.uint32(self.top)
    fixed = (lax.abs(x) * factor).astype(jnp.int32).astype(jnp.uint32)
    fixed = lax.min(fixed, top)
    if self.levels == "sign_magnitude":
      return fixed_point.rounded_with_sign(fixed, lane, x, self.bits)
    return fixed_point.rounded(jnp.where(x < 0, top - fixed, top + fixed), lane)

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def value(self, codes: Array, scale: Array) -> Array:
    """Returns the values of codes; the top level has the scale itself."""
    s = self.intervals
    if self.levels == "sign_magnitude":
      magnitude = lax.bitwise_and(codes, np.uint32(s)).astype(jnp.int32)
      sign = (codes >> np.uint32(self.bits - 1)) << np.uint32(31)
    else:
      code = 2 * codes.astype(jnp.int32) - s
      magnitude = jnp.abs(code)
      sign = fixed_point.sign_bit(code)
    step = lax.mul(scale, np.float32(1 / s))
    is_top = lax.eq(magnitude, np.int32(s))
    length = jnp.where(is_top, scale, magnitude.astype(jnp.float32) * step)
    return fixed_point.signed(length, sign)


def signed_codes(rows: Array, form: Equal) -> Array:
  """Unpacks rows to integers from ``-s`` to ``s``: ``int32[..., rows, P, B]``."""
  s, words = form.intervals, rows[..., : form.bucket_size]
  codes = planes.unpack_planes(words, form.bits).astype(jnp.int32)
  if form.levels == "uniform":
    return 2 * codes - s
  magnitude = codes & s
  return jnp.where(codes > s, -magnitude, magnitude)


def from_signed_codes(codes: Array, scale: Array, s: int) -> Array:
  """Returns the values of sums of codes; whole multiples of the scale are exact."""
  magnitude = jnp.abs(codes)
  scale = scale[..., None]
  inverse = np.float32(1 / s)
  # The number of whole scales, without an integer division. It is off by less than a
  # half as long as there are fewer than 2**21 of them, that is workers.
  as_float = magnitude.astype(jnp.float32)
  whole = jnp.round(as_float * inverse)
  is_whole = whole.astype(jnp.int32) * s == magnitude
  value = jnp.where(is_whole, whole * scale, as_float * (scale * inverse))
  return fixed_point.signed(value, fixed_point.sign_bit(codes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ternary(ScaledForm):
  """The options of TernGrad: three values, in 2 or 1.6 bits."""

  bits: int = 2
  packing: Packing = "2bit"

  @property
  def name(self) -> str:  # type: ignore[override]
    """Returns the name of its kernel."""
    return f"ternary_{self.packing}"

  @property
  def planes(self) -> int:
    """The number of codes in a word, and of buckets in a tile."""
    return 16 if self.packing == "2bit" else _TRITS

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(self, x: Array, factor: Array, lane: Lane, limit: Operand = None) -> Array:
    """Returns two bits, or a digit in base 3, for each element of one plane."""
    length = jnp.abs(x) if limit is None else jnp.minimum(jnp.abs(x), limit)
    fixed = (length * factor).astype(jnp.int32).astype(jnp.uint32)
    fixed = jnp.minimum(fixed, jnp.uint32(self.top))  # a NaN stays inside its bits
    magnitude = fixed_point.rounded(fixed, lane, x)
    if self.packing == "2bit":
      return jnp.where(x < 0, 3 * magnitude, magnitude)
    return jnp.where(x < 0, 1 - magnitude, 1 + magnitude)

  def pack(self, codes: Iterable[Array]) -> Array:
    """Packs two bits a code, or twenty digits in base 3: ``uint32[rows, B]``."""
    if self.packing == "2bit":
      return super().pack(codes)
    # With the digits as the number `v` below `3**20`, most significant first, the word
    # is the 32-bit fraction `floor(v * 2**32 / 3**20) + 1`, rounded up. Its digits can
    # then be read without a division, each by itself: a digit is three times the rest
    # after the point.
    value = functools.reduce(lambda value, trit: value * jnp.uint32(3) + trit, codes)
    # 2**32 / 3**20 is 1 + excess: the high word of value * excess, with its carry.
    low = value * jnp.uint32(_EXCESS_HIGH)
    carry = low + _high_word(value, _EXCESS_LOW) < low
    high = _high_word(value, _EXCESS_HIGH) + carry.astype(jnp.uint32)
    return value + high + jnp.uint32(1)


def ternary_codes(rows: Array, form: Ternary) -> Array:
  """Decodes ``uint32[..., rows, words]`` to -1, 0 and 1: ``int32[..., rows, P, B]``."""
  words = rows[..., : form.bucket_size]
  if form.packing == "base3":
    powers = np.array([3**k % 2**32 for k in range(_TRITS)], np.uint32)
    return _high_word(words[..., None, :] * powers[:, None], 3).astype(jnp.int32) - 1
  code = planes.unpack_planes(words, 2).astype(jnp.int32)
  return jnp.where(code == 3, -1, code)


def _high_word(x: Array, factor: int) -> Array:
  """Returns ``floor(x * factor / 2**32)`` of 32-bit numbers, in 32-bit arithmetic."""
  high, low = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
  x_high, x_low = x >> 16, x & jnp.uint32(0xFFFF)
  middle = x_high * low + ((x_low * low) >> 16)
  return x_high * high + (middle >> 16) + ((x_low * high + (middle & 0xFFFF)) >> 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EightBit(ScaledForm):
  """The options of 8-bit types: a sign, and a level of a table."""

  bits: int = 8
  lines: tuple[Line, ...]  # between the levels
  last: float = 0.0  # the value of the code of minus zero
  tops: tuple[int, int]  # the largest magnitude of a positive and of a negative code
  up: float = 1.0  # the value of a level of 1, in largest magnitudes

  name: ClassVar[str] = "eight_bit"

  def unit(self, scale: Array) -> Array:
    """Returns ``scale * up``, the value of a level of 1, at most the largest float."""
    large = scale * np.float32(self.up)
    return jnp.where(large > _LARGEST, _LARGEST, large)

  def factor(self, scale: Array, divide: Divide = divide) -> Array:
    """Returns the factor to fixed point: ``2**16 / scale``, or 0 for 0."""
    return fixed_point.inverse(self.top, scale, divide)

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(self, x: Array, factor: Array, lane: Lane, limit: Operand = None) -> Array:
    """Returns a sign bit above seven bits of magnitude, but never minus zero."""
    positive, negative = (jnp.uint32(top << fixed_point.FRACTION) for top in self.tops)
    same = self.tops[0] == self.tops[1]
    top = positive if same else jnp.where(x < 0, negative, positive)
    fixed = jnp.minimum(coordinate(jnp.abs(x) * factor, self.lines), top)
    magnitude = fixed_point.rounded(fixed, lane, x)
    negative = (x < 0) & (magnitude > 0)
    return jnp.where(negative, magnitude | jnp.uint32(_SIGN), magnitude)

  def value(self, codes: Array, scale: Array, *level: Array) -> Array:
    """Returns the values of codes, with the levels of their magnitudes."""
    codes = codes.astype(jnp.int32)
    magnitude = jnp.where(codes == _SIGN, np.float32(self.last), level[0])
    sign = jnp.where(codes > _SIGN, jnp.uint32(1 << 31), jnp.uint32(0))
    return fixed_point.signed(magnitude * scale, sign)


def lines_between(levels: np.ndarray) -> tuple[Line, ...]:
  """Returns the lines of increasing float64 levels that start at zero."""
  lines: list[Line] = []
  last, unit = 0.0, 1 << fixed_point.FRACTION
  for number, distance in enumerate(np.diff(levels)):
    # Levels are computed in float64: the distances of two runs differ by far more than
    # rounding errors.
    if abs(distance - last) > 1e-9 * distance:
      offset = round(unit * (number - levels[number] / distance))
      start = np.float32(unit * levels[number])
      lines.append(Line(start, np.float32(1 / distance), np.int32(offset)))
    last = distance
  return tuple(lines)
