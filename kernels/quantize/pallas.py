"""Rounds to codes by a Pallas kernel: scale, round, pack and residual in one pass.

The gradient is read once. The scale of a bucket is computed while it is in registers.
"""

import functools
from typing import Any

import jax

from gradcomp._src.kernels.common.dithers import read
from gradcomp._src.kernels.common.fixed_point import exact_quotient, rounding_lanes
from gradcomp._src.kernels.common.planes import float_words
from gradcomp._src.kernels.common.scales import scales_of_bits
from gradcomp._src.kernels.gpu import triton_tiles
from gradcomp._src.kernels.gpu.triton_tiles import Block, Launch
from gradcomp._src.kernels.quantize import reference
from gradcomp._src.kernels.quantize.form import ScaledForm


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _scaling(x: jax.Array, form: ScaledForm) -> tuple[jax.Array, jax.Array]:
  """Returns the scale of each bucket of a plane, and its factor: ``float32[rows]``."""
  scale = form.unit(scales_of_bits(triton_tiles.largest_bits(x)))
  return scale, form.factor(scale, exact_quotient)


@triton_tiles.completed(reference.encode_rows)
def encode_rows(
  x: jax.Array,
  scale: jax.Array | None,
  dither: jax.Array | None,
  limit: jax.Array | None = None,
  *,
  form: ScaledForm,
  interpret: bool = False,
) -> triton_tiles.Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  columns = form.planes if scale is None else scale.shape[1]
  # The division by a given scale is the one of all implementations, outside the kernel.
  factor = None if scale is None else form.factor(scale)

  def body(
    block: Block, dither_ref: Any, scale_ref: Any, factor_ref: Any, limit_ref: Any
  ) -> None:
    words = read(dither_ref)
    lanes = rounding_lanes(words, block.shape, form.planes, first_row=block.first_row)
    most = None if limit_ref is None else limit_ref[0]
    codes = []
    for k in range(form.planes):
      x = block.plane(k)
      if scale_ref is None:
        unit, factor = _scaling(x, form)
      else:
        unit = scale_ref[block.rows, k % columns]
        factor = factor_ref[block.rows, k % columns]
      codes.append(form.code(x, factor[:, None], lanes[k], most))
      if form.keep:
        block.put_residual(k, x - form.value(codes[-1], unit[:, None]))
      if form.inline and k < columns:
        block.put_scale(k, float_words(unit))
    block.put(form.pack(codes))

  limits = None if limit is None else limit.reshape(1)
  launch = Launch(
    f"{form.name}_encode",
    form.bucket_size + form.inline * columns,
    keep=form.keep,
    interpret=interpret,
  )
  return triton_tiles.encode(body, x, (dither, scale, factor, limits), form, launch)
