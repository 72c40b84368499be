"""Sums of sparse payloads, entry by entry: elements that are not sent cost nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.sparse import SelectingCodec, SparseCodec, sum_entries
from gradcomp._src.codecs.sums.blocks import Blocks
from gradcomp._src.codecs.sums.sum import RowDecoder, Way
from gradcomp._src.kernels.common import sparse
from gradcomp._src.kernels.common.row_view import COPIED


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
      return sum_entries(codec, positions[:, start:stop], values[:, start:stop], scale)

    return decode

  def senders(self, rows: jax.Array) -> RowDecoder:
    positions, values = self.codec.entries(rows)
    used = jnp.where(values == 0, 0.0, 1.0)

    def decode(start: int, stop: int) -> jax.Array:
      parts = positions[:, start:stop], used[:, start:stop]
      return sum_entries(self.codec, *parts, 1.0)

    return decode
