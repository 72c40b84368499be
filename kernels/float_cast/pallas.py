"""Casts and packs by a Pallas kernel."""

from typing import Any

import jax

from gradcomp._src.kernels.common.dithers import read
from gradcomp._src.kernels.common.fixed_point import rounding_lanes
from gradcomp._src.kernels.common.planes import pack_planes
from gradcomp._src.kernels.float_cast import reference
from gradcomp._src.kernels.float_cast.reference import Form, width
from gradcomp._src.kernels.gpu import triton_tiles
from gradcomp._src.kernels.gpu.triton_tiles import Block, Launch


@triton_tiles.completed(reference.encode_rows)
def encode_rows(
  x: jax.Array,
  exponent: jax.Array | None,
  dither: jax.Array | None,
  *,
  form: Form,
  interpret: bool = False,
) -> triton_tiles.Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""

  def body(block: Block, exponent_ref: Any, dither_ref: Any) -> None:
    words, row = read(dither_ref), block.first_row
    lanes = rounding_lanes(words, block.shape, form.planes, first_row=row)
    moved = None if exponent_ref is None else exponent_ref[0]
    codes = [form.code(block.plane(k), lane, moved) for k, lane in enumerate(lanes)]
    block.put(pack_planes(codes, width(form.fmt)))

  given = None if exponent is None else exponent.reshape(1), dither
  launch = Launch("float_cast", form.bucket_size, interpret=interpret)
  return triton_tiles.encode(body, x, given, form, launch)
