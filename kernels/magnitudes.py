"""Magnitudes of floats, as numbers that are compared fast.

As the integers that their bits are, which have the same order, with infinity and NaN
above all numbers; or as floats that no CPU takes for zeros.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ABOVE_ALL = np.uint32(0x80000000)  # NaN too

# Bits of floats.
_SMALLEST_NORMAL = np.uint32(0x00800000)
_INFINITY = np.uint32(0x7F800000)


def magnitudes(x: jax.Array, sign: jax.Array | None = None) -> jax.Array:
  """``uint32`` in the order of ``|x|``, or of the elements of one sign, others zero.

  What is not finite counts for both signs.

  Args:
    x: ``float32[n]``.
    sign: ``float32[]``, positive or negative.

  Example:
    >>> values = jnp.array([-2.0, 0.0, 1.0])
    >>> magnitudes(values).argmax().item(), magnitudes(values, 1.0).argmax().item()
    (0, 2)
  """
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  magnitude = bits & np.uint32(ABOVE_ALL - 1)
  if sign is None:
    return magnitude
  own = (bits >> 31 == 0) == (sign > 0)
  return jnp.where(own | (magnitude >= _INFINITY), magnitude, jnp.uint32(0))


def as_floats(order: jax.Array) -> jax.Array:
  """Normal floats in the same order, which are sorted faster than integers.

  Subnormal numbers, which CPUs take for zeros, become negative ones; NaN is infinity.
  """
  subnormal = ABOVE_ALL | (2 * _SMALLEST_NORMAL - 1 - order)
  bits = jnp.where(order < _SMALLEST_NORMAL, subnormal, jnp.minimum(order, _INFINITY))
  return lax.bitcast_convert_type(bits, jnp.float32)
