"""Rounds to codes by a Pallas kernel: scale, round, pack and residual in one pass."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.kernels.common.dithers import LANES, read
from gradcomp._src.kernels.common.fixed_point import Lane, exact_quotient
from gradcomp._src.kernels.common.planes import float_words
from gradcomp._src.kernels.common.scales import scales_of_bits
from gradcomp._src.kernels.gpu import tiles
from gradcomp._src.kernels.gpu.tiles import Block, Encoded, Index, Launch, Operand
from gradcomp._src.kernels.quantize import reference
from gradcomp._src.kernels.tpu import codes as tpu


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
  step = form.planes if form.planes % LANES else LANES
  # The division by a given scale is the one of all implementations, outside the kernel.
  factor = None if scale is None else form.factor(scale)

  def body(block: Block, *refs: Any) -> None:
    dither_ref, scale_ref, factor_ref, limit_ref = refs
    dither = read(dither_ref)
    most = None if limit_ref is None else limit_ref[0]

    def code_plane(k: Index, lane: Lane) -> Array:
      x = block.plane(k)
      if scale_ref is None:
        unit = form.unit(scales_of_bits(tiles.largest_bits(x)))
        factor = form.factor(unit, exact_quotient)
      else:
        column = k if columns > 1 else 0
        unit, factor = block.read(scale_ref, column), block.read(factor_ref, column)
      codes = form.code(x, block.spread(factor, x.shape), lane, most)
      if form.keep:
        sent = form.value(codes, block.spread(unit, x.shape))
        block.put_residual(k, x - sent)
      if form.inline and columns > 1:
        block.put_scale(form.bucket_size + k, float_words(unit))
      return codes

    # Planes in a loop share random numbers by groups. Unrolled, sixteen planes would
    # not stay in registers: ptxas loads most of them before it codes the first.
    def code_planes(number: Array, words: Array) -> Array:
      first = number * step
      lanes = block.lanes(dither, first)
      codes = (code_plane(first + k, next(lanes)) for k in range(step))
      shift = (first * form.bits).astype(jnp.uint32)
      return words | (form.pack(codes) << shift)

    if form.inline and columns == 1:
      block.put_scale(form.bucket_size, float_words(block.read(scale_ref, 0)))
    words = block.placed(jnp.zeros(block.shape, jnp.uint32))
    trips = jnp.int32(form.planes // step)
    block.put(jax.lax.fori_loop(jnp.int32(0), trips, code_planes, words))

  limits = None if limit is None else limit.reshape(1)
  row_words = form.bucket_size + form.inline * columns
  launch = Launch(f"{form.name}_encode", row_words, form.keep, interpret=interpret)
  return tiles.encode(body, x, (dither, scale, factor, limits), form, launch)


def decode_rows(
  rows: Array, *, form: reference.ScaledForm, interpret: Any = False
) -> Array:
  """Decodes as :func:`reference.decode_rows` does, by a kernel for TPUs."""
  flat = rows.reshape(-1, rows.shape[-1])
  row = tpu.Row(form.bits, form.bucket_size, form.shared)
  if not form.inline or not row.fits(len(flat)):
    return reference.decode_rows(rows, form)
  value = lambda codes, *numbers: form.value(codes.astype(jnp.uint32), *numbers)
  table = np.array(form.table, np.float32) if form.table else None
  found = tpu.decode(value, flat, row, table, interpret)
  return found.reshape(*rows.shape[:-1], *found.shape[1:])
