"""Encodes 8-bit types by a Pallas kernel, in one pass if buckets have scales."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from gradcomp._src.kernels.common.dithers import read
from gradcomp._src.kernels.common.fixed_point import exact_quotient, rounding_lanes
from gradcomp._src.kernels.common.piecewise_linear import Line, to_units
from gradcomp._src.kernels.common.planes import float_words, pack_planes
from gradcomp._src.kernels.common.scales import scales_of_bits
from gradcomp._src.kernels.eight_bit import reference
from gradcomp._src.kernels.eight_bit.reference import PLANES, code, enlarged
from gradcomp._src.kernels.gpu import triton_tiles


# Traced once for all leaves of a shape; inlined, so that it is one call all the same.
@functools.partial(
  jax.jit,
  static_argnames=("lines", "tops", "bucket_size", "up", "interpret"),
  inline=True,
)
def encode_rows(
  x: jax.Array,
  scale: jax.Array | None,
  dither: jax.Array | None,
  *,
  lines: Sequence[Line],
  tops: tuple[int, int],
  bucket_size: int,
  up: float,
  interpret: bool = False,
) -> jax.Array:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  columns = PLANES if scale is None else scale.shape[1]
  units = None if scale is None else to_units(scale)

  def body(
    block: triton_tiles.Block, dither_ref: Any, scale_ref: Any, factor_ref: Any
  ) -> None:
    words = read(dither_ref)
    lanes = rounding_lanes(words, block.shape, PLANES, first_row=block.first_row)
    codes = []
    for k in range(PLANES):
      x = block.plane(k)
      if scale_ref is None:
        unit = enlarged(scales_of_bits(triton_tiles.largest_bits(x)), up)
        factor = to_units(unit, exact_quotient)
      else:
        unit = scale_ref[block.rows, k % columns]
        factor = factor_ref[block.rows, k % columns]
      codes.append(code(x, factor[:, None], lanes[k], lines, tops))
      if k < columns:
        block.put_scale(k, float_words(unit))
    block.put(pack_planes(codes, 8))

  def last(rest: jax.Array, row: int) -> tuple[jax.Array, None]:
    rows = reference.encode_rows(
      rest,
      None if scale is None else scale[row:],
      dither,
      lines=lines,
      tops=tops,
      bucket_size=bucket_size,
      up=up,
      first_row=row,
    )
    return rows, None

  return triton_tiles.encode(
    body,
    "eight_bit_encode",
    x,
    (dither, scale, units),
    planes=PLANES,
    bucket_size=bucket_size,
    row_words=bucket_size + columns,
    keep=False,
    last=last,
    interpret=interpret,
  )[0]
