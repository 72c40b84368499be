"""Fixed-point rounding: one float product, then integers and 16 bits of fraction.

Every compiler on every device then agrees on every code: no float addition can be
contracted, and no sums of floats are compared.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.kernels.common.dithers import (
  Dither,
  negative_mask,
  random_lanes,
  signed_lane,
)
from gradcomp._src.kernels.gpu.dispatch import by_platform

FRACTION = 16  # bits behind the point
_HALF = 1 << (FRACTION - 1)

# The bits of a float32.
_MANTISSA, _HIDDEN = (1 << 23) - 1, 1 << 23
_INFINITY, _NAN = 0x7F800000, 0x7FC00000

# At most five floats lie between a quotient and its estimate by a reciprocal, since the
# division of GPUs is off by up to two units in the last place: div.full.f32 in Triton,
# and rcp.approx.f32, by one, in Mosaic.
_OFF = 8

# The integers below 2**FRACTION that elements are rounded with; None for a half.
Lane = jax.Array | None

Divide = Callable[[jax.Array, jax.Array], jax.Array]


def rounding_lanes(
  dither: Dither | None,
  shape: tuple[int, int],
  planes: int,
  *,
  first_row: jax.Array | int,
) -> Sequence[Lane]:
  """Returns the addend of each plane, to add before ``FRACTION`` bits are dropped.

  With a dither these are random 16-bit integers, ``uint32[rows, columns]``, and else
  None for a half, which rounds to nearest.
  """
  if dither is None:
    return [None] * planes
  return random_lanes(dither, shape, planes, first_row=first_row)


def rounded(fixed: jax.Array, lane: Lane, x: jax.Array | None = None) -> jax.Array:
  """Rounds ``fixed``, fixed point as ``uint32``, to integers; a half is rounded up.

  If ``fixed`` holds magnitudes, ``x`` holds their numbers, which random numbers round.
  """
  if lane is None:
    return (fixed + jnp.uint32(_HALF)) >> FRACTION
  return (fixed + (lane if x is None else signed_lane(lane, x))) >> FRACTION


def rounded_with_sign(
  fixed: jax.Array, lane: Lane, x: jax.Array, bits: int
) -> jax.Array:
  """Returns :func:`rounded` magnitudes of ``x``, with its sign as the highest bit.

  One XOR takes the complement of a random number for a negative ``x`` and sets the sign
  bit, which the sum does not reach: ``fixed`` is at most ``2**(bits - 1) - 1``.

  Example:
    >>> x = jnp.array([-2.5, 2.5])
    >>> lane = jnp.array([0xFFFF, 0xFFFF], jnp.uint32)
    >>> rounded_with_sign(jnp.uint32(5 << 15), lane, x, 4).tolist()  # signs are 8
    [10, 3]
  """
  sign = 1 << (FRACTION + bits - 1)
  if lane is None:
    lane, flips = jnp.uint32(_HALF), jnp.uint32(sign)
  else:
    flips = jnp.uint32(sign | ((1 << FRACTION) - 1))
  return (fixed + (lane ^ (negative_mask(x) & flips))) >> FRACTION


def exact_quotient(x: jax.Array, divisor: jax.Array) -> jax.Array:
  """Returns ``x / divisor``, correctly rounded, if the quotient is a normal number.

  Both are 0 or more, and the divisor is normal or NaN, which makes a NaN. A subnormal
  ``x`` counts as 0.
  """
  # A reciprocal estimates the quotient. Integers correct the estimate, and round it.
  x_bits, bits = (jax.lax.bitcast_convert_type(a, jnp.uint32) for a in (x, divisor))
  over, by = ((a & np.uint32(_MANTISSA)) | np.uint32(_HIDDEN) for a in (x_bits, bits))
  # The quotient of the significands has the exponent of 1, or of 1/2 if `below` is 1.
  # The bits of floats count in their order, so `found` is a little too low.
  below = (by > over).astype(jnp.uint32)
  reciprocal = jnp.divide(np.float32(1), _as_float(by))
  estimate = _as_float(over) * reciprocal
  found = jax.lax.bitcast_convert_type(estimate, jnp.uint32) - np.uint32(_OFF)
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
  return jax.lax.bitcast_convert_type(result, jnp.float32)


def _as_float(x: jax.Array) -> jax.Array:
  """Converts a ``uint32`` below 2**31 to ``float32``; below 2**24 this is exact."""
  return x.astype(jnp.int32).astype(jnp.float32)


def exact_divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
  """Returns :func:`exact_quotient` for an ``x`` of any sign; ``x`` if not finite."""
  quotient = signed(exact_quotient(jnp.abs(x), divisor), sign_bit(x))
  return jnp.where(jnp.abs(x) < jnp.inf, quotient, x)


@functools.partial(jax.jit, inline=True)  # like the cipher: once a shape
def divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
  """Returns ``x / divisor``, correctly rounded on every device."""

  def exactly(x: jax.Array, divisor: jax.Array) -> jax.Array:
    # The barrier keeps XLA from duplicating this long expression into each consumer,
    # or from leaving the consumers unfused because of its length.
    # XLA's division for NVIDIA's GPUs, div.full.f32, may be off by two units in the
    # last place, so that `exact_divide` takes its place there. Others divide correctly.
    return jax.lax.optimization_barrier(exact_divide(x, divisor))

  default = jax.jit(jnp.divide).trace(x, divisor)
  return by_platform((x, divisor), exactly, default)


def inverse(top: float, scale: jax.Array, divide: Divide = divide) -> jax.Array:
  """Returns ``top / scale``, and 0 for a scale of 0; kernels pass `exact_quotient`."""
  return jnp.where(scale == 0, 0.0, divide(jnp.full_like(scale, top), scale))


def top_multiplier(top: int, scale: jax.Array, divide: Divide = divide) -> jax.Array:
  """Returns the factor from values to fixed point that makes the scale become ``top``.

  It is the :func:`inverse` of the scale for the next float above ``top``, so that the
  largest element reaches the top in spite of two roundings. A clamp removes the excess.

  Example:
    >>> scale = jnp.array([0.0, 3.0, 7e-20])
    >>> factor = top_multiplier(7 << 16, scale)
    >>> bool((top_multiplier(7 << 16, scale, exact_quotient) == factor).all())
    True
  """
  return inverse(np.nextafter(np.float32(top), np.float32(np.inf)), scale, divide)


def signed(value: jax.Array, sign: jax.Array) -> jax.Array:
  """Gives ``value``, which has no sign, the highest bit of ``sign``, the only one set.

  Decoders set the sign last, by this bit operation. No compiler can then contract their
  product with a following addition, and sums of decoded values have the same bits
  everywhere.

  Example:
    >>> signed(jnp.float32(2.5), jnp.uint32(1 << 31))
    Array(-2.5, dtype=float32)
  """
  value_bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
  return jax.lax.bitcast_convert_type(value_bits | sign, jnp.float32)


def sign_bit(x: jax.Array) -> jax.Array:
  """Returns a 32-bit number with all bits but the highest cleared, as ``uint32``."""
  return jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(1 << 31)


def scaled(x: jax.Array, scale: float) -> jax.Array:
  """Returns ``x * scale``, with the scale and the product rounded to binary32."""
  if scale == 1:
    return x
  # The sign is set last, by a bit operation, so that no compiler regroups the product,
  # or contracts it with a following addition, such as that of a residual.
  return signed(jnp.abs(x) * jnp.float32(scale), sign_bit(x))


def held(x: jax.Array) -> jax.Array:
  """Returns a number of zero or more, with its operations kept together."""
  # Clearing a sign that the number does not have keeps compilers from regrouping the
  # operations that made it, or from contracting them with a sum, in some places and not
  # in others.
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32((1 << 31) - 1)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
