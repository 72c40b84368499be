"""The protocols of sums: the facts and the functions that exchanges rely on."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax

from gradcomp._src.codecs.sums.records import Context

# The way in which the sum of all workers comes about. "gathered": every worker adds all
# payloads. "owned": owners add. "passed": a partial sum goes from worker to worker.
# "grouped": groups add first. "reduced": the backend adds.
Way = Literal["gathered", "owned", "passed", "grouped", "reduced"]

# Decodes the rows [start, stop) of a matrix to float32 tiles.
RowDecoder = Callable[[int, int], jax.Array]


class LeafRows(NamedTuple):
  """The key of one leaf, and the number of its rows."""

  key: jax.Array | None  # uint32[2]
  rows: int


class Partial(NamedTuple):
  """The sum of some rows over the workers that were added so far."""

  total: jax.Array  # float32 tiles, or int32 codes
  compensation: jax.Array | None = None  # of Kahan's algorithm
  lost: jax.Array | None = None  # float32, the loss of additions; None without keep
  scale: float = 1.0  # the factor of the sum that is still to be applied


class Sent(NamedTuple):
  """An encoded sum, and the losses that its sender keeps.

  Attributes:
    rows: the encoded sum, ``uint32[rows, words]``.
    riders: arrays like ``rows`` that travel with it to the worker that adds next.
    lost: the loss of encoding and additions that this worker keeps in its residual,
      ``float32[rows, *tile_shape]``, in the units of the codec's rows; None for none.
    residual: the new owner residual, ``float32[rows, *tile_shape]``, or None.
    scale: the factor of the sum that is still to be applied.
  """

  rows: jax.Array
  riders: tuple[jax.Array, ...] = ()
  lost: jax.Array | None = None
  residual: jax.Array | None = None
  scale: float = 1.0


class SumFacts(Protocol):
  """Facts about a codec's sums that are known before the leaves are."""

  @property
  def refusals(self) -> Mapping[Way, str]:
    """The ways to add that the sum refuses, each with the reason and the cure.

    The texts continue an error message that begins with ``must not be ... for``.
    """

  @property
  def drops(self) -> bool:
    """True if an owner's encoding of a mean leaves out some of its elements."""

  @property
  def mixes(self) -> bool:
    """True if plain leaves can share a message with the codec in every exchange."""

  @property
  def parts(self) -> "tuple[Sum, ...]":
    """The sums of all codecs of a policy; of others their only one."""

  def check(self, workers: int) -> None:
    """Raises ValueError if the sum cannot hold the numbers of ``workers`` workers."""


class Sum(SumFacts, Protocol):
  """Adds the payloads of one codec.

  An exchange decides who adds which rows, and when. A sum decides which numbers are
  added, and how they travel. Its methods share these arguments:

  - ``agreed`` holds the statistics that all workers share, one line for each row, or
    None;
  - ``scale`` is the factor of the sum, 1/N for a mean;
  - ``keep`` says whether to return the losses.
  """

  @property
  def plain(self) -> bool:
    """True if leaves can be added as they are."""

  @property
  def exact(self) -> bool:
    """True if the owner's encoding loses nothing that an owner residual would keep."""

  @property
  def in_format(self) -> bool:
    """True if a sum is a number of the codec's own format."""

  @property
  def rounds(self) -> bool:
    """True if each addition rounds the sum, without compensation."""

  @property
  def draws(self) -> bool:
    """True if an owner draws random bits even with an owner residual."""

  @property
  def even_at_par(self) -> bool:
    """True if leaves are encoded even if their payload is as large as the leaf."""

  @property
  def alike(self) -> bool:
    """True if all workers draw the same random numbers."""

  @property
  def of_rows(self) -> bool:
    """True if partial sums add encoded rows, and not the tiles of the leaves."""

  def unpacked(self, rows: jax.Array) -> jax.Array:
    """Returns what is added, in the shape of tiles, of ``uint32[rows, words]``."""

  def slots(self, rows: int) -> int | None:
    """Returns the number of slots in ``rows`` rows; None if they send all elements."""

  def gathered(
    self, rows: jax.Array, agreed: jax.Array | None, scale: float
  ) -> RowDecoder:
    """Returns the decoder of the sum of all payloads, ``uint32[K, rows, words]``."""

  def senders(self, rows: jax.Array) -> RowDecoder | None:
    """Returns the decoder of the number of workers that send an element.

    An element that is sent as zero does not count. None means that all send all.
    """

  def gathered_loss(
    self, rows: jax.Array, agreed: jax.Array | None, own: jax.Array
  ) -> RowDecoder | None:
    """Returns the decoder of the loss in adding worker ``own``'s payload, or None.

    None means that additions lose nothing.
    """

  def fold(self, rows: jax.Array, scale: float, *, keep: bool) -> Partial:
    """Returns the sum of K workers' ``uint32[K, rows, words]``, in their order."""

  def finish(
    self,
    partial: Partial,
    context: Context,
    residual: jax.Array | None,
    workers: int,
    *,
    keep: bool,
  ) -> Sent:
    """Encodes the whole sum of an owner's share, which is sent to all workers.

    ``residual`` is the owner residual of the last step, or None.
    """

  def value(
    self,
    rows: jax.Array,
    agreed: jax.Array | None,
    scale: float,
    share: int,
    workers: int,
  ) -> RowDecoder:
    """Returns the decoder of the sums from all owners, ``uint32[N, ..., words]``.

    Args:
      rows: the rows of the owners.
      agreed: the shared statistics.
      scale: the factor of the sums that is still to be applied.
      share: the number of rows that each owner owns.
      workers: the number of workers N.
    """

  def loss(self, lost: jax.Array, agreed: jax.Array | None) -> RowDecoder:
    """Returns the decoder of losses, in the units of the leaves."""

  def sent_at(self, rows: jax.Array, size: int) -> jax.Array | None:
    """Returns the positions in a flat leaf of the nonzero elements that rows send.

    They are ``int32[entries]``, and ``size`` for unused entries. None means that the
    rows send all elements.
    """


