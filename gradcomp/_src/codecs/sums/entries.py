"""Sums of sparse payloads, and of blocks."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.sums.sum import LeafRows, RowDecoder, SumFacts
from gradcomp._src.codecs.sums.tiles import OF_TILES, Tiles, cutter, sum_in_order
from gradcomp._src.kernels.common import sparse
from gradcomp._src.kernels.common.row_view import COPIED

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

  def senders(self, rows: jax.Array) -> RowDecoder:
    def sent(rows: jax.Array) -> jax.Array:
      return jnp.where(self.codec.decode_rows(rows) == 0, 0.0, 1.0)

    return lambda start, stop: sum_in_order(sent, rows[:, start:stop])

  def slots(self, rows: int) -> int:
    return rows * self.codec.slots

  @functools.partial(jax.jit, static_argnums=(0, 2))  # leaves of a shape: traced once
  def sent_at(self, rows: jax.Array, size: int) -> jax.Array:
    positions, values = self.codec.entries(rows)
    tile = self.codec.tile_size
    used = (positions < tile) & (values != 0)
    if size >= sparse.COUNTED:  # positions do not fit in 32 bits
      parts = positions[None], used[None].astype(jnp.float32)
      return sum_entries(tile, *parts, 1.0).reshape(-1)[:size] > 0
    start = tile * jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(used, start + positions, size).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Entries(Blocks):
  """Adds entries at their positions. Each value is scaled before it is added."""

  codec: "SparseRows"

  @functools.partial(jax.jit, static_argnums=(0, 2))
  def mean(self, rows: jax.Array, scale: float) -> jax.Array:
    return sum_entries(self.codec.tile_size, *self.codec.entries(rows), scale)

  def gathered(
    self, rows: jax.Array, agreed: jax.Array | None, scale: float
  ) -> RowDecoder:
    """Returns the decoder of the sum of all payloads, ``uint32[K, rows, words]``."""
    # The entries of all rows are unpacked at once. There may be many small leaves, so
    # the entries of these are added at once, too.
    positions, values = self.codec.entries(rows)
    size = self.codec.tile_size
    together = rows.shape[1] * size < sparse.COUNTED
    every = functools.cache(lambda: sum_entries(size, positions, values, scale))

    def decode(start: int, stop: int) -> jax.Array:
      few = (stop - start) * size <= COPIED
      if few and together and stop - start < rows.shape[1]:
        return every()[start:stop]
      parts = (cutter(x, 1)(start, stop) for x in (positions, values))
      return sum_entries(size, *parts, scale)

    return decode

  def senders(self, rows: jax.Array) -> RowDecoder:
    positions, values = self.codec.entries(rows)
    used = jnp.where(values == 0, 0.0, 1.0)

    def decode(start: int, stop: int) -> jax.Array:
      parts = positions[:, start:stop], used[:, start:stop]
      return sum_entries(self.codec.tile_size, *parts, 1.0)

    return decode


@dataclasses.dataclass(frozen=True)
class Chosen(Entries):
  """Adds the values of elements that all workers choose by one key, as headers show."""

  codec: "RandomK"
  facts: SumFacts = _OF_CHOSEN

  def reduces_shorter(self, rows: int, workers: int) -> bool:
    return True

  def terms(self, rows: jax.Array, workers: int) -> jax.Array:
    values = rows[:, self.codec.header_words :]
    return jax.lax.bitcast_convert_type(values, jnp.float32)

  def reduced(
    self,
    total: jax.Array,
    leaves: Sequence[LeafRows],
    agreed: jax.Array | None,
    scale: float,
  ) -> RowDecoder:
    headers = []
    for leaf in leaves:
      assert leaf.key is not None  # the key chooses the elements
      headers.append(self.codec.header(leaf.key, leaf.rows))
    words = jax.lax.bitcast_convert_type(total, jnp.uint32)
    rows = jnp.concatenate([jnp.concatenate(headers), words], axis=1)
    return self.gathered(rows[None], agreed, scale)


@functools.partial(jax.jit, static_argnums=(0, 3))  # leaves of a shape: traced once
def sum_entries(
  size: int, positions: jax.Array, values: jax.Array, scale: float
) -> jax.Array:
  """Adds the entries of K payloads, ``[K, rows, slots]``: ``float32[rows, 1, size]``.

  Example:
    >>> positions = jnp.array([[[1, 2]], [[1, 3]]])
    >>> sum_entries(4, positions, jnp.ones((2, 1, 2)), 0.5)
    Array([[[0. , 1. , 0.5, 0.5]]], dtype=float32)
  """
  shape = (positions.shape[1], size)
  return sparse.add_entries(shape, positions, values, scale)[:, None]
