"""Fixed-point rounding: one float product, then integers and 16 bits of fraction."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common import dithers, planes
from gradcomp._src.kernels.gpu.dispatch import by_platform

# No float addition can be contracted, and no sums of floats are compared. So every
# compiler on every device agrees on every code.
FRACTION = 16  # bits after the point
_HALF = 1 << (FRACTION - 1)

# The bits of a float32.
_MANTISSA, _HIDDEN = (1 << 23) - 1, 1 << 23
_INFINITY, _NAN = 0x7F800000, 0x7FC00000

# At most five floats lie between a quotient and its estimate by a reciprocal, since the
# division of GPUs is off by up to two units in the last place: div.full.f32 in XLA's
# code, and rcp.approx.f32, by one, in Pallas' kernels.
_OFF = 8

# The integers below 2**FRACTION that elements are rounded with; None for a half.
Lane = Array | None

Divide = Callable[[Array, Array], Array]


def rounded(fixed: Array, lane: Lane, x: Array | None = None) -> Array:
  """Rounds ``uint32`` fixed point, a half up; ``x`` are the numbers of magnitudes."""
  if lane is None:
    lane = jnp.uint32(_HALF)
  elif x is not None:
    lane = dithers.signed_lane(lane, x)
  return lax.shift_right_logical(lax.add(fixed, lane), np.uint32(FRACTION))


def rounded_with_sign(fixed: Array, lane: Lane, x: Array, bits: int) -> Array:
  """Returns :func:`rounded` magnitudes of ``x``, with its sign as the highest bit."""
  # One XOR takes the complement of a random number for a negative `x` and sets the sign
  # bit, which the sum does not reach: `fixed` is at most `2**(bits - 1) - 1`.
  sign = 1 << (FRACTION + bits - 1)
  flips = np.uint32(sign)
  if lane is None:
    lane = jnp.uint32(_HALF)
  else:
    flips |= np.uint32((1 << FRACTION) - 1)
  flipped = lax.bitwise_xor(lax.bitwise_and(dithers.negative_mask(x), flips), lane)
  return lax.shift_right_logical(lax.add(fixed, flipped), np.uint32(FRACTION))


def exact_quotient(x: Array, divisor: Array) -> Array:
  """Returns ``x / divisor``, correctly rounded, if the quotient is a normal number."""
  # Both are 0 or more, and the divisor is normal or NaN. A subnormal `x` counts as 0.
  # A reciprocal estimates the quotient. Integers correct the estimate, and round it.
  x_bits, bits = map(planes.float_words, (x, divisor))
  over, by = ((a & np.uint32(_MANTISSA)) | np.uint32(_HIDDEN) for a in (x_bits, bits))
  # The quotient of the significands has the exponent of 1, or of 1/2 if `below` is 1.
  # The bits of floats count in their order, so `found` is a little too low.
  below = (by > over).astype(jnp.uint32)
  reciprocal = jnp.divide(np.float32(1), _as_float(by))
  found = planes.float_words(_as_float(over) * reciprocal) - np.uint32(_OFF)
  quotient = found - ((126 - below) << 23)  # its first 24 bits
  # Both numbers are longer than 32 bits, but their difference is small: its low 32 bits
  # are all of it.
  rest = (over << (23 + below)) - quotient * by
  # A quotient that is one too large leaves a rest below zero, which is not rounded up.
  more = (_as_float(rest) * reciprocal).astype(jnp.int32)
  by = by.astype(jnp.int32)
  # No quotient of 24 bits by 24 bits lies half-way between two floats.
  up = (2 * (rest.astype(jnp.int32) - more * by) > by).astype(jnp.int32)
  exponents = (x_bits & np.uint32(_INFINITY)) - (bits & np.uint32(_INFINITY))
  result = found + (more + up).astype(jnp.uint32) + exponents
  result = jnp.where(x_bits < np.uint32(_HIDDEN), jnp.uint32(0), result)
  result = jnp.where(bits > np.uint32(_INFINITY), np.uint32(_NAN), result)
  return planes.floats(result)


def _as_float(x: Array) -> Array:
  """Converts a ``uint32`` below 2**31 to ``float32``; below 2**24 this is exact."""
  return x.astype(jnp.int32).astype(jnp.float32)


def exact_divide(x: Array, divisor: Array) -> Array:
  """Returns :func:`exact_quotient` for an ``x`` of any sign; ``x`` if not finite."""
  quotient = signed(exact_quotient(jnp.abs(x), divisor), sign_bit(x))
  return jnp.where(jnp.abs(x) < jnp.inf, quotient, x)


@functools.partial(jax.jit, inline=True)  # like the cipher: once a shape
def divide(x: Array, divisor: Array) -> Array:
  """Returns ``x / divisor``, correctly rounded on every device."""

  def exactly(x: Array, divisor: Array) -> Array:
    # The barrier keeps XLA from duplicating this long expression into each consumer,
    # or from leaving the consumers unfused because of its length.
    # XLA's division for NVIDIA's GPUs, div.full.f32, may be off by two units in the
    # last place, so that `exact_divide` takes its place there. Others divide correctly.
    return lax.optimization_barrier(exact_divide(x, divisor))

  def plainly(x: Array, divisor: Array) -> Array:
    # XLA divides by a constant, or by one number that many elements share, as it
    # multiplies by its reciprocal, which rounds twice. With a choice that depends on
    # `x` and on the place no divisor is either: NaN stays NaN by it. No odd number is
    # 0, also where the places of 2**32 elements or more begin again.
    odd = lax.iota(jnp.uint32, x.size).reshape(x.shape) | np.uint32(1)
    known = lax.bitwise_and(lax.eq(x, x), lax.ne(odd, np.uint32(0)))
    return lax.div(x, lax.select(known, divisor, x))

  traced = jax.jit(plainly).trace(x, divisor)
  return by_platform((x, divisor), {"cuda": exactly}, traced)


def inverse(top: float, scale: Array, divide: Divide = divide) -> Array:
  """Returns ``top / scale``, and 0 for a scale of 0; kernels pass `exact_quotient`."""
  found = divide(lax.full_like(scale, top), scale)
  return lax.select(lax.eq(scale, np.float32(0)), lax.full_like(scale, 0), found)


def top_multiplier(top: int, scale: Array, divide: Divide = divide) -> Array:
  """Returns the factor from values to fixed point that makes the scale ``top``."""
  # For the next float above `top` the largest element reaches it in spite of two
  # roundings. A clamp removes the excess.
  return inverse(np.nextafter(np.float32(top), np.float32(np.inf)), scale, divide)


def signed(value: Array, sign: Array) -> Array:
  """Gives ``value``, which has no sign, the highest bit of ``sign``, its only one."""
  # Decoders set the sign last, so that no compiler contracts their product with a
  # following addition, and sums of decoded values have the same bits everywhere.
  return planes.floats(lax.bitwise_or(planes.float_words(value), sign))


def sign_bit(x: Array) -> Array:
  """Returns a 32-bit number with all bits but the highest cleared, as ``uint32``."""
  return lax.bitwise_and(planes.float_words(x), np.uint32(1 << 31))


def scaled(x: Array, scale: float) -> Array:
  """Returns ``x * scale``, with the scale and the product rounded to binary32."""
  if scale == 1:
    return x
  # The sign is set last, by a bit operation, so that no compiler regroups the product,
  # or contracts it with a following addition, such as a residual's.
  return signed(lax.mul(lax.abs(x), np.float32(scale)), sign_bit(x))


def held(x: Array) -> Array:
  """Returns a number of zero or more, with its operations kept together."""
  # Clearing a sign that the number does not have keeps compilers from regrouping the
  # operations that made it, or from contracting them with a sum, in some places and not
  # in others.
  return planes.floats(planes.float_words(x) & jnp.uint32((1 << 31) - 1))
