"""Rounds to codes by a Mosaic GPU kernel: scale, round, pack, residual in one pass.

A program has one tile. It calls the functions of planes that the Triton-style kernel
calls.
"""

from typing import Any

import jax

from gradcomp._src.kernels.common.dithers import lane_stream, read
from gradcomp._src.kernels.common.fixed_point import exact_quotient, rounding_lanes
from gradcomp._src.kernels.common.planes import float_words
from gradcomp._src.kernels.common.scales import scales_of_bits
from gradcomp._src.kernels.gpu import mosaic_tiles, triton_tiles
from gradcomp._src.kernels.gpu.triton_tiles import Launch
from gradcomp._src.kernels.quantize import reference
from gradcomp._src.kernels.quantize.form import ScaledForm


@triton_tiles.completed(reference.encode_rows)
def encode_rows(
  x: jax.Array,
  scale: jax.Array | None,
  dither: jax.Array | None,
  *,
  form: ScaledForm,
  interpret: Any = False,
) -> triton_tiles.Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  columns = form.planes if scale is None else scale.shape[1]
  factor = None if scale is None else form.factor(scale)

  def body(
    tile: mosaic_tiles.Tile, dither_ref: Any, scale_ref: Any, factor_ref: Any
  ) -> None:
    words, row = read(dither_ref), tile.number
    lanes = iter(rounding_lanes(None, tile.shape, form.planes, first_row=row))
    if words is not None:
      lanes = lane_stream(words, tile.shape, first_row=row, iota=tile.iota)
    packed: Any = None
    for k in range(form.planes):
      x = tile.plane(k)
      if scale_ref is None:
        unit = form.unit(scales_of_bits(triton_tiles.largest_bits(x, axis=None)))
        factor = form.factor(unit, exact_quotient)
      else:
        unit, factor = scale_ref[row, k % columns], factor_ref[row, k % columns]
      codes = form.code(x, factor, next(lanes))
      # Planes are packed in turn, since registers would not hold the codes of all.
      packed = codes if packed is None else packed | (codes << (k * form.bits))
      if form.keep:
        tile.put_residual(k, x - form.value(codes, unit))
      if form.inline and k < columns:
        tile.put_scale(k, float_words(unit))
    tile.put(packed)

  launch = Launch(
    f"{form.name}_encode",
    form.bucket_size + form.inline * columns,
    keep=form.keep,
    interpret=interpret,
  )
  return mosaic_tiles.encode(body, x, (dither, scale, factor), form, launch)
