"""The step of one message: agrees, encodes, exchanges and decodes its leaves."""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.encoding import encode_leaves
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Context, Memory
from gradcomp._src.codecs.tiles import from_tiles
from gradcomp._src.exchange.collectives import Workers, largest
from gradcomp._src.exchange.in_turn import behind
from gradcomp._src.exchange.one_stage import Local
from gradcomp._src.exchange.owners import OwnerResiduals
from gradcomp._src.exchange.plan import Message, MessagePlan, own_axes
from gradcomp._src.exchange.protocol import (
  Exchange,
  Outgoing,
  Received,
  Stage,
  stages_of,
  waits,
)
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.kernels.materialize import packed, slice_at, unknown
from gradcomp._src.mesh.study import noted

Leaves = list[jax.Array]


class Step(NamedTuple):
  """The facts of a step on one worker."""

  plan: MessagePlan
  workers: Workers | None  # the workers that exchange; None to exchange nothing
  keys: Sequence[Context]  # key and dither of each leaf
  later: Sequence[Sequence[Context]]  # the same for codecs of messages
  memory: Sequence[Memory]  # the codec state of each leaf
  owned: OwnerResiduals | None
  number: jax.Array  # the number of the step, int32[]
  keep: bool  # whether to return the unsent parts
  mark: bool  # whether to return the positions of the sent elements
  watch: bool  # whether to return the sent parts
  instead: Exchange | None = None  # the exchange of all messages, in place of their own


class Sending(NamedTuple):
  """The leaves of one message on one worker, before they are encoded."""

  step: Step
  message: Message
  leaves: Leaves  # samples, for a mean, in float32 or float64
  workers: Workers | None  # that exchange the message; None to exchange nothing
  contexts: Sequence[Context]  # the context of each leaf, except for statistics
  stages: Sequence[Stage]  # the later encodings of each codec
  factor: int  # N, by which addends of a sum were multiplied to be samples; else 1

  @property
  def exchange(self) -> Exchange:
    """The exchange of the message; ``Local()`` where there is nothing to send."""
    if self.workers is None:
      return Local()
    return self.step.instead or self.message.exchange

  @property
  def adds_leaves(self) -> bool:
    """True if the exchange adds plain leaves as they are."""
    adds = self.exchange.way == "reduced" or not self.exchange.sends
    return adds and self.message.layout.plain

  def encodes(self, number: int) -> bool:
    """Returns True if a leaf is encoded before anything is added."""
    rows = self.message.layout.codec_of(number).facts.of_rows
    return not self.adds_leaves and (self.exchange.of_leaves or rows)

  def behind(self, before: Sequence[jax.Array]) -> "Sending":
    """Returns the message, to encode after ``before`` has come if it is in turn."""
    if not waits(self.exchange):
      return self
    return self._replace(leaves=behind(self.leaves, before))

  @contextlib.contextmanager
  def scope(self) -> Iterator[None]:
    """Names the operations of the message in profiles and traces."""
    name = f"gradcomp_{self.message.exchange.name}"
    with jax.named_scope(name), noted(self.message):
      yield

  def as_given(self, leaves: Leaves) -> Leaves:
    """Turns samples back into addends of a sum, where leaves were given as such."""
    return leaves if self.factor == 1 else times(leaves, 1 / self.factor)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("rows", "agreed"),
  meta_fields=("codec", "shape", "factor"),
)
@dataclasses.dataclass(frozen=True)
class Own:
  """A worker's own rows of a large leaf, from which its unsent part is computed anew.

  It is a tree of arrays, so that a function of it is traced once for leaves of a shape.
  """

  rows: jax.Array  # uint32[rows, words]
  agreed: jax.Array | None  # the statistics of the leaf
  codec: Codec
  shape: tuple[int, ...]  # the view
  factor: int  # as of the message

  def unsent(self, leaf: jax.Array) -> jax.Array:
    """Returns the unsent part of a leaf, given in the shape of the view."""
    (sample,) = [leaf] if self.factor == 1 else times([leaf], self.factor)
    agreed, count = self.agreed, len(self.rows)
    if agreed is not None:
      agreed = jnp.broadcast_to(agreed, (count, agreed.shape[1]))
    tiles = self.codec.sums.gathered(self.rows[None], agreed, 1.0)(0, count)
    like = jax.ShapeDtypeStruct(self.shape, jnp.float32)
    own = sample - from_tiles(tiles, like, self.codec)
    return own if self.factor == 1 else times([own], 1 / self.factor)[0]


