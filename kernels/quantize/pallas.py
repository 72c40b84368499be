"""Rounds to codes on GPUs, and decodes these on TPUs, by Pallas kernels in one pass."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common import dithers, fixed_point, planes, scales
from gradcomp._src.kernels.gpu import tiles
from gradcomp._src.kernels.gpu.tiles import Block, Encoded, Index, Launch, Operand
from gradcomp._src.kernels.quantize import reference
from gradcomp._src.kernels.tpu import lines
from gradcomp._src.kernels.tpu.lines import LANES, ROWS


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
    block.put(lax.fori_loop(jnp.int32(0), trips, code_planes, words))

  limits = None if limit is None else limit.reshape(1)
  words = [form.bucket_size + form.inline * columns]
  launch = Launch(f"{form.name}_encode", words, interpret, form.keep)
  return tiles.encode(body, x, (dither, scale, factor, limits), form, launch)


# XLA for TPUs takes a pass to cut the words out of the rows, and writes few planes in
# parts of registers. A table of 128 numbers is a row of a register, out of which one
# operation picks a number for each lane; XLA's gather reads indices from memory, one by
# one.
@lines.decoder(reference.decode_rows)
def decode_on_tpu(
  rows: Array, *, form: reference.ScaledForm, interpret: Any = False
) -> Array:
  """Decodes as :func:`reference.decode_rows` does, to the same bits."""
  count, words = rows.shape
  bits, size, planes = form.bits, form.bucket_size, form.planes
  fine = planes * size <= lines.LARGEST_UNROLLED and not size % LANES
  # Pairs of planes XLA joins as well.
  if not (form.inline and fine and count >= ROWS and planes > 2):
    return reference.decode_rows(rows, form)
  columns = words - size - form.shared  # a scale a row, or a bucket
  block = lines.rows_of_block(count, planes * size)

  def kernel(row_ref: Any, *refs: Any) -> None:
    *tables, out_ref = refs
    levels = [jnp.broadcast_to(ref[...], (ROWS, LANES)) for ref in tables]

    def of_rows(row: Any) -> None:
      numbers = lax.bitcast_convert_type(row_ref[row, size:], np.float32)
      number = [numbers[:, i : i + 1] for i in range(columns + form.shared)]
      for start in range(0, size, LANES):
        lanes = slice(start, start + LANES)
        word = lax.bitcast_convert_type(row_ref[row, lanes], np.int32)
        for k in range(planes):
          code = lax.shift_right_logical(word, np.int32(k * bits)) & (2**bits - 1)
          given = [number[k % columns], *number[columns:]]
          for level in levels:
            given.append(jnp.take_along_axis(level, code & (LANES - 1), axis=1))
          out_ref[row, k, lanes] = form.value(code.astype(jnp.uint32), *given)

    lines.by_registers(block, of_rows)

  inputs = [(rows, block)]
  if form.table:
    inputs.append((jnp.array(form.table, jnp.float32)[None], 0))
  out = [((count, planes, size), block, np.float32)]
  (found,) = lines.run(kernel, inputs, out, "decode", interpret)
  return found
