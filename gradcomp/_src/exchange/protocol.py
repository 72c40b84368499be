"""The protocol of exchanges, and the records that they take and return."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.sums.records import Context, Encoded
from gradcomp._src.codecs.sums.sum import LeafRows, RowDecoder, Way
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.kernels.common import dithers
from gradcomp._src.kernels.common.threefry import fold_key
from gradcomp._src.mesh.axes import AxisName


class Stage(NamedTuple):
  """The later encodings of one codec, which encode sums."""

  context: Context  # the context of this worker and codec
  residual: jax.Array | None  # the owner residual from the last step, or None

  @property
  def whole(self) -> Context:
    """The context for encoding whole sums."""
    # Only one worker encodes the sum of a share, so that it draws its own bits.
    return self.context._replace(dither=None)

  def partial(self, part: jax.Array, number: jax.Array | int) -> Context:
    """Returns the context for partial sum ``number`` of the rows ``part``."""
    key, shared = self.context.key, self.context.dither
    if key is None:
      return self.context
    if shared is not None:
      shared = dithers.dither(fold_key(shared[:2], part), number)
    return self.context._replace(key=fold_key(key, number), dither=shared)


class Outgoing(NamedTuple):
  """One worker's part of a message, in the form in which an exchange adds it."""

  layout: Layout  # the place of each leaf in the message
  # For each codec, arrays of rows that follow one another. The encoded rows are one
  # array, uint32[rows, words]. Where the exchange adds before it encodes, each leaf has
  # its tiles, float32[rows, *tile_shape]. The leaves themselves, one after the other,
  # if they are plain and an exchange adds them as they are.
  adjacent: Sequence[Sequence[jax.Array]]
  encoded: Mapping[int, Encoded]  # the leaves that are encoded, by their numbers
  agreed: list[jax.Array | None]  # statistics of each codec, a line a row
  contexts: Sequence[Context]  # the contexts of the leaves
  stages: Sequence[Stage]  # the later encodings of each codec
  keep: bool  # whether to return rounding errors
  before: Sequence[jax.Array] = ()  # words that the message before this one brought

  @property
  def parts(self) -> list[jax.Array]:
    """The adjacent arrays, joined to one for each codec."""
    return [x[0] if len(x) == 1 else jnp.concatenate(x) for x in self.adjacent]

  def leaf_rows(self, group: int) -> list[LeafRows]:
    """Returns the key and the number of rows of each leaf of a codec."""
    return [
      LeafRows(context.key, slot.stop - slot.start)
      for context, slot in zip(self.contexts, self.layout.slots, strict=True)
      if slot.group == group
    ]

  def decoders(self) -> dict[int, RowDecoder]:
    """Returns the decoder of this worker's own rows, for each codec with any."""
    sums, agreed = self.layout.sums, self.agreed
    coded = sorted({self.layout.slots[i].group for i in self.encoded})
    rows = {i: self.adjacent[i][0][None] for i in coded}
    return {i: sums[i].gathered(rows[i], agreed[i], 1.0) for i in coded}


class Received(NamedTuple):
  """The sums that an exchange has brought to a worker, still to be decoded."""

  # The words, or numbers, for each codec. The means of the leaves, if these were added
  # as they are.
  words: Sequence[jax.Array]
  # Returns the decoders of the means, or the sums, of each codec, with the same bits on
  # every worker; None if leaves were added as they are.
  decoders: Callable[[], Mapping[int, RowDecoder]] | None = None
  to_all: bool = True  # whether every worker has received all rows
  # The decoders of the rounding errors of sums that this worker keeps in its residual,
  # by the numbers of codecs, where there are any.
  lost: Mapping[int, RowDecoder] = MappingProxyType({})
  residuals: Sequence[jax.Array | None] = ()  # the new owner residuals, by codec
  line: jax.Array | None = None  # of which all workers' rows are cut; None if unknown

  @property
  def came(self) -> Sequence[jax.Array]:
    """The arrays that a later message can wait for."""
    # XLA:TPU keeps no order behind the reshape that cuts rows from their line.
    return self.words if self.line is None else [self.line]


class Work(NamedTuple):
  """The computation of one worker, as parts of the elements of a message."""

  encoded: Fraction = Fraction(0)  # the elements that it encodes
  decoded: Fraction = Fraction(0)  # the elements that it decodes, and writes
  added: Fraction = Fraction(0)  # decoded from one worker's rows and added to a sum
  summed: Fraction = Fraction(0)  # added without decoding


CODED_ONCE = Work(encoded=Fraction(1), decoded=Fraction(1))


@runtime_checkable
class Exchange(Protocol):
  """A schedule of sends and additions of rows, a frozen dataclass with its options.

  It does not know the numbers that are added: the sum of the codec does.

  Attributes:
    name: the short form, which users may give instead of the exchange.
    way: the way in which sums come about. The sums of a codec may refuse it.
    owners: whether each worker owns a share of the rows, and sends their sums to all.
    of_leaves: whether each worker encodes its leaves before anything is added.
    sends: whether workers exchange anything.
  """

  name: ClassVar[str]
  way: ClassVar[Way]
  owners: ClassVar[bool]
  of_leaves: ClassVar[bool]
  sends: ClassVar[bool]

  @property
  def keeps(self) -> bool:
    """True if owners keep owner residuals."""

  def check_axes(self, axis_name: AxisName | None) -> None:
    """Raises ValueError if the exchange cannot run over the axes."""

  def run(self, own: Outgoing, workers: Workers) -> Received:
    """Sends this worker's part, and returns the sum over all workers."""

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    """Returns a worker's computation, for :mod:`gradcomp.cost`.

    Args:
      sizes: the sizes of the axes.
      plain: whether all leaves are added as they are.
    """


# ``(own, workers, found)``, where ``found`` is what the stage before it returned.
StageRun = Callable[[Outgoing, Workers, Any], Any]


def stages_of(exchange: Exchange) -> tuple[StageRun, ...]:
  """Returns the parts of ``run``, one after the other; the last returns its result.

  An exchange may have them as ``stages``, so that computations lie between them. Else
  its only stage is ``run``.
  """
  whole = (lambda own, workers, _: exchange.run(own, workers),)
  return getattr(exchange, "stages", whole)


def returns_means(exchange: Any) -> bool:
  """Returns True if all workers get sums over their number, also of an ``Auto``."""
  # Only an exchange that gathers payloads knows who sent an element.
  return exchange.sends and getattr(exchange, "merge", "mean") == "mean"


def waits(exchange: Exchange) -> bool:
  """Returns True if a message is encoded when the one before it has come.

  An exchange may say so by ``in_turn``.
  """
  return getattr(exchange, "in_turn", False)


class WithoutOwners:
  """Base class of exchanges that have no owners and run over any axes."""

  owners: ClassVar[bool] = False
  of_leaves: ClassVar[bool] = True
  sends: ClassVar[bool] = True
  keeps: ClassVar[bool] = False

  def check_axes(self, axis_name: AxisName | None) -> None:
    """Accepts any axes."""
