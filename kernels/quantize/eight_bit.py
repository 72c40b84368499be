"""The rule of 8-bit types for a plane: a sign and a level of a table."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.kernels.common import fixed_point, planes
from gradcomp._src.kernels.common.fixed_point import Divide, Lane, divide
from gradcomp._src.kernels.gpu.tiles import Operand
from gradcomp._src.kernels.quantize.reference import Line, ScaledForm, coordinate

_SIGN = 1 << 7
_LARGEST = np.finfo(np.float32).max
PLANES = planes.planes_per_word(8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(ScaledForm):
  """The options of 8-bit types."""

  bits: int = 8
  lines: tuple[Line, ...]  # between the levels
  last: float = 0.0  # the value of the code of minus zero
  tops: tuple[int, int]  # the largest magnitude of a positive and of a negative code
  up: float = 1.0  # the value of a level of 1, in largest magnitudes

  name: ClassVar[str] = "eight_bit"

  def unit(self, scale: Array) -> Array:
    """Returns ``scale * up``, the value of a level of 1, at most the largest float."""
    large = scale * np.float32(self.up)
    return jnp.where(large > _LARGEST, _LARGEST, large)

  def factor(self, scale: Array, divide: Divide = divide) -> Array:
    """Returns the factor to fixed point: ``2**16 / scale``, or 0 for 0."""
    return fixed_point.inverse(1 << fixed_point.FRACTION, scale, divide)

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(self, x: Array, factor: Array, lane: Lane, limit: Operand = None) -> Array:
    """Returns a sign bit above seven bits of magnitude, but never minus zero."""
    del limit
    positive, negative = (jnp.uint32(top << fixed_point.FRACTION) for top in self.tops)
    same = self.tops[0] == self.tops[1]
    top = positive if same else jnp.where(x < 0, negative, positive)
    fixed = jnp.minimum(coordinate(jnp.abs(x) * factor, self.lines), top)
    magnitude = fixed_point.rounded(fixed, lane, x)
    negative = (x < 0) & (magnitude > 0)
    return jnp.where(negative, magnitude | jnp.uint32(_SIGN), magnitude)

  def value(self, codes: Array, scale: Array, *level: Array) -> Array:
    """Returns the values of codes, with the levels of their magnitudes."""
    codes = codes.astype(jnp.int32)
    magnitude = jnp.where(codes == _SIGN, np.float32(self.last), level[0])
    sign = jnp.where(codes > _SIGN, jnp.uint32(1 << 31), jnp.uint32(0))
    return fixed_point.signed(magnitude * scale, sign)


def lines_between(levels: np.ndarray) -> list[Line]:
  """Returns the lines of increasing float64 levels that start at zero."""
  lines: list[Line] = []
  last, unit = 0.0, 1 << fixed_point.FRACTION
  for number, distance in enumerate(np.diff(levels)):
    # Levels are computed in float64: the distances of two runs differ by far more than
    # rounding errors.
    if abs(distance - last) > 1e-9 * distance:
      offset = round(unit * (number - levels[number] / distance))
      start = np.float32(unit * levels[number])
      lines.append(Line(start, np.float32(1 / distance), np.int32(offset)))
    last = distance
  return lines
