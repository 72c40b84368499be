"""Casts and packs by a Pallas kernel."""

import functools
from typing import Any

import jax

from gradcomp.kernels import blocks
from gradcomp.kernels.float_cast import reference
from gradcomp.kernels.float_cast.reference import draws, width
from gradcomp.kernels.float_codes import FloatRounding, to_codes
from gradcomp.kernels.float_formats import FloatFormat
from gradcomp.kernels.planes import pack_planes, planes_per_word


# Traced once for all leaves of a shape; inlined, so that it is one call all the same.
@functools.partial(
  jax.jit,
  static_argnames=("fmt", "rounding", "saturate", "row_words", "interpret"),
  inline=True,
)
def encode_rows(
  x: jax.Array,
  exponent: jax.Array | None,
  key: jax.Array | None,
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

  def body(block: blocks.Block, exponent_ref: Any, key_ref: Any) -> None:
    words = None if key_ref is None else (key_ref[0], key_ref[1])
    lanes = draws(words, block.shape, planes, block.first_row)
    codes = [
      to_codes(
        block.plane(k),
        fmt,
        rounding=rounding,
        draw=lane,
        exponent=None if exponent_ref is None else exponent_ref[0],
        saturate=saturate,
      )
      for k, lane in enumerate(lanes)
    ]
    block.put(pack_planes(codes, bits))

  def last(rest: jax.Array, row: int) -> tuple[jax.Array, None]:
    rows = reference.encode_rows(
      rest,
      exponent,
      key,
      fmt=fmt,
      rounding=rounding,
      saturate=saturate,
      row_words=row_words,
      first_row=row,
    )
    return rows, None

  return blocks.encode(
    body,
    "float_cast",
    x,
    (None if exponent is None else exponent.reshape(1), key),
    planes=planes,
    bucket_size=row_words,
    row_words=row_words,
    keep=False,
    last=last,
    interpret=interpret,
  )[0]
