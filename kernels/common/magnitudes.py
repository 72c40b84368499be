"""Magnitudes of floats as numbers that are compared and sorted fast.

:func:`magnitudes` takes the bits of a float as an integer. These integers have the
order of the magnitudes, with infinity and NaN above all numbers. :func:`as_floats`
makes floats of them that no CPU takes for zeros.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ABOVE_ALL = np.uint32(0x80000000)  # above all magnitudes, NaN's too

# Bits of floats.
_SMALLEST_NORMAL = np.uint32(0x00800000)
_INFINITY = np.uint32(0x7F800000)


def magnitudes(x: jax.Array, sign: jax.Array | None = None) -> jax.Array:
  """Returns ``uint32`` numbers that are ordered as ``|x|`` is.

  With ``sign``, positive or negative, the elements of the other sign become zero. An
  element that is not finite counts for both signs.

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
  """Returns normal floats in the same order, which are sorted faster than integers.

  Subnormal numbers become negative, because CPUs take them for zeros, and NaN infinity.
  """
  subnormal = ABOVE_ALL | (2 * _SMALLEST_NORMAL - 1 - order)
  bits = jnp.where(order < _SMALLEST_NORMAL, subnormal, jnp.minimum(order, _INFINITY))
  return lax.bitcast_convert_type(bits, jnp.float32)
