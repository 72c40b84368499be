"""Adds the tiles of codecs that drop elements, and says which elements they send."""

import dataclasses

import jax

from gradcomp.codecs import DroppingCodec, sent_positions
from gradcomp.sums._tiles import Tiles


@dataclasses.dataclass(frozen=True)
class Blocks(Tiles):
  """Adds float32 tiles of a codec that sends some of their elements."""

  codec: DroppingCodec

  drops = True

  def slots(self, rows: int) -> int:
    return rows * self.codec.slots

  def sent_at(self, rows: jax.Array, size: int) -> jax.Array:
    return sent_positions(self.codec, rows, size)
