"""``Sum``, the base of all sums, and the facts about sums that exchanges rely on."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from jax import Array

from gradcomp._src.codecs.sums.records import Context

# The way in which the sum of all workers comes about. "gathered": every worker adds all
# payloads. "owned": owners add. "passed": a partial sum goes from worker to worker.
# "grouped": groups add first. "reduced": the backend adds.
Way = Literal["gathered", "owned", "passed", "grouped", "reduced"]

# Decodes the rows [start, stop) of a matrix to float32 tiles.
RowDecoder = Callable[[int, int], Array]


LeafRows = tuple[Array | None, int]  # the key of one leaf, and the number of its rows


class Partial(NamedTuple):
  """The sum of some rows over the workers that were added so far."""

  total: Array  # float32 tiles, or int32 codes
  compensation: Array | None = None  # of Kahan's algorithm
  lost: Array | None = None  # float32, the loss of additions; None without keep
  scale: float = 1.0  # the factor of the sum that is still to be applied
  residual: Array | None = None  # the owner residual of the last step


class Sent(NamedTuple):
  """An encoded sum, and the losses that its sender keeps."""

  rows: Array  # uint32[rows, words]
  riders: tuple[Array, ...] = ()  # like rows, for the worker that adds next
  # float32[rows, *tile_shape], of encoding and additions, in the units of the codec's
  # rows, which this worker keeps in its residual
  lost: Array | None = None
  residual: Array | None = None  # float32[rows, *tile_shape], the new owner residual
  scale: float = 1.0  # the factor of the sum that is still to be applied


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumFacts:
  """Facts about the sums of a codec that are known before the leaves are.

  Attributes:
    refusals: the ways to add that the sum refuses, each with the reason and the cure:
      an error text after ``must not be ... for``, with ``{codec}`` for the codec.
    plain: whether leaves can be added as they are.
    keeps_float64: whether gradients of float64 are added as such.
    exact: whether an owner's encoding loses nothing that an owner residual would keep.
    drops: whether an owner's encoding of a mean leaves out some of its elements.
    in_format: whether sums are numbers of the codec's own format. Leaves are then
      encoded even if their payload is as large as the leaf.
    own_units: whether sums are in units of their own, like signs. Small leaves are then
      encoded, too, for their plain mean would be in other units.
    rounds: whether each addition rounds the sum, without compensation.
    same_draws: whether all workers draw the same random numbers.
    of_rows: whether partial sums add encoded rows, and not the tiles of the leaves.
    max_code: the largest magnitude of a code that is added as an integer; 0 for none.
      Not every exchange lets plain leaves share a message with integers.
    needs_feedback: whether a payload is of no use without a residual.
    parts: the facts of all codecs of a policy; of others none.
  """

  refusals: dict[Way, str] = dataclasses.field(default_factory=dict, hash=False)
  plain: bool = False
  keeps_float64: bool = False
  exact: bool = True
  drops: bool = False
  in_format: bool = False
  own_units: bool = False
  rounds: bool = False
  same_draws: bool = False
  of_rows: bool = True
  max_code: int = 0
  needs_feedback: bool = False
  parts: "tuple[SumFacts, ...]" = ()

  @property
  def each(self) -> "tuple[SumFacts, ...]":
    """The facts of all codecs of a policy; of others their only ones."""
    return self.parts or (self,)

  def refusing(self, refusals: dict[Way, str]) -> "SumFacts":
    """Returns the facts with more refusals, or with other reasons for the same."""
    return dataclasses.replace(self, refusals=self.refusals | refusals)

  def naming(self, codec: object) -> "SumFacts":
    """Returns the facts with refusals that name a codec."""
    name = lambda text: text.replace("{codec}", str(codec))
    return self.refusing({way: name(text) for way, text in self.refusals.items()})


class Sum(abc.ABC):
  """A base of sums; each adds the payloads of one codec.

  An exchange decides who adds which rows, and when. A sum decides which numbers are
  added, and how they travel. Its methods share these arguments:

  - ``agreed``: the statistics that all workers share, one line for each row, or None;
  - ``scale``: the factor of the sum, 1/N for a mean;
  - ``keep``: whether to return the losses.

  "ring" and "hierarchical" also call ``start``, ``add``, ``add_all`` and ``send``, and
  "psum" calls ``terms`` and ``reduced``. A sum with facts that refuse these ways lacks
  the methods.
  """

  @property
  @abc.abstractmethod
  def facts(self) -> SumFacts:
    """The facts about the sum that are known before the leaves are."""

  @abc.abstractmethod
  def unpacked(self, rows: Array) -> Array:
    """Returns the addends in ``uint32[rows, words]``, in the shape of tiles."""

  @abc.abstractmethod
  def gathered(self, rows: Array, agreed: Array | None, scale: float) -> RowDecoder:
    """Returns the decoder of the sum of all payloads, ``uint32[K, rows, words]``."""

  @abc.abstractmethod
  def fold(self, rows: Array, scale: float, *, keep: bool) -> Partial:
    """Returns the sum of K workers' ``uint32[K, rows, words]``, in their order."""

  def finish(
    self, partial: Partial, context: Context, workers: int, *, keep: bool
  ) -> Sent:
    """Encodes the whole sum of an owner's share, by default as :meth:`send` does."""
    return self.send(partial, context, keep=keep)

  def value(
    self, rows: Array, agreed: Array | None, scale: float, share: int, workers: int
  ) -> RowDecoder:
    """Returns the decoder of the sums from all owners, ``uint32[N, ..., words]``.

    By default they are rows of payloads. An owner owns ``share`` rows.
    """
    return self.gathered(rows.reshape(1, -1, rows.shape[-1]), agreed, scale)

  @property
  def rider_words(self) -> int:
    """The words that go with each row of a partial sum to the worker that adds next."""
    return 0

  def slots(self, rows: int) -> int | None:
    """Returns the number of slots in ``rows`` rows; None if they send all elements."""
    return None

  def senders(self, rows: Array) -> RowDecoder | None:
    """Returns the decoder of how many workers send a nonzero element; None for all."""
    return None

  def sent_at(self, rows: Array, size: int) -> Array | None:
    """Returns places of nonzero elements in a flat leaf, else ``size``; or None."""
    return None

  def gathered_loss(
    self, rows: Array, agreed: Array | None, own: Array
  ) -> RowDecoder | None:
    """Returns the decoder of the loss in adding ``own``'s payload; None if exact."""
    return None

  def loss(self, lost: Array, agreed: Array | None) -> RowDecoder:
    """Returns the decoder of losses, in the units of the leaves."""
    return lambda start, stop: lost[start:stop]

  def start(self, own: Array, context: Context, *, keep: bool) -> Sent:
    """Encodes the first worker's part, ``uint32`` rows if ``of_rows``, else tiles."""
    raise self._refusal

  def add(self, received: Sent, own: Array, *, keep: bool) -> Partial:
    """Adds this worker's part to the sum that it received."""
    raise self._refusal

  def add_all(self, own: Array, *, keep: bool) -> Partial:
    """Returns the sum of K workers' parts, ``own[K, rows, ...]``, in their order."""
    raise self._refusal

  def send(self, partial: Partial, context: Context, *, keep: bool) -> Sent:
    """Encodes a sum into rows, without riders."""
    raise self._refusal

  def like_one(self, partial: Partial, count: int) -> Partial:
    """Divides a sum of ``count`` parts to the size of one; its ``scale`` grows so."""
    return partial

  def hop(self, partial: Partial, context: Context, *, keep: bool) -> Sent:
    """Encodes a partial sum, with the riders that the next worker needs to add."""
    return self.send(partial, context, keep=keep)

  def read(self, own: Array) -> Array:
    """Returns the part of a worker as tiles, ``float32[..., *tile_shape]``."""
    return own

  def reduces_shorter(self, rows: int, workers: int) -> bool:
    """Returns True if an all-reduce of ``rows`` rows sends no more than owners do."""
    return True

  def terms(self, rows: Array, workers: int) -> Array:
    """Returns the numbers that an all-reduce over N workers adds."""
    raise self._refusal

  def reduced(
    self, total: Array, leaves: Sequence[LeafRows], agreed: Array | None, scale: float
  ) -> RowDecoder:
    """Returns the decoder of an all-reduced ``total`` with the rows of ``leaves``."""
    raise self._refusal

  @property
  def _refusal(self) -> NotImplementedError:
    return NotImplementedError(f"Sums of {type(self).__name__} do not travel this way.")


def joined(facts: Sequence[SumFacts]) -> SumFacts:
  """Returns the facts about a policy; of several refusals of a way the first counts."""
  refusals: dict[Way, str] = {}
  for part in reversed(facts):
    refusals |= part.refusals
  return SumFacts(
    refusals=refusals,
    drops=any(part.drops for part in facts),
    max_code=max(part.max_code for part in facts),
    parts=tuple(facts),
  )


def sum_limit(max_code: int, workers: int, codec: Any) -> int:
  """Returns the largest magnitude of a sum of codes; ValueError from 2**31 on."""
  limit = workers * max_code
  if limit >= 2**31:
    raise ValueError(
      f"`codec` must have sums of {workers} workers below 2**31, got sums up to "
      f"{limit} with {codec}; use fewer bits."
    )
  return limit
