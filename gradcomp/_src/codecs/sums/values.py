"""Sums of plain values, which an all-reduce can add, too."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.sparse import LinearCodec
from gradcomp._src.codecs.sums.entries import Entries
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
