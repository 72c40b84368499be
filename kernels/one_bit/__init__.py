"""Encodes and decodes 1-bit SGD."""

import functools
from typing import Any

import jax

from gradcomp._src.kernels.gpu import dispatch, mosaic_tiles, self_check, triton_tiles
from gradcomp._src.kernels.one_bit import mosaic, pallas, reference
from gradcomp._src.kernels.one_bit.columns import decode_columns as decode_columns
from gradcomp._src.kernels.one_bit.columns import encode_columns as encode_columns
from gradcomp._src.kernels.one_bit.reference import WORD as WORD
from gradcomp._src.kernels.one_bit.reference import decode_rows as decode_rows


def encode_rows(
  x: jax.Array,
  *,
  bucket_size: int,
  keep: bool = False,
  implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Runs :func:`reference.encode_rows` or a kernel, as :func:`dispatch.run` chooses."""
  options: dict[str, Any] = {"bucket_size": bucket_size, "keep": keep}
  sizes = x.size, WORD, bucket_size
  return dispatch.run(
    implementation,
    x,
    xla=functools.partial(reference.encode_rows, **options),
    pallas=triton_tiles.refusal(*sizes)
    or functools.partial(pallas.encode_rows, **options),
    mosaic=mosaic_tiles.refusal(*sizes)
    or functools.partial(mosaic.encode_rows, **options),
    example=lambda: self_check.few_tiles(WORD * bucket_size),
  )
