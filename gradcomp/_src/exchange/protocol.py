"""The messages of a step on one worker, and ``Exchange``, the base of schedules."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.encoding import Group
from gradcomp._src.codecs.sums.records import Context, Encoded
from gradcomp._src.codecs.sums.sum import RowDecoder, Sent, Way
from gradcomp._src.exchange import collectives
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.kernels.common import dithers, fixed_point
from gradcomp._src.mesh import axes, study


class Message(NamedTuple):
  """The leaves that share the collectives of one exchange."""

  leaves: tuple[int, ...]  # the numbers of the leaves in the flattened tree
  layout: Layout  # the place of each leaf in the rows
  exchange: "Exchange"
  others: tuple[str, ...]  # the other axes, over which the leaves vary
  reason: str  # the reason for the exchange
  turn: int  # the number of its average in the step


class Sending(NamedTuple):
  """A message on one worker: its leaves, and from ``before`` on their encoding."""

  message: Message
  layout: Layout  # of the message
  exchange: "Exchange"  # Local() where there is nothing to send
  workers: collectives.Workers  # that exchange the message
  leaves: Sequence[jax.Array]  # samples, for a mean, in float32 or float64
  contexts: Sequence[Context]  # of each leaf
  later: Sequence[Context]  # of each codec, which encodes sums
  residuals: Sequence[jax.Array | None]  # the owner residual of each codec
  factor: int  # N, by which addends of a sum were multiplied to be samples; else 1
  keep: bool  # whether to return rounding errors
  mark: bool  # whether to return the positions of the sent elements
  watch: bool  # whether to return the sent parts
  anew: Sequence[tuple[type, ...]] = ()  # as of the step, for each leaf
  groups: Sequence[Group] = ()  # of leaves that one program encodes
  before: Sequence[jax.Array] = ()  # what the message before this one brought
  # For each codec, arrays of rows that follow one another. The encoded rows are one
  # array, uint32[rows, words]. Where the exchange adds before it encodes, each leaf has
  # its tiles, float32[rows, *tile_shape]. The leaves themselves, one after the other,
  # if they are plain and an exchange adds them as they are.
  adjacent: Sequence[Sequence[jax.Array]] = ()
  encoded: Mapping[int, Encoded] = MappingProxyType({})  # by the numbers of leaves
  agreed: Sequence[jax.Array | None] = ()  # statistics of each codec, a line a row

  @property
  def parts(self) -> list[jax.Array]:
    """The adjacent arrays, joined to one for each codec."""
    return [x[0] if len(x) == 1 else jnp.concatenate(x) for x in self.adjacent]

  @contextlib.contextmanager
  def scope(self) -> Iterator[None]:
    """Names the operations of the message in profiles and traces."""
    name = f"gradcomp_{self.message.exchange.name}"
    with jax.named_scope(name), study.noted(self.message):
      yield

  def of_sum(self, group: int, part: jax.Array, number: jax.Array | int) -> Context:
    """Returns the context that encodes partial sum ``number`` of the rows ``part``."""
    context = self.later[group]
    key, shared = context.key, context.dither
    if key is None:
      return context
    if shared is not None:
      shared = dithers.dither(dithers.fold_key(shared[:2], part), number)
    return context._replace(key=dithers.fold_key(key, number), dither=shared)

  def decoders(self) -> dict[int, RowDecoder]:
    """Returns the decoder of this worker's own rows, for each codec with any."""
    sums, found = self.layout.sums, {}
    for i in sorted({self.layout.slots[i].group for i in self.encoded}):
      found[i] = sums[i].gathered(self.adjacent[i][0][None], self.agreed[i], 1.0)
    return found


def times(leaves: Sequence[jax.Array], factor: float) -> list[jax.Array]:
  """Multiplies arrays by a factor, with the same bits in all maps."""
  if factor == 1:
    return list(leaves)
  # Else a compiler contracts this product with a sum, and in maps another one.
  narrow = lambda x: x.dtype == jnp.float32
  return [fixed_point.scaled(x, factor) if narrow(x) else x * factor for x in leaves]


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
  # The errors of the rows that this worker owns, where `lost` has no others.
  owned: Mapping[int, jax.Array] = MappingProxyType({})
  residuals: Sequence[jax.Array | None] = ()  # the new owner residuals, by codec
  # The array that a later message can wait for, if not the words: XLA:TPU keeps no
  # order after the reshape that cuts rows from their line.
  line: jax.Array | None = None


