"""Scales blocks, casts and packs by a Pallas kernel, in one pass."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from gradcomp._src.kernels.block_float import reference
from gradcomp._src.kernels.common import dithers, fixed_point, planes
from gradcomp._src.kernels.gpu import tiles


def refusal(size: int, form: reference.Form) -> str:
  """Returns the reason why no kernel can encode ``size`` elements; "" if one can."""
  if form.planes % 4:
    return f"a kernel's words hold 4 or 8 codes, and these hold {form.planes}"
  return tiles.refusal(size, form)


@tiles.completed(reference.encode_rows)
def encode_rows(
  x: Array,
  shared: tiles.Operand,
  dither: tiles.Operand,
  *,
  form: reference.Form,
  interpret: Any = False,
) -> tiles.Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  each = form.bucket_size // form.block_size  # blocks of a plane

  def body(block: tiles.Block, shared_ref: Any, dither_ref: Any) -> None:
    lanes = block.lanes(dithers.read(dither_ref))
    own = None if shared_ref is None else block.read(shared_ref, 0)
    spread = None if own is None else block.spread(own, block.shape[:-1])
    codes, scales = [], []
    for k in range(form.planes):
      plane = block.plane(k)
      largest = planes.floats(tiles.largest_bits(plane).astype(jnp.uint32))
      scale = form.scale_codes(largest, spread, fixed_point.exact_quotient)
      factor = form.factors(scale, spread, fixed_point.exact_quotient)
      codes.append(form.cast(plane, next(lanes), block.spread(factor, plane.shape)))
      scales.append(scale)
    block.put(planes.pack_planes(codes, form.fmt.bits))
    # The blocks of a word's bytes lie a quarter of a row apart.
    step = form.planes // 4
    for first in range(step):
      words = planes.pack_planes(scales[first::step], 8)
      block.put(words, form.bucket_size + first * each)
    if own is not None:
      block.put(planes.float_words(own), form.row_words - 1)

  # Read as blocks, a plane has a maximum over a block within two threads.
  launch = tiles.Launch(
    "block_float_encode", form.row_words, interpret, views=[(each, form.block_size)]
  )
  return tiles.encode(body, x, (shared, dither), form, launch)
