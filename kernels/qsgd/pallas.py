"""Encodes QSGD by a Pallas kernel: scale, round, pack and residual in one pass.

The gradient is read once. The scale of a bucket is computed while it is in registers.
"""

import functools
from typing import Any

import jax

from gradcomp._src.kernels.common.dithers import read
from gradcomp._src.kernels.common.fixed_point import (
  exact_quotient,
  rounding_lanes,
  top_multiplier,
)
from gradcomp._src.kernels.common.planes import (
  float_words,
  pack_planes,
  planes_per_word,
)
from gradcomp._src.kernels.common.scales import scales_of_bits
from gradcomp._src.kernels.gpu import triton_tiles
from gradcomp._src.kernels.qsgd import reference
from gradcomp._src.kernels.qsgd.reference import Levels, code, limit, value


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _scaling(x: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
  """Returns the scale of each bucket of a plane, and its :func:`top_multiplier`."""
  scale = scales_of_bits(triton_tiles.largest_bits(x))
  return scale, top_multiplier(top, scale, exact_quotient)


# Traced once for all leaves of a shape; inlined, so that it is one call all the same.
@functools.partial(
  jax.jit,
  static_argnames=("bits", "bucket_size", "levels", "inline", "keep", "interpret"),
  inline=True,
)
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
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  planes = planes_per_word(bits)
  top = limit(bits, levels)
  columns = planes if scale is None else scale.shape[1]
  # The division by a given scale is the one of all implementations, outside the kernel.
  multiplier = None if scale is None else top_multiplier(top, scale)

  def body(
    block: triton_tiles.Block, dither_ref: Any, scale_ref: Any, factor_ref: Any
  ) -> None:
    words = read(dither_ref)
    lanes = rounding_lanes(words, block.shape, planes, first_row=block.first_row)
    codes = []
    for k in range(planes):
      x = block.plane(k)
      if scale_ref is None:
        unit, factor = _scaling(x, top)
      else:
        unit = scale_ref[block.rows, k % columns]
        factor = factor_ref[block.rows, k % columns]
      codes.append(code(x, factor[:, None], lanes[k], bits, levels))
      if keep:
        block.put_residual(k, x - value(codes[-1], unit[:, None], bits, levels))
      if inline and k < columns:
        block.put_scale(k, float_words(unit))
    block.put(pack_planes(codes, bits))

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

  return triton_tiles.encode(
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
