"""Rounding to levels that are not equally spaced, by straight lines between them.

The coordinate of a value is the number of the level below it, plus the share of the way
to the next level. It is piecewise linear in the value, with one line for each run of
equally spaced levels. Rounding the coordinate therefore rounds the value to the nearest
level, or to either neighbor with the right probability. No table is searched.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.kernels.common.fixed_point import FRACTION, Divide, divide, inverse

UNIT = 1 << FRACTION


class Line(NamedTuple):
  """A line from values to coordinates, both in units of ``2**-16``.

  The coordinate of ``t`` is ``trunc(t * slope) + offset``.
  """

  start: jax.Array | np.float32  # the smallest value on the line
  slope: jax.Array | np.float32
  offset: jax.Array | np.int32


def lines_between(levels: np.ndarray) -> list[Line]:
  """Returns the lines of increasing float64 levels that start at zero.

  Example:
    >>> [line.start.item() for line in lines_between(np.array([0, 1, 2, 3, 5, 7.0]))]
    [0.0, 196608.0]
  """
  lines: list[Line] = []
  last = 0.0
  for number, distance in enumerate(np.diff(levels)):
    # Levels are computed in float64: the distances of two runs differ by far more than
    # rounding errors.
    if abs(distance - last) > 1e-9 * distance:
      offset = round(UNIT * (number - levels[number] / distance))
      start = np.float32(UNIT * levels[number])
      lines.append(Line(start, np.float32(1 / distance), np.int32(offset)))
    last = distance
  return lines


def coordinate(t: jax.Array, lines: Sequence[Line]) -> jax.Array:
  """Returns the coordinates of values of zero or more, as ``uint32``.

  Values that are too large for an integer, and NaN, get coordinates that are too large.
  The caller clamps these.
  """
  slope = jnp.full_like(t, lines[0].slope)
  offset = jnp.full(t.shape, lines[0].offset)
  for line in lines[1:]:
    reached = t >= line.start
    slope = jnp.where(reached, line.slope, slope)
    offset = jnp.where(reached, line.offset, offset)
  return ((t * slope).astype(jnp.int32) + offset).astype(jnp.uint32)


def to_units(scale: jax.Array, divide: Divide = divide) -> jax.Array:
  """Returns the factor from values to fixed point: ``2**16 / scale``, or 0 for 0.

  The plain inverse of a scale above 2**126 would be subnormal, and zero on CPUs.
  """
  return inverse(UNIT, scale, divide)
