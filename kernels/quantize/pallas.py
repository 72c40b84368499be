"""Rounds to codes by a Pallas kernel: scale, round, pack and residual in one pass."""

from typing import Any

from jax import Array

from gradcomp._src.kernels.common.dithers import read
from gradcomp._src.kernels.common.fixed_point import exact_quotient
from gradcomp._src.kernels.common.planes import float_words
from gradcomp._src.kernels.common.scales import scales_of_bits
from gradcomp._src.kernels.gpu import tiles
from gradcomp._src.kernels.gpu.tiles import Block, Encoded, Launch, Operand
from gradcomp._src.kernels.quantize import reference


@tiles.completed(reference.encode_rows)
def encode_rows(
  x: Array,
  scale: Operand,
  dither: Operand,
  limit: Operand = None,
  *,
  form: reference.ScaledForm,
  interpret: Any = False,
) -> Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  columns = form.planes if scale is None else scale.shape[1]
  # The division by a given scale is the one of all implementations, outside the kernel.
  factor = None if scale is None else form.factor(scale)

  def body(block: Block, *refs: Any) -> None:
    dither_ref, scale_ref, factor_ref, limit_ref = refs
    lanes = block.lanes(read(dither_ref))
    most = None if limit_ref is None else limit_ref[0]
    codes = []
    for k in range(form.planes):
      x = block.plane(k)
      if scale_ref is None:
        unit = form.unit(scales_of_bits(tiles.largest_bits(x)))
        factor = form.factor(unit, exact_quotient)
      else:
        unit = block.read(scale_ref, k % columns)
        factor = block.read(factor_ref, k % columns)
      codes.append(form.code(x, block.spread(factor, x.shape), next(lanes), most))
      if form.keep:
        sent = form.value(codes[-1], block.spread(unit, x.shape))
        block.put_residual(k, x - sent)
      if form.inline and k < columns:
        block.put_scale(form.bucket_size + k, float_words(unit))
    block.put(form.pack(codes))

  limits = None if limit is None else limit.reshape(1)
  row_words = form.bucket_size + form.inline * columns
  launch = Launch(f"{form.name}_encode", row_words, form.keep, interpret=interpret)
  return tiles.encode(body, x, (dither, scale, factor, limits), form, launch)
