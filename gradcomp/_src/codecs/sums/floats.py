"""Sums of plain values."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.sums.sum import LeafRows, RowDecoder, Way
from gradcomp._src.codecs.sums.tiles import Tiles


@dataclasses.dataclass(frozen=True)
class Floats(Tiles):
  """Adds dense leaves; their elements travel as they are."""

  plain = True
  exact = True

  @property
  def refusals(self) -> dict[Way, str]:
    return {}

  def reduces_shorter(self, rows: int, workers: int) -> bool:
    return True

  def terms(self, rows: jax.Array, workers: int) -> jax.Array:
    return jax.lax.bitcast_convert_type(rows, jnp.float32)

  def reduced(
    self,
    total: jax.Array,
    leaves: Sequence[LeafRows],
    agreed: jax.Array | None,
    scale: float,
  ) -> RowDecoder:
    words = jax.lax.bitcast_convert_type(total, jnp.uint32)
    return self.gathered(words[None], agreed, scale)
