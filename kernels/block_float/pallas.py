"""Encodes and decodes BlockFloat by Pallas kernels for GPUs and TPUs."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.block_float import reference
from gradcomp._src.kernels.common import dithers, fixed_point, planes
from gradcomp._src.kernels.gpu import tiles
from gradcomp._src.kernels.gpu.tiles import Encoded, Operand, largest_bits
from gradcomp._src.kernels.tpu import lines
from gradcomp._src.kernels.tpu.lines import LANES


def refusal(size: int, form: reference.Form) -> str:
  """Returns the reason why no kernel can encode ``size`` elements; "" if one can."""
  if form.planes % 4:
    return f"a kernel's words hold 4 or 8 codes, and these hold {form.planes}"
  return tiles.refusal(size, form)


@tiles.completed(reference.encode_rows)
def encode_rows(
  x: Array, *operands: Operand, form: reference.Form, interpret: Any = False
) -> Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  each = form.bucket_size // form.block_size  # blocks of a plane

  def body(block: tiles.Block, shared_ref: Any, dither_ref: Any) -> None:
    lanes = block.lanes(dithers.read(dither_ref))
    own = None if shared_ref is None else block.read(shared_ref, 0)
    spread = None if own is None else block.spread(own, block.shape[:-1])
    codes, scales = [], []
    for k in range(form.planes):
      plane = block.plane(k)
      largest = planes.floats(largest_bits(plane).astype(jnp.uint32))
      scale = form.scale_codes(largest, spread, fixed_point.exact_quotient)
      factor = form.factors(scale, spread, fixed_point.exact_quotient)
      codes.append(form.code(plane, next(lanes), block.spread(factor, plane.shape)))
      scales.append(scale)
    block.put(planes.pack_planes(codes, form.fmt.bits))
    # The blocks of a word's bytes lie a quarter of a row apart.
    step = form.planes // 4
    for first in range(step):
      words = planes.pack_planes(scales[first::step], 8)
      block.put(words, form.bucket_size + first * each)
    if own is not None:
      block.put(planes.float_words(own), form.row_words - 1)

  # Read as blocks, a plane has a maximum over a block within two threads.
  launch = tiles.Launch(
    "block_float_encode", [form.row_words], interpret, views=[(each, form.block_size)]
  )
  return tiles.encode(body, x, operands, form, launch)


# A kernel for TPUs transposes its rows, so that a block lies in the rows of registers,
# and its scale in one. XLA would pad blocks, and the few scales of a plane, to 128
# lanes.
@lines.completed(reference.encode_rows)
def encode_on_tpu(
  x: Array, *operands: Operand, form: reference.Form, interpret: Any = False
) -> Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  from jax.experimental import pallas as pl

  shared, dither = operands
  tile = form.planes * form.bucket_size
  count = x.size // tile
  block = min(count, LANES)

  def kernel(x_ref: Any, *refs: Any) -> None:
    *given, out = refs
    lanes: Any = [None] * form.planes
    if dither is not None:
      words = given.pop()
      drawn = words[0:1, :1], words[1:2, :1], words[2:3, :1]
      first = pl.program_id(0) * block
      lanes = dithers.random_lanes(drawn, (block, LANES), form.planes, first_row=first)
    tensor = None if shared is None else given.pop()[...].T
    plane = lambda k: x_ref[pl.ds(k, block, stride=form.planes), :].T
    out[...] = _columns(map(plane, range(form.planes)), lanes, tensor, form).T

  given = [(x.reshape(-1)[: count * tile].reshape(-1, LANES), block * form.planes)]
  if shared is not None:
    given.append((shared[:count], block))
  if dither is not None:
    given.append((jnp.broadcast_to(jnp.asarray(dither)[:, None], (3, LANES)), 0))
  out = [((count, form.row_words), block, jnp.uint32)]
  (rows,) = lines.run(kernel, given, out, "block_float_encode", interpret)
  return rows, None


def _columns(inputs: Any, lanes: Any, shared: Operand, form: reference.Form) -> Array:
  """Returns rows as columns, of planes as columns: ``uint32[words, tiles]``."""
  size, scale_words = form.block_size, form.blocks // 4
  words: Any = 0
  scales: list[Any] = [0] * scale_words
  for k, (x, lane) in enumerate(zip(inputs, lanes, strict=True)):
    drawn = None if lane is None else lane.T
    codes = []
    for at in range(0, LANES, size):
      part = x[at : at + size]
      largest = planes.floats(largest_bits(part, axis=0, keepdims=True))
      scale = form.scale_codes(largest, shared, fixed_point.exact_divide)
      factor = form.factors(scale, shared, fixed_point.exact_divide)
      own = None if drawn is None else drawn[at : at + size]
      codes.append(form.code(part, own, jnp.broadcast_to(factor, part.shape)))
      quarter, word = divmod((k * LANES + at) // size, scale_words)
      scales[word] |= scale << np.uint32(8 * quarter)
    words |= jnp.concatenate(codes) << np.uint32(k * form.fmt.bits)
  parts = [words, *scales]
  if shared is not None:
    parts.append(lax.bitcast_convert_type(shared, jnp.uint32))
  return jnp.concatenate(parts)


@lines.decoder(reference.decode_rows)
def decode_on_tpu(
  rows: Array, *, form: reference.Form, interpret: Any = False
) -> Array:
  """Decodes as :func:`reference.decode_rows` does, to the same bits."""
  words, size, bits = form.bucket_size, form.block_size, form.fmt.bits
  scale_words, each = form.blocks // 4, words // size  # blocks of a plane

  def body(columns: Array) -> list[Array]:
    numbers = lax.bitcast_convert_type(columns[words:], jnp.uint32)
    shared = None
    if form.scale == "e4m3":
      shared = lax.bitcast_convert_type(columns[words + scale_words :], jnp.float32)
    parts = []
    for block in range(form.blocks):
      plane, at = divmod(block, each)
      word = columns[at * size : (at + 1) * size]
      code = lax.shift_right_logical(word, np.int32(plane * bits)) & (2**bits - 1)
      quarter, own = divmod(block, scale_words)
      byte = (numbers[own : own + 1] >> np.uint32(8 * quarter)) & np.uint32(255)
      parts.append(form.value(code.astype(jnp.uint32), byte, shared))
    return parts

  given = lax.bitcast_convert_type(rows, jnp.int32)
  tile = form.planes * words
  return lines.decode(body, [given], "block_float_decode", tile, interpret)
