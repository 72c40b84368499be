"""Sums of sparse payloads, and of blocks."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.codecs.sums.sum import LeafRows, RowDecoder, SumFacts
from gradcomp._src.codecs.sums.tiles import OF_TILES, Tiles, sum_in_order
from gradcomp._src.kernels.common import sparse
from gradcomp._src.kernels.common.row_view import COPIED
from gradcomp._src.kernels.materialize import unknown

if TYPE_CHECKING:
  from gradcomp._src.codecs.block_top import BlockTop
  from gradcomp._src.codecs.random_k import RandomK
  from gradcomp._src.codecs.sparse import SparseRows


OF_BLOCKS = dataclasses.replace(OF_TILES, drops=True).refusing(
  {
    "passed": "a sparse codec, which would choose anew among the elements of every "
    'partial sum, got {codec}; use "two_shot", whose owners choose once.'
  }
)
_AGAIN = (
  "a codec that sends the same elements from all workers, got {codec}: their sums need "
  'no second encoding; use "psum".'
)
_OF_CHOSEN = dataclasses.replace(
  OF_BLOCKS,
  same_draws=True,
  refusals={"passed": OF_BLOCKS.refusals["passed"], "owned": _AGAIN, "grouped": _AGAIN},
)


@dataclasses.dataclass(frozen=True)
class Blocks(Tiles):
  """Adds float32 tiles of a codec that sends some of their elements."""

  codec: "BlockTop | SparseRows"
  facts: SumFacts = dataclasses.field(default=OF_BLOCKS, kw_only=True)

  def senders(self, rows: Array) -> RowDecoder:
    def sent(rows: Array) -> Array:
      return jnp.where(self.codec.decode_rows(rows) == 0, 0.0, 1.0)

    return lambda start, stop: sum_in_order(sent, rows[:, start:stop])

  def slots(self, rows: int) -> int:
    return rows * self.codec.slots

  @functools.partial(jax.jit, static_argnums=(0, 2))  # leaves of a shape: traced once
  def sent_at(self, rows: Array, size: int) -> Array:
    positions, values = self.codec.entries(rows)
    tile = self.codec.tile_size
    used = (positions < tile) & (values != 0)
    if size >= sparse.COUNTED:  # positions do not fit in 32 bits
      parts = positions[None], used[None].astype(jnp.float32)
      return sparse.add_entries(tile, *parts).reshape(-1)[:size] > 0
    start = tile * jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(used, start + positions, size).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Entries(Blocks):
  """Adds entries at their positions. Each value is scaled before it is added."""

  codec: "SparseRows"

  @functools.partial(jax.jit, static_argnums=(0, 2))
  def mean(self, rows: Array, scale: float) -> Array:
    positions, values = self.codec.entries(rows)
    return sparse.add_entries(self.codec.tile_size, positions, values * scale)

  def gathered(self, rows: Array, agreed: Array | None, scale: float) -> RowDecoder:
    # The entries of all rows are unpacked at once. There may be many small leaves, so
    # the entries of these are added at once, too. A CPU does not know where the rows of
    # a large leaf begin, so leaves of one shape have equal programs, compiled once.
    positions, values = self.codec.entries(rows)
    values = values * scale
    size = self.codec.tile_size
    together = rows.shape[1] * size < sparse.COUNTED
    every = functools.cache(lambda: sparse.add_entries(size, positions, values))
    zero = functools.cache(lambda: unknown([0], positions)[0])

    def decode(start: int, stop: int) -> Array:
      count = stop - start
      if count == rows.shape[1] or (together and count * size <= COPIED):
        return every()[start:stop]
      return sparse.add_entries(size, positions, values, zero() + start, count)

    return decode

  def senders(self, rows: Array) -> RowDecoder:
    positions, values = self.codec.entries(rows)
    used = jnp.where(values == 0, 0.0, 1.0)
    add = functools.partial(sparse.add_entries, self.codec.tile_size)
    return lambda start, stop: add(positions, used, start, stop - start)


@dataclasses.dataclass(frozen=True)
class Chosen(Entries):
  """Adds the values of elements that all workers choose by one key, as headers show."""

  codec: "RandomK"
  facts: SumFacts = _OF_CHOSEN

  def reduces_shorter(self, rows: int, workers: int) -> bool:
    return True

  def terms(self, rows: Array, workers: int) -> Array:
    values = rows[:, self.codec.header_words :]
    return jax.lax.bitcast_convert_type(values, jnp.float32)

  def reduced(
    self, total: Array, leaves: Sequence[LeafRows], agreed: Array | None, scale: float
  ) -> RowDecoder:
    headers = []
    for leaf in leaves:
      assert leaf.key is not None  # the key chooses the elements
      headers.append(self.codec.header(leaf.key, leaf.rows))
    words = jax.lax.bitcast_convert_type(total, jnp.uint32)
    rows = jnp.concatenate([jnp.concatenate(headers), words], axis=1)
    return self.gathered(rows[None], agreed, scale)
