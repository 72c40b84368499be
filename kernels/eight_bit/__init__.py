"""Encodes and decodes 8-bit data types."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from gradcomp._src.kernels.common.piecewise_linear import Line
from gradcomp._src.kernels.eight_bit import pallas, reference
from gradcomp._src.kernels.eight_bit.reference import PLANES as PLANES
from gradcomp._src.kernels.eight_bit.reference import decode_rows as decode_rows
from gradcomp._src.kernels.eight_bit.reference import enlarged as enlarged
from gradcomp._src.kernels.gpu import dispatch, self_check, triton_tiles


def encode_rows(
  x: jax.Array,
  scale: jax.Array | None,
  dither: jax.Array | None,
  *,
  lines: Sequence[Line],
  tops: tuple[int, int],
  bucket_size: int,
  up: float = 1.0,
  implementation: dispatch.Implementation | None = None,
) -> jax.Array:
  """Runs :func:`reference.encode_rows` or a kernel, as :func:`dispatch.run` chooses."""
  options: dict[str, Any] = {
    "lines": tuple(lines),
    "tops": tops,
    "bucket_size": bucket_size,
    "up": up,
  }
  no = triton_tiles.refusal(x.size, PLANES, bucket_size)
  return dispatch.run(
    implementation,
    x,
    scale,
    dither,
    xla=functools.partial(reference.encode_rows, **options),
    pallas=no or functools.partial(pallas.encode_rows, **options),
    example=lambda: self_check.few_tiles(PLANES * bucket_size, scale, dither),
  )
