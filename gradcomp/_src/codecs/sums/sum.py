"""Defines the protocols of sums: the facts and the functions that exchanges rely on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import jax

from gradcomp._src.codecs.leaf import Context

# The way in which the sum of all workers comes about. "gathered": every worker adds all
# payloads. "owned": owners add. "passed": a partial sum goes from worker to worker.
# "grouped": groups add first. "reduced": the backend adds.
Way = Literal["gathered", "owned", "passed", "grouped", "reduced"]

# Decodes the rows [start, stop) of a matrix to float32 tiles.
RowDecoder = Callable[[int, int], jax.Array]


class LeafRows(NamedTuple):
  """Holds the key of one leaf, and the number of its rows."""

  key: jax.Array | None  # uint32[2]
  rows: int


class Partial(NamedTuple):
  """Holds the sum so far of some rows."""

  total: jax.Array  # float32 tiles, or int32 codes
  compensation: jax.Array | None = None  # of Kahan's algorithm
  lost: jax.Array | None = None  # float32, what additions lost; None without keep
  scale: float = 1.0  # the factor of the sum that is still to be applied


class Sent(NamedTuple):
  """Holds an encoded sum, and what the worker that sends it keeps.

  Attributes:
    rows: the encoded sum, ``uint32[rows, words]``.
    riders: arrays like ``rows`` that travel with it to the worker that adds next.
    lost: the losses of encoding and additions that this worker keeps in its residual,
      ``float32[rows, *tile_shape]``, in the units of the codec's rows; None if nothing
      is lost.
    residual: the new owner residual, ``float32[rows, *tile_shape]``, or None.
    scale: the factor of the sum that is still to be applied.
  """

  rows: jax.Array
  riders: tuple[jax.Array, ...] = ()
  lost: jax.Array | None = None
  residual: jax.Array | None = None
  scale: float = 1.0


class SumFacts(Protocol):
  """Says what is known of sums before the leaves are known."""

  @property
  def refusals(self) -> Mapping[Way, str]:
    """The ways in which the sum cannot come about, each with the reason and the cure.

    The texts continue an error message that begins with ``must not be ... for``.
    """

  @property
  def drops(self) -> bool:
    """True if an owner's encoding of a mean leaves out some of its elements."""

  @property
  def mixes(self) -> bool:
    """True if plain leaves can share a message with the codec in every exchange."""

  def check(self, workers: int) -> None:
    """Raises ValueError if the sum cannot hold the numbers of so many workers."""


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
    """True if each addition rounds the sum so far, and nothing makes up for it."""

  @property
  def draws(self) -> bool:
    """True if an owner draws random bits even where it keeps what it loses."""

  @property
  def even_at_par(self) -> bool:
    """True if leaves are encoded even if their payload is as large as the leaf."""

  @property
  def alike(self) -> bool:
    """True if all workers draw the same random numbers."""

  @property
  def of_rows(self) -> bool:
    """True if partial sums add encoded rows, and not the tiles of the leaves."""

  def slots(self, rows: int) -> int | None:
    """Returns the number of slots in so many rows.

    None means that rows send all elements.
    """

  def gathered(
    self, rows: jax.Array, agreed: jax.Array | None, scale: float
  ) -> RowDecoder:
    """Returns the decoder of the sum of all payloads, ``uint32[K, rows, words]``."""

  def senders(self, rows: jax.Array) -> RowDecoder | None:
    """Returns the decoder of how many of ``uint32[K, rows, words]`` send an element.

    An element that is sent as zero does not count. None means that all send all.
    """

  def gathered_loss(
    self, rows: jax.Array, agreed: jax.Array | None, own: jax.Array
  ) -> RowDecoder | None:
    """Returns the decoder of what adding the payload of worker ``own`` lost.

    None means that additions lose nothing.
    """

  def fold(self, rows: jax.Array, scale: float, *, keep: bool) -> Partial:
    """Returns the sum of K workers' ``uint32[K, rows, words]``, in their order."""

  def finish(
    self,
    partial: Partial,
    key: jax.Array | None,
    context: Context,
    residual: jax.Array | None,
    workers: int,
    *,
    keep: bool,
  ) -> Sent:
    """Encodes the whole sum of an owner's share, which is sent to all workers.

    Args:
      partial: the sum.
      key: the key that rounds, or None.
      context: what the codec encodes sums with besides.
      residual: the owner residual of the last step, or None.
      workers: the number of workers N.
      keep: whether to return the losses.
    """

  def value(
    self,
    rows: jax.Array,
    agreed: jax.Array | None,
    scale: float,
    share: int,
    workers: int,
  ) -> RowDecoder:
    """Returns the decoder of what all owners have sent.

    Args:
      rows: the rows of the owners, ``uint32[N, ..., words]``.
      agreed: the shared statistics.
      scale: the factor of the sums that is still to be applied.
      share: the number of rows that each owner owns.
      workers: the number of workers N.
    """

  def loss(self, lost: jax.Array, agreed: jax.Array | None) -> RowDecoder:
    """Returns the decoder of losses. It gives them in the units of the leaves."""

  def sent_at(self, rows: jax.Array, size: int) -> jax.Array | None:
    """Returns the positions in a flat leaf of the elements that its rows send.

    They are ``int32[entries]``. An entry that is zero or unused has the position
    ``size``. None means that the rows send all elements.
    """


