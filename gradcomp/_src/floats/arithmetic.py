"""Addition and multiplication in a format: the exact result is rounded once."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.floats.rounding import check_float, round_to
from gradcomp._src.kernels.common import float_codes, planes
from gradcomp._src.kernels.common.fixed_point import sign_bit, signed
from gradcomp._src.kernels.common.float_formats import FloatFormat

# A binary32 operation rounds to 24 bits first, which makes no difference for numbers of
# p bits if these are at least 2p + 1 for sums and 2p for products (Figueroa, 1995).
# With more bits, the error of the operation decides.
_MOST_FOR_SUMS = 10  # mantissa bits: 2 (m + 1) + 1 <= 24
_MOST_FOR_PRODUCTS = 11
_NO_EXPONENT, _ONE = np.uint32(0x807FFFFF), np.uint32(0x3F800000)
_HIGH_HALF = np.uint32(0xFFFFF000)  # sign, exponent, and 12 bits of the significand


def add(a: Array, b: Array, fmt: FloatFormat) -> Array:
  """Returns ``a + b`` in a format.

  Both operands are rounded to the format. Their exact sum is rounded to it once, to
  nearest even. Processors that take subnormal ``float32`` for zero, as XLA makes CPUs
  do, also take operands and exact results below 2**-126 for zero.

  Args:
    a, b: arrays of real float dtype, which broadcast.
    fmt: the format.

  Returns:
    ``float32`` numbers of the format, in the broadcast shape.

  Raises:
    TypeError: an operand is not real floating point.

  Example:
    >>> add(jnp.float32(8.0), jnp.array([1.0, 1.5]), FloatFormat(5, 2))
    Array([ 8., 10.], dtype=float32)

  References:
    Han et al., `APS <https://arxiv.org/abs/1911.08907>`_, 2021, section 5.1.1
  """
  a, b = check_float(a, "a"), check_float(b, "b")
  return rounded_sum(round_to(a, fmt), round_to(b, fmt), fmt)


def multiply(a: Array, b: Array, fmt: FloatFormat) -> Array:
  """Returns ``a * b`` in a format, rounded like the sum of :func:`add`.

  Args:
    a, b: arrays of real float dtype, which broadcast.
    fmt: the format.

  Returns:
    ``float32`` numbers of the format, in the broadcast shape.

  Raises:
    TypeError: an operand is not real floating point.

  Example:
    >>> multiply(jnp.float32(1.25), jnp.array([1.25, 3.0]), FloatFormat(5, 2))
    Array([1.5, 4. ], dtype=float32)
  """
  a, b = check_float(a, "a"), check_float(b, "b")
  return rounded_product(round_to(a, fmt), round_to(b, fmt), fmt)


def rounded_sum(
  a: Array, b: Array, fmt: FloatFormat, *, saturate: bool = False
) -> Array:
  """Returns :func:`add` of ``float32`` numbers of the format, unchecked."""
  total = a + b
  lost = None
  if fmt.mantissa_bits > _MOST_FOR_SUMS:
    of_b = total - a
    lost = (a - (total - of_b)) + (b - of_b)
  return _rounded(total, lost, fmt, saturate)


def rounded_product(a: Array, b: Array, fmt: FloatFormat) -> Array:
  """Returns the product of two numbers of a format, in it."""
  product = a * b
  if fmt.mantissa_bits <= _MOST_FOR_PRODUCTS:
    return _rounded(product, None, fmt, False)
  # The exponents do not matter to whether something is lost, nor to its sign.
  a, b = _near_one(a), _near_one(b)
  (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
  # The sign is set by a bit operation, so that no compiler contracts this product.
  near = signed(jnp.abs(a) * jnp.abs(b), sign_bit(a) ^ sign_bit(b))
  lost = a_low * b_low - (((near - a_high * b_high) - a_low * b_high) - a_high * b_low)
  lost = jnp.where(product == 0, np.float32(0), lost)
  return _rounded(product, lost, fmt, False)


def _near_one(x: Array) -> Array:
  """Returns a number from 1 to 2 with the significand of ``x``, and its sign."""
  return planes.floats(planes.float_words(x) & _NO_EXPONENT | _ONE)


def _halves(x: Array) -> tuple[Array, Array]:
  """Splits ``x`` into two numbers of 12 bits; products of such numbers are exact."""
  high = planes.floats(planes.float_words(x) & _HIGH_HALF)
  return high, x - high


def _rounded(x: Array, lost: Array | None, fmt: FloatFormat, saturate: bool) -> Array:
  codes = float_codes.to_codes(x, fmt, lost=lost, saturate=saturate)
  return jnp.where(jnp.isnan(x), x, float_codes.from_codes(codes, fmt))