class Reduced(NamedTuple):
  """The result of a step, or of one of its messages."""

  mean: Leaves  # the mean of each leaf
  # For each message, the means of the rows of each leaf that this worker owns, where
  # they stay with their owners; then there is no mean.
  shares: list[Leaves]
  unsent: Leaves  # the unsent part of each leaf, in its units; empty without keep
  # For each leaf, the rows that compute its unsent part anew; None if it must be read.
  own: Sequence[Own | None]  # empty without keep
  # For each leaf, the flat positions of the elements that this worker sent; None if it
  # sent all of them, or without mark; a mask of 2**31 elements or more.
  chosen: list[jax.Array | None]
  owned: OwnerResiduals | None  # the new owner residuals, or None
  memory: list[Memory]  # the new codec state of each leaf
  sent: Leaves  # the decoded payload of each leaf; empty without watch


def agree(sending: Sending) -> list[jax.Array | None]:
  """Takes the maximum of each leaf's statistics, or None, over all workers at once."""
  codec_of = sending.message.layout.codec_of
  wanted = [codec_of(i).agree(leaf) for i, leaf in enumerate(sending.leaves)]
  own = [x for x in wanted if x is not None]
  if not own or sending.workers is None:
    return wanted
  message = jnp.concatenate([x.reshape(-1) for x in own])
  agreed = largest(message, sending.workers.axis_name)
  # So leaves of one shape have equal programs, of which XLA compiles one.
  ends = list(itertools.accumulate(x.size for x in own))
  starts = iter(unknown([0, *ends[:-1]], agreed))
  return [
    None if x is None else slice_at(agreed, next(starts), x.size).reshape(x.shape)
    for x in wanted
  ]


def encode(sending: Sending, agreed: Sequence[jax.Array | None]) -> Outgoing:
  """Encodes leaves to rows, or cuts them into the tiles that the exchange adds."""
  layout, leaves, keep = sending.message.layout, sending.leaves, sending.step.keep
  pairs = zip(sending.contexts, agreed, strict=True)
  contexts = [context._replace(agreed=stat) for context, stat in pairs]
  coded = [i for i in range(len(leaves)) if sending.encodes(i)]
  # Every leaf is encoded by itself, and then the rows are stacked. Flattening the
  # gradient in float32 first would cost five times as much.
  with jax.named_scope("gradcomp_encode"):
    codecs = [layout.codec_of(i) for i in coded]
    own = [leaves[i] for i in coded], [contexts[i] for i in coded]
    encoded = dict(zip(coded, encode_leaves(codecs, *own, keep=keep), strict=True))
    # Of several leaves XLA would fuse encoders into the concatenation, and that into
    # each slice of it that is sent, but for rows with scales behind their codes, which
    # are concatenated there already. A matrix of one large leaf is materialized, but
    # not where its unsent part has been computed from it.
    counts = collections.Counter(slot.group for slot in layout.slots)

    def apart(i: int) -> bool:
      alone = counts[layout.slots[i].group] == 1
      kept = keep and encoded[i].unsent is not None
      return not kept if alone else agreed[i] is not None

    sends = sending.workers is not None
    pack = lambda i, rows: packed(rows) if sends and apart(i) else rows
    parts = layout.stack({i: pack(i, x.rows) for i, x in encoded.items()})
    if not sends:
      parts = {i: packed(matrix) for i, matrix in parts.items()}
  adjacent = {i: [matrix] for i, matrix in parts.items()}
  if not sending.adds_leaves:
    others = [i for i in range(len(leaves)) if i not in encoded]
    adjacent |= layout.adjacent({i: layout.tiles(i, leaves[i]) for i in others})
  lines = {
    i: jnp.broadcast_to(stat, (slot.stop - slot.start, stat.shape[1]))
    for i, (slot, stat) in enumerate(zip(layout.slots, agreed, strict=True))
    if stat is not None
  }
  stats, groups = layout.stack(lines), range(len(layout.codecs))
  rows = [[x] for x in leaves] if sending.adds_leaves else [adjacent[i] for i in groups]
  known = [stats.get(i) for i in groups]
  return Outgoing(layout, rows, encoded, known, contexts, sending.stages, keep)