class Work(NamedTuple):
  """The computation of one worker, as parts of the elements of a message."""

  encoded: Fraction = Fraction(0)  # the elements that it encodes
  decoded: Fraction = Fraction(0)  # the elements that it decodes, and writes
  added: Fraction = Fraction(0)  # decoded from one worker's rows and added to a sum
  summed: Fraction = Fraction(0)  # added without decoding


CODED_ONCE = Work(encoded=Fraction(1), decoded=Fraction(1))

# ``(own, found)``, where ``found`` is what the stage before it returned, or None.
Stage = Callable[[Sending, Any], Any]


class Exchange(abc.ABC):
  """A schedule of sends and additions of rows, a frozen dataclass with its options.

  The codec's sum knows the numbers that are added; the exchange does not.

  Attributes:
    name: the short form, which users may give instead of the exchange.
    way: the way in which sums come about, which the sums of a codec may refuse.
    owners: whether each worker owns a share of the rows, and sends their sums to all.
    of_leaves: whether each worker encodes its leaves before anything is added.
    sends: whether workers exchange anything.
    feedback: whether owners keep owner residuals.
    in_turn: whether a message is encoded after the one before it has come.
  """

  name: ClassVar[str]
  way: ClassVar[Way]
  owners: ClassVar[bool] = False
  of_leaves: ClassVar[bool] = True
  sends: ClassVar[bool] = True
  feedback: bool = False
  in_turn: bool = False

  @property
  @abc.abstractmethod
  def stages(self) -> tuple[Stage, ...]:
    """The stages, between which computations may lie; the last returns the sums."""

  @abc.abstractmethod
  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    """Returns a worker's computation; ``plain`` leaves are added as they are."""

  def check_axes(self, axis_name: axes.AxisName | None) -> None:
    """Raises ValueError if the exchange cannot run over the axes."""
    return None


def exchanged(
  parts: Sequence[jax.Array], send: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
  """Sends arrays, ``[N, ...]`` by their receivers; returns them by their senders."""
  received = send(collectives.join(parts))
  return collectives.split(received, [part.shape[1:] for part in parts])


def finish_shares(
  own: Sending, rows: Sequence[jax.Array], scales: Sequence[float]
) -> list[Sent]:
  """Adds K payloads of owned rows, ``[K, share, words]``, and encodes sums for all."""
  sent = []
  for i, total in enumerate(own.layout.sums):
    added = total.fold(rows[i], scales[i], keep=own.keep)
    partial = added._replace(residual=own.residuals[i])
    # Only one worker encodes the sum of a share, so that it draws its own bits.
    context = own.later[i]._replace(dither=None)
    sent.append(total.finish(partial, context, own.workers.size, keep=own.keep))
  return sent


def gather_rows(
  layout: Layout, matrices: Sequence[jax.Array], workers: collectives.Workers
) -> tuple[list[jax.Array], jax.Array]:
  """Gathers all workers' rows, ``uint32[N, rows, words]`` a codec, and their lines."""
  name = collectives.final_stage(layout.completed, workers)
  line = collectives.join([matrix[None] for matrix in matrices])[0]
  line = collectives.gather(line, workers.axis_name, name)
  return collectives.split(line, [matrix.shape for matrix in matrices]), line


def owned_total(
  own: Sending,
  sent: Sequence[Sent],
  lost: Sequence[jax.Array | None],
  gathered: Sequence[jax.Array],
) -> Received:
  """Returns the sums of N owners, ``uint32[N, rows, words]`` each, and kept errors."""
  sums, agreed, n = own.layout.sums, own.agreed, own.workers.size

  def decoders() -> dict[int, RowDecoder]:
    found = {}
    for i, (total, rows) in enumerate(zip(sums, own.layout.rows, strict=True)):
      share = -(-rows // n)
      found[i] = total.value(gathered[i], agreed[i], sent[i].scale, share, n)
    return found

  kept = {i: sums[i].loss(x, agreed[i]) for i, x in enumerate(lost) if x is not None}
  return Received(gathered, decoders, lost=kept, residuals=[x.residual for x in sent])