class Facts:
  """A base of sums with the facts that most of them share."""

  plain = False
  exact = True
  in_format = False
  drops = False
  even_at_par = False
  mixes = True
  alike = False
  of_rows = True

  @property
  def rounds(self) -> bool:
    return False

  @property
  def draws(self) -> bool:
    return False

  @property
  def parts(self) -> tuple[Any, ...]:
    return (self,)

  def check(self, workers: int) -> None:
    """Accepts any number of workers."""

  def slots(self, rows: int) -> int | None:
    return None

  def senders(self, rows: jax.Array) -> RowDecoder | None:
    return None

  def sent_at(self, rows: jax.Array, size: int) -> jax.Array | None:
    return None


class PartialSum(Sum, Protocol):
  """A sum that can travel before it is whole, from worker to worker, as in ``ring``."""

  def start(self, own: jax.Array, context: Context, *, keep: bool) -> Sent:
    """Encodes the first worker's part, to be sent to the worker that adds next.

    ``own`` is ``uint32[rows, words]`` if the sum is ``of_rows``, and otherwise
    ``float32[rows, *tile_shape]``.
    """

  def add(self, received: Sent, own: jax.Array, *, keep: bool) -> Partial:
    """Adds this worker's part to the sum that it received."""

  def add_all(self, own: jax.Array, *, keep: bool) -> Partial:
    """Returns the sum of K workers' parts, ``own[K, rows, ...]``, in their order."""

  def like_one(self, partial: Partial, count: int) -> Partial:
    """Scales a sum of ``count`` parts so that rows hold it if they hold one part.

    The divisor goes into its ``scale``.
    """

  def hop(
    self,
    partial: Partial,
    context: Context,
    *,
    keep: bool,
  ) -> Sent:
    """Encodes a partial sum, with the riders that the next worker needs to add."""

  def send(
    self,
    partial: Partial,
    context: Context,
    *,
    keep: bool,
  ) -> Sent:
    """Encodes a sum into rows, without riders."""

  def read(self, own: jax.Array) -> jax.Array:
    """Returns the part of a worker as tiles, ``float32[..., *tile_shape]``."""


class ReducibleSum(Sum, Protocol):
  """Adds integers or plain floats, which the backend's all-reduce can add, too."""

  def reduces_shorter(self, rows: int, workers: int) -> bool:
    """Returns True if an all-reduce of ``rows`` rows sends no more than owners do."""

  def terms(self, rows: jax.Array, workers: int) -> jax.Array:
    """Returns the numbers that an all-reduce over N workers adds."""

  def reduced(
    self,
    total: jax.Array,
    leaves: Sequence[LeafRows],
    agreed: jax.Array | None,
    scale: float,
  ) -> RowDecoder:
    """Returns the decoder of an all-reduced ``total``, which is like :meth:`terms`.

    ``leaves`` are the leaves that have the rows, in the order of the rows.
    """


@dataclasses.dataclass(frozen=True)
class Several:
  """Joins the facts about the sums of several codecs, without adding."""

  facts: tuple[SumFacts, ...]

  @property
  def parts(self) -> tuple[Sum, ...]:
    return tuple(part for facts in self.facts for part in facts.parts)

  @property
  def refusals(self) -> dict[Way, str]:
    found: dict[Way, str] = {}
    for part in reversed(self.facts):
      found |= part.refusals
    return found

  @property
  def drops(self) -> bool:
    return any(part.drops for part in self.facts)

  @property
  def mixes(self) -> bool:
    return all(part.mixes for part in self.facts)

  def check(self, workers: int) -> None:
    for part in self.facts:
      part.check(workers)
