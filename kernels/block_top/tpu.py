"""Selects and spreads the largest elements of blocks by Pallas kernels for TPUs."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.block_top import reference
from gradcomp._src.kernels.common import planes
from gradcomp._src.kernels.gpu.tiles import Encoded
from gradcomp._src.kernels.tpu import lines


# In a transposed block the elements of a block are a column. Decoded blocks are lines
# of 128 elements or more, since XLA pads a shorter last axis to 128.
@lines.completed(reference.encode_rows)
def encode_rows(x: Array, *, form: reference.Form, interpret: Any = False) -> Encoded:
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


decode_rows = lines.decoder(reference.decode_rows)(_spread)


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

  words = (form.blocks,) * (form.count * each)
  launch = lines.Launch("block_top_select", form.tile_size, width, words, interpret)
  found = lines.encode(body, x, launch)
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
