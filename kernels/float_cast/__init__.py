"""Casts arrays to floats of few bits and packs them, and decodes them."""

import functools
from typing import Any

import jax

from gradcomp._src.kernels.common.float_codes import FloatRounding
from gradcomp._src.kernels.common.float_formats import FloatFormat
from gradcomp._src.kernels.common.planes import planes_per_word
from gradcomp._src.kernels.float_cast import pallas, reference
from gradcomp._src.kernels.float_cast.reference import decode_rows as decode_rows
from gradcomp._src.kernels.float_cast.reference import exponent_byte as exponent_byte
from gradcomp._src.kernels.float_cast.reference import shift as shift
from gradcomp._src.kernels.float_cast.reference import unshifted as unshifted
from gradcomp._src.kernels.float_cast.reference import width as width
from gradcomp._src.kernels.gpu import dispatch, self_check, triton_tiles


def encode_rows(
  x: jax.Array,
  exponent: jax.Array | None,
  dither: jax.Array | None,
  *,
  fmt: FloatFormat,
  rounding: FloatRounding,
  saturate: bool,
  row_words: int,
  implementation: dispatch.Implementation | None = None,
) -> jax.Array:
  """Runs :func:`reference.encode_rows` or a kernel, as :func:`dispatch.run` chooses."""
  options: dict[str, Any] = {
    "fmt": fmt,
    "rounding": rounding,
    "saturate": saturate,
    "row_words": row_words,
  }
  planes = planes_per_word(width(fmt))
  no = triton_tiles.refusal(x.size, planes, row_words)
  return dispatch.run(
    implementation,
    x,
    exponent,
    dither,
    xla=functools.partial(reference.encode_rows, **options),
    pallas=no or functools.partial(pallas.encode_rows, **options),
    example=lambda: self_check.few_tiles(planes * row_words, exponent, dither),
  )
