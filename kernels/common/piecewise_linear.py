"""Rounding to levels that are not equally spaced, by straight lines between them.

The coordinate of a value is the number of the level below it, plus the share of the way
to the next level. Rounding the coordinate rounds the value, and searches no table.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.kernels.common.fixed_point import FRACTION, Divide, divide, inverse

UNIT = 1 << FRACTION


class Line(NamedTuple):
  """A line to coordinates ``trunc(t * slope) + offset``, in units of ``2**-16``."""

  start: Array | np.float32  # the smallest value on the line
  slope: Array | np.float32
  offset: Array | np.int32


def lines_between(levels: np.ndarray) -> list[Line]:
  """Returns the lines of increasing float64 levels that start at zero."""
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


def coordinate(t: Array, lines: Sequence[Line]) -> Array:
  """Returns the coordinates of values of zero or more, ``uint32``, without a clamp."""
  slope = jnp.full_like(t, lines[0].slope)
  offset = jnp.full(t.shape, lines[0].offset)
  for line in lines[1:]:
    reached = t >= line.start
    slope = jnp.where(reached, line.slope, slope)
    offset = jnp.where(reached, line.offset, offset)
  return ((t * slope).astype(jnp.int32) + offset).astype(jnp.uint32)


def to_units(scale: Array, divide: Divide = divide) -> Array:
  """Returns the factor from values to fixed point: ``2**16 / scale``, or 0 for 0."""
  return inverse(UNIT, scale, divide)
