"""Rounds to codes by a Pallas kernel: scale, round, pack and residual in one pass."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.kernels.common import dithers, fixed_point, planes, scales
from gradcomp._src.kernels.gpu import tiles
from gradcomp._src.kernels.gpu.tiles import Block, Encoded, Index, Launch, Operand
from gradcomp._src.kernels.quantize import reference


@tiles.completed(reference.encode_rows)
def encode_rows(
  x: Array,
  scale: Operand,
  dither: Operand,
  limit: Operand = None,
  *,
  form: reference.ScaledForm,
  interpret: Any = False,
) -> Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  columns = form.planes if scale is None else scale.shape[1]
  step = form.planes if form.planes % dithers.LANES else dithers.LANES
  # The division by a given scale is the one of all implementations, outside the kernel.
  factor = None if scale is None else form.factor(scale)

  def body(block: Block, *refs: Any) -> None:
    dither_ref, scale_ref, factor_ref, limit_ref = refs
    dither = dithers.read(dither_ref)
    most = None if limit_ref is None else limit_ref[0]

    def code_plane(k: Index, lane: fixed_point.Lane) -> Array:
      x = block.plane(k)
      if scale_ref is None:
        unit = form.unit(scales.scales_of_bits(tiles.largest_bits(x)))
        factor = form.factor(unit, fixed_point.exact_quotient)
      else:
        column = k if columns > 1 else 0
        unit, factor = block.read(scale_ref, column), block.read(factor_ref, column)
      codes = form.code(x, block.spread(factor, x.shape), lane, most)
      if form.keep:
        block.put_residual(k, x - form.value(codes, block.spread(unit, x.shape)))
      if form.inline and columns > 1:
        block.put(planes.float_words(unit), form.bucket_size + k)
      return codes

    # Planes in a loop share random numbers by groups. Unrolled, sixteen planes would
    # not stay in registers: ptxas loads most of them before it codes the first.
    def code_planes(number: Array, words: Array) -> Array:
      first = number * step
      lanes = block.lanes(dither, first)
      codes = (code_plane(first + k, next(lanes)) for k in range(step))
      return words | (form.pack(codes) << (first * form.bits).astype(jnp.uint32))

    if form.inline and columns == 1:
      block.put(planes.float_words(block.read(scale_ref, 0)), form.bucket_size)
    words = block.placed(jnp.zeros(block.shape, jnp.uint32))
    trips = jnp.int32(form.planes // step)
    block.put(jax.lax.fori_loop(jnp.int32(0), trips, code_planes, words))

  limits = None if limit is None else limit.reshape(1)
  row_words = form.bucket_size + form.inline * columns
  launch = Launch(f"{form.name}_encode", row_words, interpret, form.keep)
  return tiles.encode(body, x, (dither, scale, factor, limits), form, launch)