class Facts:
  """A base of sums, which has the facts that most of them share."""

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

  def check(self, workers: int) -> None:
    """Accepts any number of workers."""

  def slots(self, rows: int) -> int | None:
    return None

  def senders(self, rows: jax.Array) -> RowDecoder | None:
    return None

  def sent_at(self, rows: jax.Array, size: int) -> jax.Array | None:
    return None


class PartialSum(Sum, Protocol):
  """Adds numbers whose sum travels before it is whole, as ``ring`` needs it."""

  def start(
    self, own: jax.Array, key: jax.Array | None, context: Context, *, keep: bool
  ) -> Sent:
    """Encodes the part of the first worker, which is sent to the worker that adds next.

    Args:
      own: the part, ``uint32[rows, words]`` if the sum is ``of_rows``, and else
        ``float32[rows, *tile_shape]``.
      key: the key that rounds, or None.
      context: what the codec encodes sums with besides.
      keep: whether to return the losses.
    """

  def add(self, received: Sent, own: jax.Array, *, keep: bool) -> Partial:
    """Adds the part of this worker to the sum that it received."""

  def add_all(self, own: jax.Array, *, keep: bool) -> Partial:
    """Returns the sum of K workers' parts, ``own[K, rows, ...]``, in their order."""

  def like_one(self, partial: Partial, count: int) -> Partial:
    """Returns a sum of ``count`` parts that rows of the codec hold if they hold a part.

    What it was divided by is in its ``scale``.
    """

  def hop(
    self,
    partial: Partial,
    key: jax.Array | None,
    context: Context,
    *,
    keep: bool,
  ) -> Sent:
    """Encodes a partial sum, and what else the worker needs that adds next."""

  def send(
    self,
    partial: Partial,
    key: jax.Array | None,
    context: Context,
    *,
    keep: bool,
  ) -> Sent:
    """Encodes a sum in rows alone."""

  def read(self, own: jax.Array) -> jax.Array:
    """Returns the part of a worker as tiles, ``float32[..., *tile_shape]``."""


class ReducibleSum(Sum, Protocol):
  """Adds integers or plain floats, which the backend's all-reduce can add, too."""

  def reduces_shorter(self, rows: int, workers: int) -> bool:
    """Returns True if an all-reduce of so many rows sends no more than owners would."""

  def terms(self, rows: jax.Array, workers: int) -> jax.Array:
    """Returns the numbers that an all-reduce over N workers adds.

    Args:
      rows: the rows of this worker, ``uint32[rows, words]``.
      workers: the number of workers N.
    """

  def reduced(
    self,
    total: jax.Array,
    leaves: Sequence[LeafRows],
    agreed: jax.Array | None,
    scale: float,
  ) -> RowDecoder:
    """Returns the decoder of the sums that the all-reduce returns.

    Args:
      total: the sums, in the shape and dtype of :meth:`terms`.
      leaves: the leaves that have the rows, in the order of the rows.
      agreed: the shared statistics.
      scale: the factor of the sums that is still to be applied.
    """
