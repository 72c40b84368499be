"""Rounding to floats of few bits by integer operations: every case is one shift."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.kernels.common.float_formats import FloatFormat
from gradcomp._src.kernels.common.planes import float_words, floats

FloatRounding = Literal["nearest_even", "stochastic", "toward_zero"]

_SIGN = np.uint32(1 << 31)
_INFINITY = np.uint32(0x7F800000)
_MANTISSA = np.uint32((1 << 23) - 1)
_HIDDEN = np.uint32(1 << 23)
_QUIET = np.uint32(0x7FC00000)
_BELOW_HALF = np.uint32((1 << 31) - 1)

# The exponents of units that sums of floats round to: half a unit is no subnormal
# number, and a number with a last bit that counts units is finite.
_LEAST_UNIT = -125
_LARGEST_UNIT = 104


# The 24 significant bits of a float32 are shifted right until the rest fits, and the
# exponent field is added above them: a carry out of the mantissa is one into the
# exponent. No float is added, so that nothing depends on subnormal numbers or on
# contraction. For normal numbers the shift is constant, and a sum of two normal floats
# rounds the others, in half the operations.
def to_codes(
  x: Array,
  fmt: FloatFormat,
  *,
  rounding: FloatRounding | Array = "nearest_even",
  exponent: Array | None = None,
  lost: Array | None = None,
  saturate: bool = False,
) -> Array:
  """Returns the codes of ``x``, or of ``x * 2**exponent``, rounded once: ``uint32``."""
  # `rounding` may be uniform random bits, uint32 like `x`. "toward_zero" never
  # overflows, nor does anything with `saturate`. `exponent`, int32, is from -512 to
  # 512. With it, numbers below 2**-126 count as zero, and with a bias of 127 such
  # products as well; codes mean nothing where the product is not finite, or not below
  # `2**(fmt.max_exponent + 1)`. `x + lost` is rounded exactly, with `lost` at most half
  # a unit in the last place of `x`.
  bits = float_words(x)
  magnitude = bits & ~_SIGN
  rule = rounding if isinstance(rounding, str) else "stochastic"
  near = _LEAST_UNIT <= _unit(fmt) <= _LARGEST_UNIT
  if rule == "nearest_even" and lost is None and near:
    code = _nearest(magnitude, fmt, exponent)
  else:
    code = _shifted(bits, fmt, rounding, exponent, lost)
  has_more = fmt.specials != "none"  # infinity, or the NaN of formats without one
  to_highest = saturate or rule == "toward_zero" or not has_more
  # As signed integers: TPUs compare no others.
  limit = np.int32(fmt.max_code + (not to_highest))
  code = jnp.minimum(code.astype(jnp.int32), limit).astype(jnp.uint32)
  if exponent is None:
    nan = jnp.uint32(fmt.max_code + 1 + fmt.quiet_bit)
    code = jnp.where(magnitude > _INFINITY, nan, code)
    if to_highest and has_more:  # else too large numbers are infinity
      code = jnp.where(magnitude == _INFINITY, jnp.uint32(fmt.max_code + 1), code)
  sign = (bits >> 31) << (fmt.bits - 1)
  if fmt.specials == "negative_zero":
    sign = jnp.where(code == 0, jnp.uint32(0), sign)
  return code | sign


def _unit(fmt: FloatFormat) -> int:
  """Returns the exponent of the distance of numbers below the normal ones."""
  return 1 - fmt.exponent_bias - fmt.mantissa_bits * fmt.subnormals


def _nearest(magnitude: Array, fmt: FloatFormat, exponent: Array | None) -> Array:
  """Rounds magnitudes to nearest, ties to even: ``uint32``, without a clamp."""
  m = fmt.mantissa_bits
  number = magnitude.astype(jnp.int32)
  if exponent is not None:  # a product below 2**-126 stays so small, and codes are 0
    number = jnp.maximum(number + (jnp.clip(exponent, -255, 255) << 23), 0)
  moved = number + ((fmt.exponent_bias - 127) << 23)
  code = moved
  if m < 23:  # add a half, or just less where the code is even
    last = (moved >> (23 - m)) & 1
    code = (moved + last + ((1 << (22 - m)) - 1)) >> (23 - m)
  # The last bit of this number counts units, as in each sum with a smaller one.
  normal = np.float32(2.0 ** (_unit(fmt) + 23))
  total = floats(number.astype(jnp.uint32)) + normal
  small = float_words(total) - normal.view(np.uint32)
  if not fmt.subnormals:
    small = small << m
  code = jnp.where(moved < (1 << 23), small, code.astype(jnp.uint32))
  return code if exponent is None else jnp.where(magnitude < _HIDDEN, 0, code)


def _shifted(
  bits: Array,
  fmt: FloatFormat,
  rounding: FloatRounding | Array,
  exponent: Array | None,
  lost: Array | None,
) -> Array:
  """Rounds magnitudes in every way to every format: ``uint32``, without a clamp."""
  m = fmt.mantissa_bits
  magnitude = bits & ~_SIGN
  field = (magnitude >> 23).astype(jnp.int32)
  normal = (magnitude & _MANTISSA) | _HIDDEN
  if exponent is None:
    significand = jnp.where(field > 0, normal, magnitude)
    field = jnp.maximum(field, 1) + (fmt.exponent_bias - 127)
  else:
    moved = field + (exponent + (fmt.exponent_bias - 127))
    counts = field > 0
    if fmt.exponent_bias == 127:
      counts = counts & (moved > 0)
    significand = jnp.where(counts, normal, jnp.uint32(0))
    field = jnp.where(counts, moved, 0)
  # Two more bits, in which `lost` has its place. Some bits are always dropped.
  significand = significand << 2
  if lost is not None:
    apart = ((float_words(lost) ^ bits) & _SIGN) != 0
    side = jnp.where(apart, ~jnp.uint32(0), jnp.uint32(1))
    significand = significand + jnp.where(lost == 0, jnp.uint32(0), side)
  below = jnp.maximum(1 - field, 0)  # binades below the normal numbers
  drop = below + (25 - m)
  unit: Array | int = 0  # bits of the mantissa that are not used below them
  if not fmt.subnormals:
    unused = jnp.where(below > 0, m, 0)
    drop = drop + unused
    unit = unused.astype(jnp.uint32)
  base = jnp.maximum(field - 1, 0)
  if exponent is None:
    base = jnp.minimum(base, 1 << fmt.exponent_bits)
  base = base.astype(jnp.uint32) << m
  if not isinstance(rounding, str):
    significand = significand >> jnp.clip(drop - 31, 0, 31).astype(jnp.uint32)
  drop = jnp.minimum(drop, 31).astype(jnp.uint32)
  if not isinstance(rounding, str):
    significand = significand + ((rounding >> 1) >> (31 - drop))
  elif rounding != "toward_zero":  # add a half, or just less where the code is even
    last = (significand >> drop) + (0 if m else base)
    significand = significand + (_BELOW_HALF >> (32 - drop)) + (last & 1)
  return ((significand >> drop) << unit) + base


@functools.partial(jax.jit, static_argnums=1, inline=True)  # traced once a shape
def from_codes(codes: Array, fmt: FloatFormat) -> Array:
  """Returns the ``float32`` numbers of codes; infinity for one that is NaN as well."""
  m, bias = fmt.mantissa_bits, fmt.exponent_bias
  magnitude = codes & jnp.uint32((1 << (fmt.bits - 1)) - 1)
  number = magnitude << (23 - m)
  if bias != 127:  # else subnormal numbers are float32's
    number = number + jnp.uint32((127 - bias) << 23)
    # An integer below 2**23 is exact as a float32, and its exponent is shifted.
    small = float_words(magnitude.astype(jnp.int32).astype(jnp.float32))
    small = small + jnp.uint32(((1 - bias - m) << 23) % 2**32)
    small = jnp.where(magnitude == 0, jnp.uint32(0), small)
    if m:
      number = jnp.where(magnitude < (1 << m), small, number)
    else:
      number = jnp.where(magnitude == 0, jnp.uint32(0), number)
  if not fmt.subnormals:
    number = jnp.where(magnitude < (1 << m), jnp.uint32(0), number)
  if fmt.specials in ("ieee", "nan"):
    number = jnp.where(magnitude > fmt.max_code, _QUIET, number)
  if fmt.specials == "ieee":
    number = jnp.where(magnitude == fmt.max_code + 1, _INFINITY, number)
  sign = (codes >> (fmt.bits - 1)) << 31
  if fmt.specials == "negative_zero":
    sign = jnp.where(number == 0, jnp.uint32(0), sign)
    return floats(jnp.where(codes == fmt.max_code + 1, _QUIET, number | sign))
  return floats(number | sign)


@functools.partial(jax.jit, inline=True)
def times_power_of_two(x: Array, exponent: Array) -> Array:
  """Returns ``x * 2**exponent``, for exponents from -512 to 512, exact if normal."""
  # A product that is too large becomes the largest number of `float32`. One below
  # 2**-126 becomes zero, and so does a subnormal `x`. Others stay the same.
  bits = float_words(x)
  field = ((bits & ~_SIGN) >> 23).astype(jnp.int32)
  moved = field + exponent
  shifted = bits + (jnp.broadcast_to(exponent, x.shape).astype(jnp.uint32) << 23)
  result = jnp.where(moved >= 255, (bits & _SIGN) | (_INFINITY - 1), shifted)
  result = jnp.where((field == 0) | (moved <= 0), bits & _SIGN, result)
  return floats(jnp.where(field == 255, bits, result))
