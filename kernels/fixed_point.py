"""Rounding in fixed point: one float product, then integers and 16 bits of fraction.

Whatever compiles this, on whatever device, agrees on every code: there is no float
addition that could be contracted, and no comparison of sums.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp.kernels.threefry import random_lanes

FRACTION = 16  # bits behind the point

# What one element is rounded with: an integer below 2**FRACTION.
Lane = jax.Array | int


def rounding_lanes(
  key: jax.Array | None, shape: tuple[int, int], planes: int, *, first_row: int
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


def top_multiplier(top: int, scale: jax.Array) -> jax.Array:
  """From values to fixed point, so that the scale becomes ``top``; 0 for a scale of 0.

  One float above the quotient, so that the largest element reaches the top in spite of
  two roundings; a clamp removes the excess.
  """
  numerator = np.nextafter(np.float32(top), np.float32(np.inf))
  return jnp.where(scale == 0, 0.0, numerator / scale)


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
