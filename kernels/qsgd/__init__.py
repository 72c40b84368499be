"""Encodes and decodes QSGD."""

import functools
from typing import Any

import jax

from gradcomp._src.kernels.common.planes import planes_per_word
from gradcomp._src.kernels.gpu import dispatch, mosaic_tiles, self_check, triton_tiles
from gradcomp._src.kernels.qsgd import mosaic, pallas, reference
from gradcomp._src.kernels.qsgd.reference import Levels as Levels
from gradcomp._src.kernels.qsgd.reference import decode_rows as decode_rows
from gradcomp._src.kernels.qsgd.reference import from_signed_codes as from_signed_codes
from gradcomp._src.kernels.qsgd.reference import intervals as intervals
from gradcomp._src.kernels.qsgd.reference import signed_codes as signed_codes


def encode_rows(
  x: jax.Array,
  scale: jax.Array | None,
  dither: jax.Array | None,
  *,
  bits: int,
  bucket_size: int,
  levels: Levels,
  inline: bool,
  keep: bool = False,
  implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Runs :func:`reference.encode_rows` or a kernel, as :func:`dispatch.run` chooses."""
  options: dict[str, Any] = {
    "bits": bits,
    "bucket_size": bucket_size,
    "levels": levels,
    "inline": inline,
    "keep": keep,
  }
  sizes = x.size, planes_per_word(bits), bucket_size
  return dispatch.run(
    implementation,
    x,
    scale,
    dither,
    xla=functools.partial(reference.encode_rows, **options),
    pallas=triton_tiles.refusal(*sizes)
    or functools.partial(pallas.encode_rows, **options),
    mosaic=mosaic_tiles.refusal(*sizes)
    or functools.partial(mosaic.encode_rows, **options),
    example=lambda: self_check.few_tiles(sizes[1] * bucket_size, scale, dither),
  )
