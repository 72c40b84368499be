"""What one worker adds to a message, and what the exchange makes of all."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp import sums
from gradcomp.codecs import Encoded, Memory, recalled, recalled_by_all
from gradcomp.layout import Layout
from gradcomp.sums import LeafRows, RowDecoder, Sum

Leaves = list[jax.Array]


class Keys(NamedTuple):
  """The keys of one worker and step, ``uint32[2]``; None where a codec needs none."""

  leaves: Sequence[jax.Array | None]
  stages: Sequence[jax.Array | None]  # of codecs: for what is encoded after the leaves


class Total(NamedTuple):
  """What an exchange returns.

  Attributes:
    mean: the leaves' mean, or sum, of all workers, equal on all, float32.
    lost: for each codec the decoder of what this worker has to keep of what was lost on
      the way, or None.
    residuals: for each codec what owners keep of their means, or None.
    encoded: whether the leaves were encoded before anything was added.
  """

  mean: Leaves
  lost: Sequence[RowDecoder | None]
  residuals: Sequence[jax.Array | None]
  encoded: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Contribution:
  """The leaves of one worker, as an exchange needs them.

  Attributes:
    layout: the plan.
    leaves: float32 arrays.
    keys: for stochastic rounding.
    stats: what all workers share of each leaf, or None.
    memory: what the codec of each leaf remembers; None where it is not kept.
    step: ``int32[]``.
    residuals: of the owners' last encodings, for each codec; or None.
    keep: whether to return what is lost.
  """

  layout: Layout
  leaves: Leaves
  keys: Keys
  stats: Sequence[jax.Array | None]
  memory: Sequence[Memory | None]
  step: jax.Array
  residuals: Sequence[jax.Array | None]
  keep: bool

  @functools.cached_property
  def sums(self) -> list[Sum]:
    """The sum of each codec."""
    return [sums.of(codec) for codec in self.layout.codecs]

  @functools.cached_property
  def agreed(self) -> list[jax.Array | None]:
    """The shared statistics of each matrix, a line a row."""
    return self.layout.row_stats(self.stats)

  @functools.cached_property
  def _encoded(self) -> tuple[Leaves, list[Encoded]]:
    codecs = [self.layout.codecs[slot.group] for slot in self.layout.slots]
    stats = [
      recalled(codec, memory, self.step) if stat is None else stat
      for codec, stat, memory in zip(codecs, self.stats, self.memory, strict=True)
    ]
    with jax.named_scope("gradcomp_encode"):
      return self.layout.encode(self.leaves, self.keys.leaves, stats, keep=self.keep)

  @property
  def plain(self) -> bool:
    """True if all leaves can be added as they are."""
    return all(total.plain for total in self.sums)

  @property
  def rows(self) -> Leaves:
    """The matrices of encoded rows, ``uint32[rows, words]`` for each codec."""
    return self._encoded[0]

  @functools.cached_property
  def tiles(self) -> Leaves:
    """The leaves as ``float32[rows, tile_size]`` for each codec."""
    return self.layout.tiles(self.leaves)

  @property
  def addends(self) -> Leaves:
    """What this worker adds to sums of each codec, be it rows or tiles."""
    return [
      self.rows[i] if total.of_rows else self.tiles[i]
      for i, total in enumerate(self.sums)
    ]

  @property
  def remembered(self) -> list[Any]:
    """What this worker remembers of each leaf for itself, after it has encoded it."""
    return [leaf.own for leaf in self._encoded[1]]

  def chosen(self, number: int) -> jax.Array | None:
    """Where in a leaf this worker sends something, flat; None for everywhere."""
    group, start, stop = self.layout.slots[number]
    size = self.layout.like[number].size
    return self.sums[group].sent_at(self.rows[group][start:stop], size)

  def stage_stats(self, group: int) -> jax.Array | None:
    """What sums of a codec are encoded with that all workers remember; or None."""
    first = next(i for i, x in enumerate(self.layout.slots) if x.group == group)
    return recalled_by_all(self.layout.codecs[group], self.memory[first], self.step)

  def leaf_rows(self, group: int) -> list[LeafRows]:
    """The leaves of a codec."""
    return [
      LeafRows(self.keys.leaves[i], slot.stop - slot.start)
      for i, slot in enumerate(self.layout.slots)
      if slot.group == group
    ]

  @functools.cached_property
  def decoders(self) -> list[RowDecoder]:
    """Of this worker's own rows."""
    return [
      total.gathered(rows[None], agreed, 1.0)
      for total, rows, agreed in zip(self.sums, self.rows, self.agreed, strict=True)
    ]

  @functools.cached_property
  def decoded(self) -> Callable[[int], jax.Array]:
    """What this worker's own rows of a leaf decode to, by its number."""
    return functools.cache(lambda i: self.layout.decode_leaf(i, self.decoders))

  @property
  def nothing(self) -> list[None]:
    """For each codec nothing that was lost on the way."""
    return [None] * len(self.sums)

  def unsent(self, total: Total) -> Leaves:
    """What this worker did not send of each leaf, in the units of the leaves."""

    def not_encoded(i: int) -> jax.Array:
      known = self._encoded[1][i].unsent
      return self.leaves[i] - self.decoded(i) if known is None else known

    def lost(i: int) -> jax.Array:
      group = self.layout.slots[i].group
      on_the_way = total.lost[group]
      encoded = total.encoded or self.sums[group].of_rows
      if on_the_way is None:
        return not_encoded(i) if encoded else jnp.zeros_like(self.leaves[i])
      decoded = self.layout.decode_leaf(i, {group: on_the_way})
      return not_encoded(i) + decoded if encoded else decoded

    return [lost(i) for i in range(len(self.leaves))]
