"""Rounds elements to codes under scales and packs them over planes, in jnp.

See docs/inside/wire-format.md for the rule.
"""

import jax
import jax.numpy as jnp

from gradcomp._src.kernels.common.fixed_point import rounding_lanes
from gradcomp._src.kernels.common.planes import (
  float_words,
  floats,
  less,
  stacked,
  tile_segments,
  unpack_planes,
)
from gradcomp._src.kernels.common.scales import bucket_norms, scales
from gradcomp._src.kernels.quantize.form import ScaledForm


def encode_rows(
  x: jax.Array,
  scale: jax.Array | None,
  dither: jax.Array | None,
  limit: jax.Array | None = None,
  *,
  form: ScaledForm,
  first_row: int = 0,
) -> tuple[jax.Array, jax.Array | None]:
  """Encodes an array as rows of words and scales.

  Args:
    x: ``float32`` of any shape.
    scale: ``float32[rows, 1]`` or ``float32[rows, P]``; None for the largest magnitude
      of each bucket.
    dither: ``uint32[3]`` for stochastic rounding, None for nearest.
    limit: ``float32[]``, the magnitude that values are clipped to; None clips none.
    form: the options.
    first_row: the number of the first row, which the random numbers depend on.

  Returns:
    The rows, ``uint32[rows, B + scales]``, or ``uint32[rows, B]`` if the scales are not
    inline; and the residual, in the shape of ``x``, or None.
  """
  flat = x.reshape(-1)
  if scale is None:
    norms = bucket_norms(flat, form.planes, form.bucket_size, "max")
    scale = form.unit(scales(norms))
  rows = []
  for tiles in tile_segments(flat, form.planes, form.bucket_size):
    own = tiles.rows_of(scale)
    factor = jnp.broadcast_to(form.factor(own), (tiles.shape[0], form.planes))
    row = first_row + tiles.first_row
    lanes = rounding_lanes(dither, tiles.shape, form.planes, first_row=row)
    codes = [
      form.code(plane, factor[:, k : k + 1], lanes[k], limit)
      for k, plane in enumerate(tiles.planes)
    ]
    rows.append([form.pack(codes), *[float_words(own)] * form.inline])
  words = stacked(rows, form.bucket_size + form.inline * scale.shape[1])
  if not form.keep:
    return words, None
  return words, less(x, decode_rows(words, form))


def decode_rows(rows: jax.Array, form: ScaledForm) -> jax.Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, P, B]``."""
  codes = unpack_planes(rows[..., : form.bucket_size], form.bits)
  return form.value(codes, floats(rows[..., form.bucket_size :])[..., None])