def exchange(sending: Sending, outgoing: Outgoing) -> Received:
  """Sends this worker's part of a message, and returns the sums over all workers."""
  if sending.workers is None:
    return Local().run(outgoing)
  found: Any = None
  for run in stages_of(sending.exchange):
    found = run(outgoing, sending.workers, found)
  return found


def decode(sending: Sending, outgoing: Outgoing, received: Received) -> Reduced:
  """Decodes the means, and this worker's own part where its residual needs that."""
  step, layout, leaves = sending.step, outgoing.layout, sending.leaves
  encoded, numbers = outgoing.encoded, range(len(sending.leaves))
  mean: Leaves = []
  shares: Leaves = []
  if received.decoders is None:
    mean = list(received.words)
  elif received.to_all:
    mean = layout.means(received.decoders, received.words[0])
  else:
    assert sending.workers is not None
    own_rows = received.decoders(), received.words
    shares = layout.shares(*own_rows, sending.workers.size)
  views = functools.cache(lambda: layout.viewed(outgoing.decoders()))

  def unsent(i: int) -> jax.Array:
    """Returns the rounding error of a leaf, plus errors of sums of its rows."""
    lost = None
    if layout.slots[i].group in received.lost:
      lost = layout.decode_leaf(i, received.lost)
    if i not in encoded:
      return jnp.zeros_like(leaves[i]) if lost is None else lost
    shape, known = layout.view(i), encoded[i].unsent
    own = leaves[i].reshape(shape) - views()[i] if known is None else known
    own = own.reshape(shape)
    return own if lost is None else own + lost.reshape(shape)

  def own(i: int) -> Own | None:
    """Returns the rows of a leaf that is cut into tiles, without errors of sums."""
    shape, (group, start, stop) = layout.view(i), layout.slots[i]
    # Errors of sums would be held in place of the unsent part. Decoding the elements of
    # a sparse codec would scatter them into zeros.
    given = shape == leaves[i].shape or layout.codecs[group].facts.drops
    if i not in encoded or given or group in received.lost:
      return None
    rows, agreed = outgoing.adjacent[group][0][start:stop], outgoing.contexts[i].agreed
    return Own(rows, agreed, layout.codecs[group], shape, sending.factor)

  def chosen(i: int) -> jax.Array | None:
    group, start, stop = layout.slots[i]
    if encoded[i].chosen is not None:
      return encoded[i].chosen
    (rows,) = outgoing.adjacent[group]
    return layout.sums[group].sent_at(rows[start:stop], layout.like[i].size)

  # A leaf that was added to others first was sent as it is.
  sent = lambda i: views()[i].reshape(leaves[i].shape) if i in encoded else leaves[i]
  residuals = tuple(x for x in received.residuals if x is not None)
  axes = own_axes(step.plan.axis_name, sending.message.others)
  return Reduced(
    mean if sending.workers is not None else sending.as_given(mean),
    [shares],
    sending.as_given([unsent(i) for i in numbers if step.keep]),
    [own(i) for i in numbers if step.keep],
    [chosen(i) if step.mark and i in encoded else None for i in numbers],
    {axes: residuals} if residuals else None,
    [
      memory._replace(own=encoded[i].own) if i in encoded else memory
      for i, memory in enumerate(x.memory or Memory() for x in sending.contexts)
    ],
    sending.as_given([sent(i) for i in numbers if step.watch]),
  )


def times(leaves: Leaves, factor: float) -> Leaves:
  # Else a compiler contracts this product with a sum, and in maps another one.
  narrow = lambda x: x.dtype == jnp.float32
  return [scaled(x, factor) if narrow(x) else x * factor for x in leaves]
