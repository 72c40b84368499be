"""Sums of tiles of codecs that drop elements, and counts of the workers that send."""

import dataclasses

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.sparse import DroppingCodec, sent_positions
from gradcomp._src.codecs.sums.order import sum_in_order
from gradcomp._src.codecs.sums.sum import RowDecoder, Way
from gradcomp._src.codecs.sums.tiles import Tiles


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
