"""What an exchange asks of a sum of payloads, and what it gets."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import jax

# How the sum of all workers comes about: each adds what it has gathered; owners add;
# it is passed on, and grows; groups add first; the backend adds.
Way = Literal["gathered", "owned", "passed", "grouped", "reduced"]

# From a range of a matrix's rows, [start, stop), to their values, float32 tiles.
RowDecoder = Callable[[int, int], jax.Array]


class LeafRows(NamedTuple):
  """The rows of one leaf."""

  key: jax.Array | None  # uint32[2]
  rows: int


class Partial(NamedTuple):
  """What has been added so far of some rows."""

  total: jax.Array  # float32 tiles, or int32 codes
  compensation: jax.Array | None = None  # of Kahan's algorithm
  lost: jax.Array | None = None  # float32, by the additions; None where nobody asks
  scale: float = 1.0  # what the sum has yet to be multiplied by


class Sent(NamedTuple):
  """How a sum travels.

  Attributes:
    rows: ``uint32[rows, words]``.
    riders: what goes along to the worker that adds next, like ``rows``.
    lost: what this worker has to keep of what encoding and additions lost, ``float32
      [rows, tile_size]`` in the units of the codec's rows; None for nothing.
    residual: what the owner keeps for its next mean, ``float32[rows, tile_size]``.
    scale: what the sum has yet to be multiplied by.
  """

  rows: jax.Array
  riders: tuple[jax.Array, ...] = ()
  lost: jax.Array | None = None
  residual: jax.Array | None = None
  scale: float = 1.0


class SumFacts(Protocol):
  """What is asked of sums before leaves are known."""

  @property
  def refusals(self) -> Mapping[Way, str]:
    """The ways in which it cannot come about, each with the reason and the cure.

    It goes on from ``must not be ... for``.
    """

  @property
  def drops(self) -> bool:
    """True if an owner's encoding of a mean leaves out some of its elements."""

  @property
  def mixes(self) -> bool:
    """True if plain leaves can share a message with it, whatever the exchange."""

  def check(self, workers: int) -> None:
    """Raises ValueError if so many workers cannot be added."""


class Sum(SumFacts, Protocol):
  """The sum of one codec's payloads.

  A schedule of an exchange decides who adds what, and when. A sum decides what is added
  and how it travels. ``agreed`` are the statistics that all workers share, a line a
  row, or None.
  """

  @property
  def plain(self) -> bool:
    """True if leaves can be added as they are."""

  @property
  def exact(self) -> bool:
    """True if the owner's encoding of a mean loses nothing that it would keep."""

  @property
  def even_at_par(self) -> bool:
    """True if leaves are encoded even where that saves no bytes."""

  @property
  def alike(self) -> bool:
    """True if all workers draw the same random numbers."""

  @property
  def of_rows(self) -> bool:
    """True if partial sums are sums of encoded rows, and not of the leaves' tiles."""

  def slots(self, rows: int) -> int | None:
    """Returns the entries that so many rows have room for; None if they send all."""

  def gathered(
    self, rows: jax.Array, agreed: jax.Array | None, scale: float
  ) -> RowDecoder:
    """Returns the decoder of the sum of all payloads, ``uint32[K, rows, words]``."""

  def gathered_loss(
    self, rows: jax.Array, agreed: jax.Array | None, own: jax.Array
  ) -> RowDecoder | None:
    """Returns the decoder of what adding the payload of number ``own`` lost."""

  def fold(self, rows: jax.Array, scale: float, *, keep: bool) -> Partial:
    """Returns the sum of K encoded rows, ``uint32[K, rows, words]``, in their order."""

  def finish(
    self,
    partial: Partial,
    key: jax.Array | None,
    memory: jax.Array | None,
    residual: jax.Array | None,
    workers: int,
    *,
    keep: bool,
  ) -> Sent:
    """Returns how an owner sends a whole sum of N workers to all of them."""

  def value(
    self,
    rows: jax.Array,
    agreed: jax.Array | None,
    scale: float,
    share: int,
    workers: int,
  ) -> RowDecoder:
    """Returns the decoder of what the owners sent, ``uint32[N, ..., words]``.

    Args:
      rows: of each owner.
      agreed: the shared statistics.
      scale: what the sums have yet to be multiplied by.
      share: rows that each owner has.
      workers: N.
    """

  def loss(self, lost: jax.Array, agreed: jax.Array | None) -> RowDecoder:
    """Returns the decoder of what was lost, in the units of the leaves."""

  def sent_at(self, rows: jax.Array, size: int) -> jax.Array | None:
    """Returns where in a flat leaf of this size its rows send something but zeros.

    They are positions, ``int32[entries]``, or the size for none. None stands for all.
    """


class Facts:
  """What most sums say of themselves: a base of those that say little else."""

  plain = False
  exact = True
  drops = False
  even_at_par = False
  mixes = True
  alike = False
  of_rows = True

  def check(self, workers: int) -> None:
    """Any number will do."""

  def slots(self, rows: int) -> int | None:
    return None

  def sent_at(self, rows: jax.Array, size: int) -> jax.Array | None:
    return None


class PartialSum(Sum, Protocol):
  """A sum that travels before it is whole."""

  def start(
    self, own: jax.Array, key: jax.Array | None, memory: jax.Array | None, *, keep: bool
  ) -> Sent:
    """Returns how what one worker adds sets out to the worker that adds next.

    Args:
      own: ``uint32[rows, words]`` if the sum is ``of_rows``, else ``float32[rows,
        tile_size]``.
      key: for rounding, or None.
      memory: what the codec remembers, or None.
      keep: whether to return what is lost.
    """

  def add(self, received: Sent, own: jax.Array, *, keep: bool) -> Partial:
    """Returns the sum that came, and what one worker adds."""

  def add_all(self, own: jax.Array, *, keep: bool) -> Partial:
    """Returns the sum of what K workers add, ``own[K, rows, ...]``, in their order."""

  def send(
    self,
    partial: Partial,
    key: jax.Array | None,
    memory: jax.Array | None,
    *,
    keep: bool,
  ) -> Sent:
    """Returns how a partial sum travels to the worker that adds next."""

  def read(self, own: jax.Array) -> jax.Array:
    """Returns the tiles, ``float32[..., tile_size]``, of what one worker adds."""


class ReducibleSum(Sum, Protocol):
  """A sum of numbers that the backend's all-reduce adds exactly, or as floats."""

  def reduces_shorter(self, rows: int, workers: int) -> bool:
    """Returns whether an all-reduce of so many rows sends no more than owners would."""

  def terms(self, rows: jax.Array, workers: int) -> jax.Array:
    """Returns the numbers that an all-reduce over N workers adds.

    Args:
      rows: this worker's, ``uint32[rows, words]``.
      workers: N.
    """

  def reduced(
    self,
    total: jax.Array,
    leaves: Sequence[LeafRows],
    agreed: jax.Array | None,
    scale: float,
  ) -> RowDecoder:
    """Returns the decoder of what the all-reduce gives.

    Args:
      total: like :meth:`terms`.
      leaves: those that have the rows, in their order.
      agreed: the shared statistics.
      scale: what the sums have yet to be multiplied by.
    """
