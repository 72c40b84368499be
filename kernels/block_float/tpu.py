"""Encodes and decodes BlockFloat by Pallas kernels for TPUs."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.block_float import reference
from gradcomp._src.kernels.common import dithers, fixed_point, planes
from gradcomp._src.kernels.gpu.tiles import Encoded, Operand, largest_bits
from gradcomp._src.kernels.tpu import lines
from gradcomp._src.kernels.tpu.lines import LANES


# A kernel transposes its rows, so that a block lies in the rows of registers, and its
# scale in one. XLA would pad blocks, and the few scales of a plane, to 128 lanes.
@lines.completed(reference.encode_rows)
def encode_rows(
  x: Array,
  shared: Operand,
  dither: Operand,
  *,
  form: reference.Form,
  interpret: Any = False,
) -> Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  from jax.experimental import pallas as pl

  tile = form.planes * form.bucket_size
  tiles = x.size // tile
  block = min(tiles, LANES)

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

  given = [(x.reshape(-1)[: tiles * tile].reshape(-1, LANES), block * form.planes)]
  if shared is not None:
    given.append((shared, block))
  if dither is not None:
    given.append((jnp.broadcast_to(jnp.asarray(dither)[:, None], (3, LANES)), 0))
  out = [((tiles, form.row_words), block, jnp.uint32)]
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
      codes.append(form.cast(part, own, jnp.broadcast_to(factor, part.shape)))
      quarter, word = divmod((k * LANES + at) // size, scale_words)
      scales[word] |= scale << np.uint32(8 * quarter)
    words |= jnp.concatenate(codes) << np.uint32(k * form.fmt.bits)
  parts = [words, *scales]
  if shared is not None:
    parts.append(lax.bitcast_convert_type(shared, jnp.uint32))
  return jnp.concatenate(parts)


@lines.decoder(reference.decode_rows)
def decode_rows(rows: Array, *, form: reference.Form, interpret: Any = False) -> Array:
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
      parts.append(form.number(code.astype(jnp.uint32), byte, shared))
    return parts

  given = lax.bitcast_convert_type(rows, jnp.int32)
  tile = form.planes * words
  return lines.decode(body, [given], "block_float_decode", tile, interpret)
