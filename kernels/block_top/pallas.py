"""Selects and spreads the largest elements of blocks by Pallas kernels."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.block_top import reference
from gradcomp._src.kernels.common import fixed_point, planes, scales
from gradcomp._src.kernels.gpu import tiles
from gradcomp._src.kernels.gpu.tiles import Block, Encoded
from gradcomp._src.kernels.tpu import lines


@tiles.completed(reference.encode_rows)
def encode_rows(x: Array, *, form: reference.Form, interpret: Any = False) -> Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""

  # A plane of a tile is 32 blocks, each in the registers of four threads. Planes share
  # a scale: all entries are found first, and planes are read again for residuals.
  def body(block: Block) -> None:
    every = range(form.planes)
    found = [_select_in_planes(block, block.plane(k), form) for k in every]
    scale = None
    if form.scaled:
      first = functools.reduce(jnp.maximum, [jnp.abs(e[0][1]) for e in found])
      one = scales.scales_of_bits(tiles.largest_bits(first))
      block.put(planes.float_words(one), form.row_words - 1)
      scale = block.spread(one, block.shape[:-1])
    divide = fixed_point.exact_quotient
    sent = [[reference.coded(x, scale, form, divide) for x in own] for own in found]
    for number in range(form.count):
      at = number * form.entry_words
      block.put(planes.pack_planes([x[number][0] for x in sent], form.code_bits), at)
      for k in every if scale is None else ():
        words = planes.float_words(sent[k][number][1])
        block.put(words, at + (k + 1) * reference.WORDS)
    if form.keep:
      for k in every:
        entries, others = reference.decoded(sent[k], scale, form)
        own = reference.spread(entries, others, form, block.placed)
        block.put_residual(k, block.plane(k) - own)

  view = reference.WORDS, form.block_size
  launch = tiles.Launch(
    "block_top_encode", [form.row_words], interpret, form.keep, [view], planar=False
  )
  return tiles.encode(body, x, (), form, launch)


def _select_in_planes(
  block: Block, x: Array, form: reference.Form
) -> list[reference.Entry]:
  """Selects in blocks, ``float32[..., B]``: places and values, ``[...]`` each."""
  every = reference.keys(x, form, block.iota)
  entries: list[reference.Entry] = []
  rest = every
  for _ in range(form.count):
    key = rest.max(axis=-1)
    here = every == block.spread(key, x.shape)
    rest = jnp.where(here, jnp.uint32(0), rest)
    if form.scaled:
      value = reference.cut_value(key, form)
    else:
      whole = jnp.where(here, planes.float_words(x), jnp.uint32(0))
      value = planes.floats(whole.max(axis=-1))
    entries.append((reference.behind_of(key, form), value))
  return entries


# On TPUs, the elements of a block are a column of a transposed one. Decoded blocks are
# lines of 128 elements or more, since XLA pads a shorter last axis to 128.
@lines.completed(reference.encode_rows)
def encode_on_tpu(x: Array, *, form: reference.Form, interpret: Any = False) -> Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  rows = reference.rows_of_entries(_select(x, form, interpret), form)
  if not form.keep:
    return rows, None
  whole = x.reshape(-1)[: len(rows) * form.tile_size]
  return rows, _spread(rows, form=form, interpret=interpret, x=whole)


def _spread(
  rows: Array, *, form: reference.Form, interpret: Any = False, x: Array | None = None
) -> Array:
  """Decodes rows to flat elements, which are subtracted from ``x`` if it is given."""

  def body(others: Array, *entries: Array) -> list[Array]:
    shape = form.block_size, others.shape[1]
    place = lax.broadcasted_iota(jnp.int32, shape, 0)
    parts = []
    for block in range(form.blocks):
      own = slice(block, block + 1)
      decoded = jnp.broadcast_to(others[own], shape)
      for at in reversed(range(0, len(entries), 2)):
        decoded = jnp.where(place == entries[at][own], entries[at + 1][own], decoded)
      parts.append(decoded)
    return parts

  entries, others = reference.entries_of_rows(rows, form)
  given = [others]
  for behind, value in entries:
    given += [form.block_size - 1 - behind.astype(jnp.int32), value]
  return lines.decode(body, given, "block_top_spread", form.tile_size, interpret, x)


decode_on_tpu = lines.decoder(reference.decode_rows)(_spread)


def _select(x: Array, form: reference.Form, interpret: Any) -> list[reference.Entry]:
  """Selects in whole tiles, as :func:`reference.select` does."""
  size, width = form.block_size, lines.width(form.block_size)
  count = form.tile_size // width  # lines of a tile
  each = 1 if form.scaled else 2  # numbers of an entry

  def body(x: Array) -> tuple[Array, ...]:
    columns = x.T
    blocks = [columns[at : at + size] for at in range(0, width, size)]
    return tuple(
      lines.rows_of_tiles(numbers, count, form.blocks)
      for numbers in zip(*(_largest(block, form) for block in blocks), strict=True)
    )

  words = [form.blocks] * (form.count * each)
  launch = tiles.Launch("block_top_select", words, interpret)
  found = lines.encode(body, x, launch, form.tile_size, width)
  entries = []
  for at in range(0, len(found), each):
    key, *bits = found[at : at + each]
    value = planes.floats(bits[0]) if bits else reference.cut_value(key, form)
    entries.append((reference.behind_of(key, form), value))
  return entries


def _largest(block: Array, form: reference.Form) -> list[Array]:
  """Returns the keys of a column's entries, and the bits that are sent with them."""
  # `int32[1, columns]` each. With the highest bit flipped, signed integers are in the
  # order of unsigned ones, which TPUs do not compare.
  key = lax.bitcast_convert_type(reference.keys(block, form, axis=0), jnp.int32)
  lowest = np.int32(-(2**31))
  every, found = key ^ lowest, []
  bits = lax.bitcast_convert_type(block, jnp.int32)
  for _ in range(form.count):
    largest = every.max(axis=0, keepdims=True)
    found.append(largest ^ lowest)
    if not form.scaled:
      found.append(jnp.where(every == largest, bits, 0).sum(axis=0, keepdims=True))
    every = jnp.where(every == largest, lowest, every)
  return found
