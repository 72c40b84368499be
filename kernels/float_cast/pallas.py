"""Casts and packs by a Pallas kernel."""

from typing import Any

from jax import Array

from gradcomp._src.kernels.common import dithers, planes
from gradcomp._src.kernels.float_cast import reference
from gradcomp._src.kernels.gpu import tiles


@tiles.completed(reference.encode_rows)
def encode_rows(
  x: Array, *operands: tiles.Operand, form: reference.Form, interpret: Any = False
) -> tiles.Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""

  def body(block: tiles.Block, exponent_ref: Any, dither_ref: Any) -> None:
    lanes = block.lanes(dithers.read(dither_ref))
    moved = None if exponent_ref is None else exponent_ref[0]
    codes = (form.code(block.plane(k), next(lanes), moved) for k in range(form.planes))
    block.put(planes.pack_planes(codes, reference.width(form.fmt)))

  exponent, dither = operands
  given = None if exponent is None else exponent.reshape(1), dither
  launch = tiles.Launch("float_cast", [form.bucket_size], interpret)
  return tiles.encode(body, x, given, form, launch)
