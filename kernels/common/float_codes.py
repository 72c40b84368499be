"""Floats of few bits: formats, and rounding by integers: every case is one shift."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src import checks
from gradcomp._src.kernels.common.planes import float_words, floats

Specials = Literal["ieee", "nan", "negative_zero", "none"]

_FLOAT32_BIAS = 127

EXPONENT_BITS = checks.integer("from 1 to 8", 1, 8)
MANTISSA_BITS = checks.integer("from 0 to 23", 0, 23)
_BIAS = checks.optional(checks.integer("an integer or None"))

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


@dataclasses.dataclass(frozen=True)
class FloatFormat(checks.Checked):
  r"""A binary floating-point format with numbers that are ``float32`` numbers.

  A code is a sign, ``exponent_bits`` and ``mantissa_bits``, from the highest bit down.
  With the exponent field :math:`E` and the mantissa field :math:`M` it stands for

  .. math:: (-1)^s \, (1 + M 2^{-m}) \, 2^{E - b} \quad (E > 0), \qquad
     (-1)^s \, M \, 2^{1 - b - m} \quad (E = 0)

  ``specials`` selects the codes without a number:

  =================  ==================================================================
  ``specials``       the meaning of codes with all exponent bits set
  =================  ==================================================================
  ``ieee``           infinity (:math:`M = 0`) and NaN, as in IEEE 754
  ``nan``            numbers, except that all mantissa bits set are NaN. The format has
                     no infinity (``float8_e4m3fn``)
  ``negative_zero``  numbers. The code of minus zero is NaN. The format has neither
                     infinity nor minus zero (``float8_e4m3fnuz``)
  ``none``           numbers. The format has neither NaN nor infinity
                     (``float6_e2m3fn``). Numbers that are too large become the largest
  =================  ==================================================================

  Attributes:
    exponent_bits: :math:`e`, 1 to 8.
    mantissa_bits: :math:`m`, 0 to 23. With 0 and ``ieee``, one code is both infinity
      and NaN; it decodes to infinity.
    specials: see the table.
    subnormals: whether codes with :math:`E = 0` and :math:`M > 0` are used. Without
      them the smallest positive number is :math:`2^{1 - b}`.
    bias: :math:`b`; by default :math:`2^{e - 1} - 1`, or one more for
      ``negative_zero``.

  Raises:
    ValueError: an attribute is outside its range; or the format has a number that is
      not a ``float32``, or, unless ``bias`` is 127, a subnormal ``float32``.

  Example:
    >>> FloatFormat(4, 3).max_finite, FloatFormat(4, 3).smallest
    (240.0, 0.001953125)

  References:
    Han et al., `APS <https://arxiv.org/abs/1911.08907>`_, 2021, section 5.1
  """

  exponent_bits: int = checks.field(..., EXPONENT_BITS)
  mantissa_bits: int = checks.field(..., MANTISSA_BITS)
  _: dataclasses.KW_ONLY
  specials: Specials = checks.field("ieee", checks.choice(Specials))
  subnormals: bool = checks.field(True, checks.FLAG)
  bias: int | None = checks.field(None, _BIAS)

  def __post_init__(self) -> None:
    super().__post_init__()
    bias = self.exponent_bias
    low, high = 1 - bias - self.mantissa_bits, self.max_exponent
    if high > 127 or (low < -126 and bias != _FLOAT32_BIAS):
      raise ValueError(
        "`bias` must make every number of the format a float32, and a normal one "
        f"unless it is {_FLOAT32_BIAS}, got {bias} in {self}: its numbers have "
        f'exponents from {low} to {high}; 8 exponent bits need specials="ieee".'
      )

  @property
  def exponent_bias(self) -> int:
    """The bias :math:`b`: ``bias``, or the default if that is None."""
    if self.bias is not None:
      return self.bias
    return 2 ** (self.exponent_bits - 1) - (self.specials != "negative_zero")

  @property
  def bits(self) -> int:
    """The bits of a code, ``1 + exponent_bits + mantissa_bits``."""
    return 1 + self.exponent_bits + self.mantissa_bits

  @property
  def max_code(self) -> int:
    """The code of the largest finite number; larger magnitudes have larger codes."""
    every = 2 ** (self.bits - 1) - 1
    if self.specials == "ieee":
      return every - 2**self.mantissa_bits
    return every - (self.specials == "nan")

  @property
  def quiet_bit(self) -> int:
    """The bit that turns the code of infinity into a NaN's; 0 if there is none."""
    m = self.mantissa_bits
    return 2 ** (m - 1) if self.specials == "ieee" and m else 0

  @property
  def max_exponent(self) -> int:
    """The largest ``k`` for which ``2**k`` is a number of the format, if any is."""
    return (self.max_code >> self.mantissa_bits) - self.exponent_bias

  @property
  def max_finite(self) -> float:
    """The largest finite number."""
    return self._value(self.max_code)

  @property
  def smallest_normal(self) -> float:
    """The smallest normal number, ``2**(1 - bias)``."""
    return 2.0 ** (1 - self.exponent_bias)

  @property
  def smallest(self) -> float:
    """The smallest positive number; 0 if there is none."""
    first = 1 if self.subnormals else 2**self.mantissa_bits
    return self._value(first) if first <= self.max_code else 0.0

  def _value(self, code: int) -> float:
    field, mantissa = code >> self.mantissa_bits, code % 2**self.mantissa_bits
    if not field and not self.subnormals:
      return 0.0
    unit = 2.0 ** (max(field, 1) - self.exponent_bias - self.mantissa_bits)
    return (mantissa + (2**self.mantissa_bits if field else 0)) * unit


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
