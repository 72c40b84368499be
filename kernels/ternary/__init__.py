"""Encodes and decodes TernGrad."""

import functools
from typing import Any

import jax

from gradcomp._src.kernels.gpu import dispatch, self_check, triton_tiles
from gradcomp._src.kernels.ternary import pallas, reference
from gradcomp._src.kernels.ternary.reference import Packing as Packing
from gradcomp._src.kernels.ternary.reference import codes as codes
from gradcomp._src.kernels.ternary.reference import pack_trits as pack_trits
from gradcomp._src.kernels.ternary.reference import planes as planes
from gradcomp._src.kernels.ternary.reference import unpack_trits as unpack_trits


def encode_rows(
  x: jax.Array,
  scale: jax.Array,
  limit: jax.Array,
  dither: jax.Array | None,
  *,
  packing: Packing,
  bucket_size: int,
  inline: bool,
  implementation: dispatch.Implementation | None = None,
) -> jax.Array:
  """Runs :func:`reference.encode_rows` or a kernel, as :func:`dispatch.run` chooses."""
  options: dict[str, Any] = {
    "packing": packing,
    "bucket_size": bucket_size,
    "inline": inline,
  }
  tile = planes(packing) * bucket_size
  no = triton_tiles.refusal(x.size, planes(packing), bucket_size)
  return dispatch.run(
    implementation,
    x,
    scale,
    limit,
    dither,
    xla=functools.partial(reference.encode_rows, **options),
    pallas=no or functools.partial(pallas.encode_rows, **options),
    example=lambda: self_check.few_tiles(tile, scale, limit, dither),
  )
