"""Casts and packs by a Pallas kernel."""

import functools
from typing import Any

import jax

from gradcomp._src.kernels.common.dithers import read
from gradcomp._src.kernels.common.fixed_point import rounding_lanes
from gradcomp._src.kernels.common.float_codes import FloatRounding
from gradcomp._src.kernels.common.float_formats import FloatFormat
from gradcomp._src.kernels.common.planes import pack_planes, planes_per_word
from gradcomp._src.kernels.float_cast import reference
from gradcomp._src.kernels.float_cast.reference import code, width
from gradcomp._src.kernels.gpu import triton_tiles


# Traced once for all leaves of a shape; inlined, so that it is one call all the same.
@functools.partial(
  jax.jit,
  static_argnames=("fmt", "rounding", "saturate", "row_words", "interpret"),
  inline=True,
)
def encode_rows(
  x: jax.Array,
  exponent: jax.Array | None,
  dither: jax.Array | None,
  *,
  fmt: FloatFormat,
  rounding: FloatRounding,
  saturate: bool,
  row_words: int,
  interpret: bool = False,
) -> jax.Array:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  bits = width(fmt)
  planes = planes_per_word(bits)

  def body(block: triton_tiles.Block, exponent_ref: Any, dither_ref: Any) -> None:
    words, row = read(dither_ref), block.first_row
    lanes = rounding_lanes(words, block.shape, planes, first_row=row)
    moved = None if exponent_ref is None else exponent_ref[0]
    codes = [
      code(block.plane(k), lane, moved, fmt=fmt, rounding=rounding, saturate=saturate)
      for k, lane in enumerate(lanes)
    ]
    block.put(pack_planes(codes, bits))

  def last(rest: jax.Array, row: int) -> tuple[jax.Array, None]:
    rows = reference.encode_rows(
      rest,
      exponent,
      dither,
      fmt=fmt,
      rounding=rounding,
      saturate=saturate,
      row_words=row_words,
      first_row=row,
    )
    return rows, None

  return triton_tiles.encode(
    body,
    "float_cast",
    x,
    (None if exponent is None else exponent.reshape(1), dither),
    planes=planes,
    bucket_size=row_words,
    row_words=row_words,
    keep=False,
    last=last,
    interpret=interpret,
  )[0]
