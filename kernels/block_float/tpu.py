"""Encodes and decodes BlockFloat by Pallas kernels for TPUs."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.block_float import reference
from gradcomp._src.kernels.common.fixed_point import exact_divide, rounding_lanes
from gradcomp._src.kernels.gpu.tiles import Encoded, completed, refusal_of_tiles
from gradcomp._src.kernels.tpu import lines
from gradcomp._src.kernels.tpu.lines import LANES

# A kernel transposes its rows, so that a block lies in the rows of registers, and its
# scale in one. XLA would pad blocks, and the few scales of a plane, to 128 lanes.
_INFINITY = np.int32(0x7F800000)


def refusal(size: int, form: reference.Form) -> str:
  """Returns the reason why no kernel can encode ``size`` elements; "" if one can."""
  return refusal_of_tiles(size, form.planes * form.bucket_size)


@completed(reference.encode_rows, lambda tiles, form: tiles)
def encode_rows(
  x: Array,
  shared: Array | None,
  dither: Array | None,
  *,
  form: reference.Form,
  interpret: Any = False,
) -> Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  from jax.experimental import pallas as pl

  tile = form.planes * form.bucket_size
  tiles = x.size // tile
  block = LANES if tiles >= LANES else tiles

  def kernel(x_ref: Any, *refs: Any) -> None:
    *given, out = refs
    words = None if dither is None else given.pop()
    tensor = None if shared is None else given.pop()[...].T
    drawn = None if words is None else tuple(words[i : i + 1, :1] for i in range(3))
    start = pl.program_id(0) * block
    lanes = rounding_lanes(drawn, (block, LANES), form.planes, first_row=start)
    plane = lambda k: x_ref[pl.ds(k, block, stride=form.planes), :].T
    columns = _columns(map(plane, range(form.planes)), lanes, tensor, form)
    out[...] = columns.T

  given = [(x.reshape(-1)[: tiles * tile].reshape(-1, LANES), block * form.planes)]
  if shared is not None:
    given.append((shared, block))
  if dither is not None:
    given.append((jnp.broadcast_to(jnp.asarray(dither)[:, None], (3, LANES)), 0))
  out = [((tiles, form.row_words), block, jnp.uint32)]
  grid = -(-tiles // block)
  (rows,) = lines.run(kernel, grid, given, out, "block_float_encode", interpret)
  missing = x.size > tiles * tile  # a row
  return jnp.pad(rows, ((0, missing), (0, 0))) if missing else rows, None


def _columns(
  planes: Any, lanes: Any, shared: Array | None, form: reference.Form
) -> Array:
  """Returns rows as columns, of planes as columns: ``uint32[words, tiles]``."""
  size, scale_words = form.block_size, form.blocks // 4
  words: Any = 0
  scales: list[Any] = [0] * scale_words
  for k, (x, lane) in enumerate(zip(planes, lanes, strict=True)):
    drawn = None if lane is None else lane.T
    codes = []
    for at in range(0, LANES, size):
      part = x[at : at + size]
      bits = lax.bitcast_convert_type(jnp.abs(part), jnp.int32)
      largest = bits.max(axis=0, keepdims=True)
      largest = jnp.where(largest < _INFINITY, largest, np.int32(0x7FC00000))
      largest = lax.bitcast_convert_type(largest, jnp.float32)
      scale = form.scale_codes(largest, shared, exact_divide)
      factor = form.factors(scale, shared, exact_divide)
      own = None if drawn is None else drawn[at : at + size]
      codes.append(form.cast(part, own, jnp.broadcast_to(factor, part.shape)))
      quarter, word = divmod((k * LANES + at) // size, scale_words)
      scales[word] |= scale << np.uint32(8 * quarter)
    words |= jnp.concatenate(codes) << np.uint32(k * form.fmt.bits)
  parts = [words, *scales]
  if shared is not None:
    parts.append(lax.bitcast_convert_type(shared, jnp.uint32))
  return jnp.concatenate(parts)


def decode_rows(rows: Array, *, form: reference.Form, interpret: Any = False) -> Array:
  """Decodes as :func:`reference.decode_rows` does, to the same bits."""
  if not rows.size:
    return reference.decode_rows(rows, form=form)
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

  given = lax.bitcast_convert_type(rows, jnp.int32).reshape(-1, rows.shape[-1])
  tile = form.planes * words
  launch = lines.Launch("block_float_decode", tile, LANES, interpret=interpret)
  found = lines.decode(body, [given], launch)
  return found.reshape(*rows.shape[:-1], form.planes, words)
