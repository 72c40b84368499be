"""Encodes QSGD by a Mosaic GPU kernel: scale, round, pack and subtract in one pass.

It calls the functions of planes that the Triton-style kernel calls. A program has one
tile.
"""

from typing import Any

import jax

from gradcomp._src.kernels.common.dithers import lane_stream, read
from gradcomp._src.kernels.common.fixed_point import (
  exact_quotient,
  rounding_lanes,
  top_multiplier,
)
from gradcomp._src.kernels.common.planes import float_words, planes_per_word
from gradcomp._src.kernels.common.scales import scales_of_bits
from gradcomp._src.kernels.gpu import mosaic_tiles, triton_tiles
from gradcomp._src.kernels.qsgd import reference
from gradcomp._src.kernels.qsgd.reference import Levels, code, limit, value


def encode_rows(
  x: jax.Array,
  scale: jax.Array | None,
  dither: jax.Array | None,
  *,
  bits: int,
  bucket_size: int,
  levels: Levels,
  inline: bool,
  keep: bool,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  planes = planes_per_word(bits)
  top = limit(bits, levels)
  columns = planes if scale is None else scale.shape[1]
  multiplier = None if scale is None else top_multiplier(top, scale)

  def body(
    tile: mosaic_tiles.Tile, dither_ref: Any, scale_ref: Any, factor_ref: Any
  ) -> None:
    words = read(dither_ref)
    row = tile.number
    lanes = iter(rounding_lanes(None, tile.shape, planes, first_row=row))
    if words is not None:
      lanes = lane_stream(words, tile.shape, first_row=row, iota=tile.iota)
    packed: Any = None
    for k in range(planes):
      x = tile.plane(k)
      if scale_ref is None:
        unit = scales_of_bits(triton_tiles.largest_bits(x, axis=None))
        factor = top_multiplier(top, unit, exact_quotient)
      else:
        unit, factor = scale_ref[row, k % columns], factor_ref[row, k % columns]
      codes = code(x, factor, next(lanes), bits, levels)
      # Planes are packed in turn, since registers would not hold the codes of all.
      packed = codes if packed is None else packed | (codes << (k * bits))
      if keep:
        tile.put_residual(k, x - value(codes, unit, bits, levels))
      if inline and k < columns:
        tile.put_scale(k, float_words(unit))
    tile.put(packed)

  def last(rest: jax.Array, row: int) -> tuple[jax.Array, jax.Array | None]:
    return reference.encode_rows(
      rest,
      None if scale is None else scale[row:],
      dither,
      bits=bits,
      bucket_size=bucket_size,
      levels=levels,
      inline=inline,
      keep=keep,
      first_row=row,
    )

  return mosaic_tiles.encode(
    body,
    "qsgd_encode",
    x,
    (dither, scale, multiplier),
    planes=planes,
    bucket_size=bucket_size,
    row_words=bucket_size + inline * columns,
    keep=keep,
    last=last,
    interpret=interpret,
  )
