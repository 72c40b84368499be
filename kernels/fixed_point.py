"""Rounding in fixed point: one float product, then integers and 16 bits of fraction.

Whatever compiles this, on whatever device, agrees on every code: there is no float
addition that could be contracted, and no comparison of sums.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp.kernels.threefry import Key, random_lanes

FRACTION = 16  # bits behind the point

# Of a float's bits.
_MANTISSA, _HIDDEN = (1 << 23) - 1, 1 << 23
_INFINITY, _NAN = 0x7F800000, 0x7FC00000

# More than what an estimated quotient is off by: two units in the last place by the
# division of GPUs, div.full.f32, and one for the conversion to an integer.
_OFF = 4

# What one element is rounded with: an integer below 2**FRACTION.
Lane = jax.Array | int

Divide = Callable[[jax.Array, jax.Array], jax.Array]


def rounding_lanes(
  key: Key | None,
  shape: tuple[int, int],
  planes: int,
  *,
  first_row: jax.Array | int,
) -> Sequence[Lane]:
  """What is added before ``FRACTION`` bits are dropped, for each plane of a tile.

  Random 16-bit integers with a key, so that a fraction rounds up with a probability
  equal to it; a half without.

  Args:
    key: ``uint32[2]`` for stochastic rounding, None for nearest.
    shape: of a plane, ``(rows, columns)``.
    planes: how many.
    first_row: the number of the first row, which the random numbers depend on.
  """
  if key is None:
    return [1 << (FRACTION - 1)] * planes
  return random_lanes(key, shape, planes, first_row=first_row)


def exact_quotient(x: jax.Array, divisor: jax.Array) -> jax.Array:
  """``x / divisor``, correctly rounded, where it is a normal number; NaN by NaN.

  A division of floats is the estimate, which integers correct, and round to even.

  Args:
    x: float32, a normal number above 0, or 0; subnormal ones count as 0.
    divisor: float32, a normal number above 0, or NaN. For others the result means
      nothing.
  """
  x_bits, bits = (jax.lax.bitcast_convert_type(a, jnp.uint32) for a in (x, divisor))
  over, by = ((a & np.uint32(_MANTISSA)) | np.uint32(_HIDDEN) for a in (x_bits, bits))
  # 24 bits of the quotient, which is above 1/2, and 1 or more if this is 0.
  below = (by > over).astype(jnp.uint32)
  estimate = jnp.divide(_as_float(over), _as_float(by))
  shifted = estimate * _as_float(np.uint32(_HIDDEN) << below)
  quotient = shifted.astype(jnp.int32).astype(jnp.uint32) - np.uint32(_OFF)
  # Of this small difference of large numbers the low 32 bits are all.
  rest = (over << (23 + below)) - quotient * by
  for step in (_OFF, _OFF // 2, _OFF // 4):
    fits = (rest >= by * step).astype(jnp.uint32)
    quotient, rest = quotient + fits * step, rest - fits * (by * step)
  up = (2 * rest + (quotient & 1) > by).astype(jnp.uint32)
  field = (x_bits >> 23) + np.uint32(127) - (bits >> 23) - below
  result = (field << 23) + (quotient - np.uint32(_HIDDEN)) + up
  result = jnp.where(x_bits < np.uint32(_HIDDEN), jnp.uint32(0), result)
  result = jnp.where(bits > np.uint32(_INFINITY), np.uint32(_NAN), result)
  return jax.lax.bitcast_convert_type(result, jnp.float32)


def _as_float(x: jax.Array) -> jax.Array:
  """Of a ``uint32`` below 2**24."""
  return x.astype(jnp.int32).astype(jnp.float32)


def exact_divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
  """:func:`exact_quotient` of numbers of any sign; what is not finite stays so."""
  quotient = signed(exact_quotient(jnp.abs(x), divisor), sign_bit(x))
  return jnp.where(jnp.abs(x) < jnp.inf, quotient, x)


def divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
  """:func:`exact_divide`, by a division where that is correctly rounded.

  XLA's for NVIDIA's GPUs, div.full.f32, may be off by two units in the last place.
  """

  def exactly(x: jax.Array, divisor: jax.Array) -> jax.Array:
    # Once: XLA would repeat so long an expression in, or keep it out of, what reads it.
    return jax.lax.optimization_barrier(exact_divide(x, divisor))

  return jax.lax.platform_dependent(x, divisor, cuda=exactly, default=jnp.divide)


def inverse(top: float, scale: jax.Array, divide: Divide = divide) -> jax.Array:
  """``top / scale``, and 0 for a scale of 0.

  Args:
    top: a float32 above 0.
    scale: 0, a float of 2**-96 or more, or NaN.
    divide: :func:`exact_quotient` in kernels.
  """
  return jnp.where(scale == 0, 0.0, divide(jnp.full_like(scale, top), scale))


def top_multiplier(top: int, scale: jax.Array, divide: Divide = divide) -> jax.Array:
  """From values to fixed point, so that the scale becomes ``top``: an :func:`inverse`.

  One float above the quotient, so that the largest element reaches the top in spite of
  two roundings; a clamp removes the excess.

  Example:
    >>> scale = jnp.array([0.0, 3.0, 7e-20])
    >>> factor = top_multiplier(7 << 16, scale)
    >>> bool((top_multiplier(7 << 16, scale, exact_quotient) == factor).all())
    True
  """
  return inverse(np.nextafter(np.float32(top), np.float32(np.inf)), scale, divide)


def signed(value: jax.Array, sign: jax.Array) -> jax.Array:
  """``value`` with the sign bit of ``sign``, where ``value`` has none.

  Decoders set the sign last, by this bit operation, so that no compiler contracts
  their product with a following addition: sums of decoded values have the same bits
  everywhere.

  Args:
    value: float32, zero or more, or NaN.
    sign: uint32, of which only the highest bit is set.

  Example:
    >>> signed(jnp.float32(2.5), jnp.uint32(1 << 31))
    Array(-2.5, dtype=float32)
  """
  value_bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
  return jax.lax.bitcast_convert_type(value_bits | sign, jnp.float32)


def sign_bit(x: jax.Array) -> jax.Array:
  """The highest bit of a 32-bit number, alone, as ``uint32``."""
  return jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(1 << 31)


def scaled(x: jax.Array, scale: float) -> jax.Array:
  """``x * scale``, with the scale and the product rounded to binary32.

  The sign is set last, by a bit operation, so that no compiler contracts the product
  with a following addition, such as that of a residual, or regroups it.
  """
  if scale == 1:
    return x
  return signed(jnp.abs(x) * jnp.float32(scale), sign_bit(x))


def held(x: jax.Array) -> jax.Array:
  """A number of zero or more, as it is: clearing a sign that it does not have keeps
  compilers from regrouping what made it, or contracting it with a sum, in some places
  and not in others."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32((1 << 31) - 1)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
