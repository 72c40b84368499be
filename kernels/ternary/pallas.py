"""Encodes TernGrad by a Pallas kernel, with scales that are computed before."""

import functools
from typing import Any

import jax

from gradcomp._src.kernels.common.dithers import read
from gradcomp._src.kernels.common.fixed_point import rounding_lanes, top_multiplier
from gradcomp._src.kernels.common.planes import float_words
from gradcomp._src.kernels.gpu import triton_tiles
from gradcomp._src.kernels.ternary import reference
from gradcomp._src.kernels.ternary.reference import TOP, Packing, code, pack


# Traced once for all leaves of a shape; inlined, so that it is one call all the same.
@functools.partial(
  jax.jit,
  static_argnames=("packing", "bucket_size", "inline", "interpret"),
  inline=True,
)
def encode_rows(
  x: jax.Array,
  scale: jax.Array,
  limit: jax.Array,
  dither: jax.Array | None,
  *,
  packing: Packing,
  bucket_size: int,
  inline: bool,
  interpret: bool = False,
) -> jax.Array:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  planes, columns = reference.planes(packing), scale.shape[1]

  def body(block: triton_tiles.Block, *refs: Any) -> None:
    scale_ref, factor_ref, limit_ref, dither_ref = refs
    words = read(dither_ref)
    lanes = rounding_lanes(words, block.shape, planes, first_row=block.first_row)
    digits = []
    for k in range(planes):
      factor = factor_ref[block.rows, k % columns][:, None]
      digits.append(code(block.plane(k), limit_ref[0], factor, lanes[k], packing))
      if inline and k < columns:
        block.put_scale(k, float_words(scale_ref[block.rows, k]))
    block.put(pack(digits, packing))

  def last(rest: jax.Array, row: int) -> tuple[jax.Array, None]:
    rows = reference.encode_rows(
      rest,
      scale[row:],
      limit,
      dither,
      packing=packing,
      bucket_size=bucket_size,
      inline=inline,
      first_row=row,
    )
    return rows, None

  return triton_tiles.encode(
    body,
    "ternary_encode",
    x,
    (scale, top_multiplier(TOP, scale), limit.reshape(1), dither),
    planes=planes,
    bucket_size=bucket_size,
    row_words=bucket_size + inline * columns,
    keep=False,
    last=last,
    interpret=interpret,
  )[0]
