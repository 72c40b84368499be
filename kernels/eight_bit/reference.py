"""Encodes and decodes 8-bit types in jnp: a sign and a level of a table, over planes.

See docs/inside/wire-format.md for the rule.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.kernels.common.fixed_point import (
  FRACTION,
  Lane,
  rounded,
  rounding_lanes,
  signed,
)
from gradcomp._src.kernels.common.piecewise_linear import Line, coordinate, to_units
from gradcomp._src.kernels.common.planes import (
  Segment,
  float_words,
  floats,
  pack_planes,
  planes_per_word,
  stack_rows,
  unpack_planes,
)
from gradcomp._src.kernels.common.scales import bucket_norms, scales

_SIGN = 1 << 7
_LARGEST = np.finfo(np.float32).max
PLANES = planes_per_word(8)


def encode_rows(
  x: jax.Array,
  scale: jax.Array | None,
  dither: jax.Array | None,
  *,
  lines: Sequence[Line],
  tops: tuple[int, int],
  bucket_size: int,
  up: float,
  first_row: int = 0,
) -> jax.Array:
  """Encodes a flat array as rows of words and scales.

  Args:
    x: ``float32[n]``.
    scale: ``float32[rows, 1]`` or ``float32[rows, 4]``; by default the largest
      magnitude of each bucket, :func:`enlarged`.
    dither: ``uint32[3]`` for stochastic rounding, None for nearest.
    lines: the straight lines between the levels, see ``common.piecewise_linear``.
    tops: the largest magnitude of a positive and of a negative code.
    bucket_size: elements a bucket, ``B``.
    up: see :func:`enlarged`.
    first_row: the number of the first row, which the random numbers depend on.

  Returns:
    ``uint32[rows, B + scales]``.
  """
  if scale is None:
    scale = enlarged(scales(bucket_norms(x, PLANES, bucket_size, "max")), up)

  def encode(segment: Segment) -> list[jax.Array]:
    row_scale = segment.rows_of(scale)
    factor = jnp.broadcast_to(to_units(row_scale), (segment.shape[0], PLANES))
    row = first_row + segment.first_row
    lanes = rounding_lanes(dither, segment.shape, PLANES, first_row=row)
    codes = [
      code(plane, factor[:, k : k + 1], lanes[k], lines, tops)
      for k, plane in enumerate(segment.planes)
    ]
    return [pack_planes(codes, 8), float_words(row_scale)]

  return stack_rows(x, PLANES, bucket_size, bucket_size + scale.shape[1], encode)


def enlarged(scale: jax.Array, up: float) -> jax.Array:
  """Returns ``scale * up``, the value of a level of 1, at most the largest float.

  The largest element is then the level ``1 / up``. NaN stays NaN; it is not cut by a
  minimum, because minima drop NaN on GPUs.
  """
  large = scale * np.float32(up)
  return jnp.where(large > _LARGEST, _LARGEST, large)


def code(
  x: jax.Array,
  factor: jax.Array,
  lane: Lane,
  lines: Sequence[Line],
  tops: tuple[int, int],
) -> jax.Array:
  """Returns the codes of one plane: a sign bit above seven bits of magnitude.

  No element becomes minus zero. Its code, 128, is the magnitude of the largest level in
  a type that has 256 levels.
  """
  positive, negative = (jnp.uint32(top << FRACTION) for top in tops)
  top = positive if tops[0] == tops[1] else jnp.where(x < 0, negative, positive)
  fixed = jnp.minimum(coordinate(jnp.abs(x) * factor, lines), top)
  magnitude = rounded(fixed, lane, x)
  negative = (x < 0) & (magnitude > 0)
  return jnp.where(negative, magnitude | jnp.uint32(_SIGN), magnitude)


def decode_rows(
  rows: jax.Array, *, table: np.ndarray, last: float, bucket_size: int
) -> jax.Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, 4, B]``.

  ``table`` holds the values of 128 magnitudes, ``float32[128]``, and ``last`` is the
  value of the code 128, minus zero.
  """
  codes = unpack_planes(rows[..., :bucket_size], 8).astype(jnp.int32)
  level = jnp.asarray(table)[codes & (_SIGN - 1)]
  level = jnp.where(codes == _SIGN, np.float32(last), level)
  scale = floats(rows[..., bucket_size:])[..., None]
  sign = jnp.where(codes > _SIGN, jnp.uint32(1 << 31), jnp.uint32(0))
  return signed(level * scale, sign)
