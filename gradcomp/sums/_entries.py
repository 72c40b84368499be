"""Sums of sparse payloads: each entry is added at its position, and zeros are not."""

import dataclasses
import functools

import jax

from gradcomp.codecs import SelectingCodec, SparseCodec, sent_positions, sum_entries
from gradcomp.kernels.rows import COPIED
from gradcomp.sums._sum import RowDecoder, Way
from gradcomp.sums._tiles import Tiles


@dataclasses.dataclass(frozen=True)
class Entries(Tiles):
  """Sums of entries, which are scaled before they are added."""

  codec: SparseCodec

  drops = True

  @property
  def refusals(self) -> dict[Way, str]:
    found: dict[Way, str] = {
      **super().refusals,
      "passed": "a sparse codec, which would choose anew among the elements of every "
      f'partial sum, got {self.codec}; use "two_shot", whose owners choose once.',
    }
    if isinstance(self.codec, SelectingCodec) and self.codec.reuses:
      found["grouped"] = (
        f"a codec that uses thresholds again, got {self.codec}: what is encoded there "
        'are sums of groups; use selection="auto".'
      )
    return found

  def slots(self, rows: int) -> int:
    return rows * self.codec.slots

  def mean(self, rows: jax.Array, scale: float) -> jax.Array:
    return sum_entries(self.codec, *self.codec.entries(rows), scale)

  def gathered(
    self, rows: jax.Array, agreed: jax.Array | None, scale: float
  ) -> RowDecoder:
    """Reads all rows at once.

    Those of small leaves, of which there may be many, are added at once, too.
    """
    codec = self.codec
    positions, values = codec.entries(rows)
    together = rows.shape[1] * codec.tile_size < 2**31  # as int32 says where they lie
    every = functools.cache(lambda: sum_entries(codec, positions, values, scale))

    def decode(start: int, stop: int) -> jax.Array:
      few = (stop - start) * codec.tile_size <= COPIED
      if few and together and stop - start < rows.shape[1]:
        return every()[start:stop]
      return sum_entries(codec, positions[:, start:stop], values[:, start:stop], scale)

    return decode

  def sent_at(self, rows: jax.Array, size: int) -> jax.Array:
    return sent_positions(self.codec, rows, size)
