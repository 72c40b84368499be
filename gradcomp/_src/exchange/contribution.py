"""One worker's contribution to an exchange, and the result of the exchange."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.sums.records import Context, Encoded, Memory
from gradcomp._src.codecs.sums.sum import LeafRows, RowDecoder, Sum
from gradcomp._src.exchange.keys import Keys, StepKey
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.kernels.materialize import LARGE, materialized, packed

Leaves = list[jax.Array]


class Total(NamedTuple):
  """The result of an exchange.

  Attributes:
    mean: the mean, or the sum, of each leaf over all workers, float32, with the same
      bits on every worker.
    lost: for each codec, the decoder of the rounding errors of sums that this worker
      keeps in its residual; None if there are none.
    residuals: the owner residual of each codec; None where none is kept.
    encoded: whether the leaves were encoded before anything was added.
  """

  mean: Leaves
  lost: Sequence[RowDecoder | None]
  residuals: Sequence[jax.Array | None]
  encoded: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Contribution:
  """The leaves of one worker, in the forms in which exchanges add them.

  A form is computed when an exchange first asks for it.

  Attributes:
    layout: the place of each leaf in the message.
    leaves: float32 arrays.
    keys: the keys of this worker and step.
    agreed: the agreed statistics of each leaf, or None.
    memory: the memory of each leaf.
    step: the number of the step, ``int32[]``.
    residuals: the owner residual of each codec from the last step, or None.
    keep: whether to return rounding errors.
    sends: whether the rows are sent.
  """

  layout: Layout
  leaves: Leaves
  keys: Keys
  agreed: Sequence[jax.Array | None]
  memory: Sequence[Memory]
  step: jax.Array
  residuals: Sequence[jax.Array | None]
  keep: bool
  sends: bool

  @functools.cached_property
  def sums(self) -> list[Sum]:
    """The sum of each codec."""
    return [codec.sums for codec in self.layout.codecs]

  @functools.cached_property
  def agreed_rows(self) -> list[jax.Array | None]:
    """The agreed statistics of each matrix, one line for each row."""
    return self.layout.agreed_rows(self.agreed)

  @functools.cached_property
  def _encoded(self) -> tuple[Leaves, list[Encoded]]:
    contexts = [
      Context(_own(key), _shared(key), agreed, memory, self.step)
      for agreed, memory, key in zip(
        self.agreed, self.memory, self.keys.leaves, strict=True
      )
    ]
    with jax.named_scope("gradcomp_encode"):
      return self.layout.encode(self.leaves, contexts, keep=self.keep)

  @property
  def plain(self) -> bool:
    """True if all leaves can be added as they are."""
    return all(total.facts.plain for total in self.sums)

  @functools.cached_property
  def rows(self) -> Leaves:
    """The matrices of encoded rows, ``uint32[rows, words]`` for each codec."""
    # A matrix of several leaves is concatenated before it is sent, and so materialized.
    # A matrix of one large leaf is materialized here, but not with a residual, because
    # both would be held.
    leaves = collections.Counter(slot.group for slot in self.layout.slots)
    return [
      rows if self.sends and (self.keep or leaves[i] > 1) else packed(rows)
      for i, rows in enumerate(self._encoded[0])
    ]

  @functools.cached_property
  def tiles(self) -> Leaves:
    """The leaves as ``float32[rows, *tile_shape]`` for each codec."""
    return self.layout.tiles(self.leaves)

  @property
  def addends(self) -> Leaves:
    """The rows or the tiles that this worker adds to the partial sums of each codec."""
    return [
      self.rows[i] if total.facts.of_rows else self.tiles[i]
      for i, total in enumerate(self.sums)
    ]

  @property
  def remembered(self) -> list[Any]:
    """Each leaf's memory of this worker, after encoding it."""
    return [leaf.own for leaf in self._encoded[1]]

  def chosen(self, number: int) -> jax.Array | None:
    """Returns the flat positions of a leaf's sent elements; None for all elements."""
    group, start, stop = self.layout.slots[number]
    size = self.layout.like[number].size
    return self.sums[group].sent_at(self.rows[group][start:stop], size)

  def of_whole(self, group: int) -> Context:
    """Returns the context for encoding the whole sums of a codec."""
    # Only one worker encodes the sum of a share, so that it draws its own bits.
    return self._sum_context(group, _own(self.keys.stages[group]))

  def of_partial(self, group: int, part: jax.Array, number: jax.Array | int) -> Context:
    """Returns the context for encoding a partial sum in flight."""
    stage = self.keys.stages[group]
    key = None if stage is None else stage.at(part, number)
    return self._sum_context(group, _own(key))._replace(dither=_shared(key))

  def _sum_context(self, group: int, key: jax.Array | None) -> Context:
    first = next(i for i, x in enumerate(self.layout.slots) if x.group == group)
    shared = self.memory[first]._replace(own=None)
    return Context(key, memory=shared, step=self.step)

  def leaf_rows(self, group: int) -> list[LeafRows]:
    """Returns the key and the number of rows of each leaf of a codec."""
    return [
      LeafRows(_own(self.keys.leaves[i]), slot.stop - slot.start)
      for i, slot in enumerate(self.layout.slots)
      if slot.group == group
    ]

  @functools.cached_property
  def decoders(self) -> list[RowDecoder]:
    """The decoder of this worker's own rows, one for each codec."""
    return [
      total.gathered(rows[None], agreed, 1.0)
      for total, rows, agreed in zip(
        self.sums, self.rows, self.agreed_rows, strict=True
      )
    ]

  @functools.cached_property
  def _views(self) -> Leaves:
    return self.layout.viewed(self.decoders)

  def means(
    self, decoders: Callable[[], Sequence[RowDecoder]], received: jax.Array
  ) -> Leaves:
    """Decodes the leaves from all workers' ``received`` words or numbers."""
    layout = self.layout
    tiled = any(layout.view(i) != x.shape for i, x in enumerate(layout.like))
    if not tiled or layout.elements < LARGE:
      return layout.decode(decoders())
    # A residual and every state of an optimizer read them, so a CPU materializes them.
    return layout.shaped(materialized(lambda _: layout.viewed(decoders()), received))

  @property
  def nothing(self) -> list[None]:
    """None for each codec, for exchanges without rounding errors of sums."""
    return [None] * len(self.sums)

  def sent(self, total: Total) -> Leaves:
    """Decodes this worker's own rows of each leaf.

    A leaf that it did not encode, but added to others first, was sent as it is.
    """
    return [
      self._views[i].reshape(leaf.shape) if self._encodes(i, total) else leaf
      for i, leaf in enumerate(self.leaves)
    ]

  def _encodes(self, number: int, total: Total) -> bool:
    """Returns True if this worker encoded the leaf by itself."""
    return total.encoded or self.sums[self.layout.slots[number].group].facts.of_rows

  def unsent(self, total: Total) -> Leaves:
    """Returns the unsent part of each leaf, in its units.

    It is the rounding error of the leaf, plus errors of sums that this worker keeps.
    """

    def not_encoded(i: int) -> jax.Array:
      shape = self.layout.view(i)
      known = self._encoded[1][i].unsent
      if known is None:
        return self.leaves[i].reshape(shape) - self._views[i]
      return known.reshape(shape)

    def lost(i: int) -> jax.Array:
      group = self.layout.slots[i].group
      on_the_way = total.lost[group]
      encoded = self._encodes(i, total)
      if on_the_way is None:
        return not_encoded(i) if encoded else jnp.zeros_like(self.leaves[i])
      decoded = self.layout.decode_leaf(i, {group: on_the_way})
      if not encoded:
        return decoded
      unsent = not_encoded(i)
      return unsent + decoded.reshape(unsent.shape)

    return [lost(i) for i in range(len(self.leaves))]


def _own(key: StepKey | None) -> jax.Array | None:
  return None if key is None else key.own


def _shared(key: StepKey | None) -> jax.Array | None:
  return None if key is None else key.dither
