"""Sums of sparse payloads, and of blocks."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.sparse import (
  DroppingCodec,
  LinearCodec,
  SelectingCodec,
  SparseCodec,
  sent_positions,
  sum_entries,
)
from gradcomp._src.codecs.sums.sum import LeafRows, RowDecoder, Way
from gradcomp._src.codecs.sums.tiles import Tiles, sum_in_order
from gradcomp._src.kernels.common import sparse
from gradcomp._src.kernels.common.row_view import COPIED


@dataclasses.dataclass(frozen=True)
class Blocks(Tiles):
  """Adds float32 tiles of a codec that sends some of their elements."""

  codec: DroppingCodec

  drops = True

  @property
  def refusals(self) -> dict[Way, str]:
    return {
      **super().refusals,
      "passed": "a sparse codec, which would choose anew among the elements of every "
      f'partial sum, got {self.codec}; use "two_shot", whose owners choose once.',
    }

  def senders(self, rows: jax.Array) -> RowDecoder:
    def sent(rows: jax.Array) -> jax.Array:
      return jnp.where(self.codec.decode_rows(rows) == 0, 0.0, 1.0)

    return lambda start, stop: sum_in_order(sent, rows[:, start:stop])

  def slots(self, rows: int) -> int:
    return rows * self.codec.slots

  def sent_at(self, rows: jax.Array, size: int) -> jax.Array:
    return sent_positions(self.codec, rows, size)


@dataclasses.dataclass(frozen=True)
class Entries(Blocks):
  """Adds entries at their positions. Each value is scaled before it is added."""

  codec: SparseCodec

  @property
  def refusals(self) -> dict[Way, str]:
    found = super().refusals
    if isinstance(self.codec, SelectingCodec) and self.codec.reuses:
      found["grouped"] = (
        f"a codec that uses thresholds again, got {self.codec}: what is encoded there "
        'are sums of groups; use selection="auto".'
      )
    return found

  @functools.partial(jax.jit, static_argnums=(0, 2))
  def mean(self, rows: jax.Array, scale: float) -> jax.Array:
    return sum_entries(self.codec, *self.codec.entries(rows), scale)

  def gathered(
    self, rows: jax.Array, agreed: jax.Array | None, scale: float
  ) -> RowDecoder:
    """Returns the decoder of the sum of all payloads, ``uint32[K, rows, words]``."""
    # The entries of all rows are unpacked at once. There may be many small leaves, so
    # the entries of these are added at once, too.
    codec = self.codec
    positions, values = codec.entries(rows)
    together = rows.shape[1] * codec.tile_size < sparse.COUNTED
    every = functools.cache(lambda: sum_entries(codec, positions, values, scale))

    def decode(start: int, stop: int) -> jax.Array:
      few = (stop - start) * codec.tile_size <= COPIED
      if few and together and stop - start < rows.shape[1]:
        return every()[start:stop]
      parts = (
        jax.lax.slice_in_dim(x, start, stop, axis=1) for x in (positions, values)
      )
      return sum_entries(codec, *parts, scale)

    return decode

  def senders(self, rows: jax.Array) -> RowDecoder:
    positions, values = self.codec.entries(rows)
    used = jnp.where(values == 0, 0.0, 1.0)

    def decode(start: int, stop: int) -> jax.Array:
      parts = positions[:, start:stop], used[:, start:stop]
      return sum_entries(self.codec, *parts, 1.0)

    return decode


@dataclasses.dataclass(frozen=True)
class Chosen(Entries):
  """Adds the values of elements that all workers choose by one key, as headers show."""

  codec: LinearCodec

  alike = True

  @property
  def refusals(self) -> dict[Way, str]:
    again = (
      f"a codec that sends the same elements from all workers, got {self.codec}: their "
      'sums need no second encoding; use "psum".'
    )
    return {
      "passed": super().refusals["passed"],
      "owned": again,
      "grouped": again,
    }

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
