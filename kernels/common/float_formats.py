"""Floating-point formats of few bits, described as data."""

import dataclasses
from typing import Literal

from gradcomp._src import checks

Specials = Literal["ieee", "nan", "negative_zero", "none"]

_FLOAT32_BIAS = 127

EXPONENT_BITS = checks.integer("from 1 to 8", 1, 8)
MANTISSA_BITS = checks.integer("from 0 to 23", 0, 23)
_BIAS = checks.optional(checks.integer("an integer or None"))


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
