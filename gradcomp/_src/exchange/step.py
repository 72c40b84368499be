"""One step on a worker: agrees, encodes, exchanges and decodes, message by message."""

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.encoding import Adding, encode_leaves, refitted
from gradcomp._src.codecs.rounds import in_rounds
from gradcomp._src.codecs.sums.records import Context, Memory
from gradcomp._src.exchange.collectives import STAGE, Workers, largest, totals
from gradcomp._src.exchange.one_stage import Local
from gradcomp._src.exchange.owners import OwnerResiduals, owner_residuals
from gradcomp._src.exchange.plan import Message, MessagePlan, own_axes
from gradcomp._src.exchange.protocol import Exchange, Outgoing, Received, Stage
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.kernels.common.threefry import fold_key
from gradcomp._src.kernels.materialize import packed, unknown
from gradcomp._src.mesh.axes import axis_names, require_size
from gradcomp._src.mesh.study import FITTING, note, noted

Leaves = list[jax.Array]


class Step(NamedTuple):
  """The facts of a step on one worker.

  Attributes:
    plan: the messages.
    workers: the workers that exchange; None to exchange nothing.
    keys: the context of each leaf, of which only key and dither are known.
    later: the same for each codec of each message, for its later encodings.
    memory: the codec state of each leaf.
    owned: the owner residuals, or None.
    number: the number of the step, ``int32[]``.
    keep: whether to return the unsent parts.
    mark: whether to return the positions of the sent elements.
    watch: whether to return the sent parts.
    instead: the exchange of all messages, in place of their own.
  """

  plan: MessagePlan
  workers: Workers | None
  keys: Sequence[Context]
  later: Sequence[Sequence[Context]]
  memory: Sequence[Memory]
  owned: OwnerResiduals | None
  number: jax.Array
  keep: bool
  mark: bool
  watch: bool
  instead: Exchange | None = None


class Sending(NamedTuple):
  """The leaves of one message on one worker, before they are encoded.

  Attributes:
    step: the facts of the step.
    message: the message.
    leaves: float32, or float64 for a plain mean; samples, of which a mean is taken.
    workers: the workers that exchange the message; None to exchange nothing.
    contexts: the context of each leaf, except for statistics.
    stages: the later encodings of each codec.
    factor: N, by which addends of a sum were multiplied to be samples; else 1.
  """

  step: Step
  message: Message
  leaves: Leaves
  workers: Workers | None
  contexts: Sequence[Context]
  stages: Sequence[Stage]
  factor: int

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

  @contextlib.contextmanager
  def scope(self) -> Iterator[None]:
    """Names the operations of the message in profiles and traces."""
    name = f"gradcomp_{self.message.exchange.name}"
    with jax.named_scope(name), noted(self.message):
      yield

  def as_given(self, leaves: Leaves) -> Leaves:
    """Turns samples back into addends of a sum, where leaves were given as such."""
    return leaves if self.factor == 1 else _times(leaves, 1 / self.factor)


class Reduced(NamedTuple):
  """The result of a step, or of one of its messages.

  Attributes:
    mean: the mean of each leaf.
    shares: for each message, the means of the rows that this worker owns, an array for
      each codec, where they stay with their owners; then there is no ``mean``.
    unsent: the unsent part of each leaf, in its units; empty without ``keep``.
    chosen: for each leaf, the flat positions of the elements that this worker sent;
      None if it sent all of them, or without ``mark``.
    owned: the new owner residuals, or None.
    memory: the new codec state of each leaf.
    sent: the decoded payload of each leaf; empty without ``watch``.
  """

  mean: Leaves
  shares: list[Leaves]
  unsent: Leaves
  chosen: list[jax.Array | None]
  owned: OwnerResiduals | None
  memory: list[Memory]
  sent: Leaves


def agree(sending: Sending) -> list[jax.Array | None]:
  """Takes the maximum of each leaf's statistics over all workers, in one message.

  A leaf whose codec has no statistics has None.
  """
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
  part = functools.partial(jax.lax.dynamic_slice_in_dim, allow_negative_indices=False)
  return [
    None if x is None else part(agreed, next(starts), x.size).reshape(x.shape)
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
    # not with a residual, because both would be held.
    counts = collections.Counter(slot.group for slot in layout.slots)

    def apart(i: int) -> bool:
      alone = counts[layout.slots[i].group] == 1
      return not keep if alone else agreed[i] is not None

    sends = sending.workers is not None
    rows = {
      i: packed(x.rows) if sends and apart(i) else x.rows for i, x in encoded.items()
    }
    parts = layout.stack(rows)
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
  return Outgoing(
    layout,
    [[x] for x in leaves] if sending.adds_leaves else [adjacent[i] for i in groups],
    encoded,
    [stats.get(i) for i in groups],
    contexts,
    sending.stages,
    keep,
  )


def exchange(sending: Sending, outgoing: Outgoing) -> Received:
  """Sends this worker's part of a message, and returns the sums over all workers."""
  if sending.workers is None:
    return Local().run(outgoing)
  return sending.exchange.run(outgoing, sending.workers)


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
    shares = layout.shares(received.decoders(), received.words)
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

  def chosen(i: int) -> jax.Array | None:
    group, start, stop = layout.slots[i]
    (rows,) = outgoing.adjacent[group]
    return layout.sums[group].sent_at(rows[start:stop], layout.like[i].size)

  def sent(i: int) -> jax.Array:
    """Decodes a leaf; one that was added to others first was sent as it is."""
    return views()[i].reshape(leaves[i].shape) if i in encoded else leaves[i]

  residuals = tuple(x for x in received.residuals if x is not None)
  axes = own_axes(step.plan.axis_name, sending.message.others)
  return Reduced(
    mean if sending.workers is not None else sending.as_given(mean),
    [shares],
    sending.as_given([unsent(i) for i in numbers if step.keep]),
    [chosen(i) if step.mark and i in encoded else None for i in numbers],
    {axes: residuals} if residuals else None,
    [
      memory._replace(own=encoded[i].own) if i in encoded else memory
      for i, memory in enumerate(x.memory or Memory() for x in sending.contexts)
    ],
    sending.as_given([sent(i) for i in numbers if step.watch]),
  )


class Averaging:
  """Averages leaves over all workers, message by message and round by round.

  It yields each message before it is sent, and takes its result by :meth:`add`. Some
  codecs average other arrays in a leaf's place, one after the other: those of a round
  need the means of the round before it.
  """

  def __init__(self, step: Step, leaves: Sequence[jax.Array]):
    note(step.plan, step.number)
    self._step = step._replace(memory=refit(step, leaves))
    self._leaves = leaves
    self._means: dict[int, jax.Array] = {}
    self._done: list[tuple[Message, Reduced]] = []
    shared = [x.shared for x in self._step.memory]
    self._rounds = in_rounds(step.plan.codecs, leaves, shared)

  def __iter__(self) -> Iterator[Sending]:
    step = self._step
    number, arrays = 0, next(self._rounds)
    residuals = owner_residuals(step.plan, step.owned)
    parts = zip(step.plan.messages, step.later, residuals, strict=True)
    for message, keys, owned in parts:
      if message.round > number:
        number, arrays = message.round, self._rounds.send(self._means)
      leaves = [arrays[i] for i in message.leaves]
      yield _sending(step, message, leaves, keys, owned)

  def add(self, sending: Sending, reduced: Reduced) -> None:
    """Takes the result of a message."""
    numbers = sending.message.leaves
    self._means |= zip(numbers, reduced.mean, strict=bool(reduced.mean))
    self._done.append((sending.message, reduced))

  def result(self) -> Reduced:
    """Returns the results of all messages, by the leaves of the step."""
    plan, workers, memory = self._step.plan, self._step.workers, self._step.memory
    mean = self._means
    unsent: dict[int, jax.Array] = {}
    chosen: dict[int, jax.Array | None] = {}
    sent: dict[int, jax.Array] = {}
    own = {i: x.own for i, x in enumerate(memory)}
    owned: OwnerResiduals = {axes: () for axes in self._step.owned or {}}
    for message, part in self._done:
      leaves = message.leaves
      unsent |= zip(leaves, part.unsent, strict=self._step.keep)
      chosen |= zip(leaves, part.chosen, strict=True)
      sent |= zip(leaves, part.sent, strict=self._step.watch)
      own |= zip(leaves, [x.own for x in part.memory], strict=True)
      for axes, arrays in (part.owned or {}).items():
        owned[axes] = (*owned.get(axes, ()), *arrays)
    try:
      self._rounds.send(mean)
    except StopIteration as end:
      restored, shared = end.value
    if plan.axis_name is not None and not plan.sends:
      shared = [x.shared for x in memory]  # or it would no longer be equal on all
    for i, leaf in restored.items():
      mean[i] = leaf
      if not self._step.keep:
        continue
      sent[i] = leaf
      if workers is not None and workers.scale == 1:  # of a sum a worker sends an Nth
        sent[i] = leaf / workers.size
      unsent[i] = self._leaves[i] - sent[i]
    count = range(len(self._leaves))
    return Reduced(
      [mean[i] for i in count if i in mean],
      [shares for _, part in self._done for shares in part.shares],
      [unsent[i] for i in count if self._step.keep],
      [chosen[i] for i in count],
      None if self._step.owned is None else owned,
      [Memory(shared[i], own[i]) for i in count],
      [sent[i] for i in count if self._step.watch],
    )


def _sending(
  step: Step,
  message: Message,
  leaves: Leaves,
  keys: Sequence[Context],
  owned: Sequence[jax.Array | None],
) -> Sending:
  """Returns a message of a step, with ``keys`` and owner residuals for its codecs."""
  layout, workers, factor = message.layout, step.workers, 1
  if workers is not None and workers.scale == 1 and not layout.plain:
    # An addend is an Nth of a worker's gradient, and may underflow in a type that holds
    # the gradient. With N a power of two the products are exact, so that plain jax.jit
    # has the bits of maps. Leaves that are added without encoding stay addends.
    factor = workers.size
    leaves, workers = _times(leaves, factor), workers._replace(scale=1 / factor)
  memory = [step.memory[i] for i in message.leaves]
  if not message.exchange.sends:  # no worker knows the memories of others
    memory = [x._replace(shared=()) for x in memory]
  every = zip(layout.slots, memory, strict=True)
  first = {slot.group: x.shared for slot, x in reversed(list(every))}
  stages = [
    Stage(key._replace(memory=Memory(first[i], None), step=step.number), residual)
    for i, (key, residual) in enumerate(zip(keys, owned, strict=True))
  ]
  own = [_in_round(step.keys[i], message.round) for i in message.leaves]
  contexts = [
    context._replace(memory=x, step=step.number)
    for context, x in zip(own, memory, strict=True)
  ]
  return Sending(
    step,
    message,
    leaves,
    workers if layout.elements and message.exchange.sends else None,
    contexts,
    stages,
    factor,
  )


def _in_round(context: Context, number: int) -> Context:
  """Returns the context for a round of messages, unchanged for round 0."""
  if not number or context.key is None:
    return context
  key, shared = fold_key(context.key, number), context.dither
  if shared is not None:
    shared = jnp.append(fold_key(shared[:2], number), shared[2])
  return context._replace(key=key, dither=shared)


def _times(leaves: Leaves, factor: float) -> Leaves:
  # Else a compiler contracts this product with a sum, and in maps another one.
  narrow = lambda x: x.dtype == jnp.float32
  return [scaled(x, factor) if narrow(x) else x * factor for x in leaves]


def refit(step: Step, leaves: Sequence[jax.Array]) -> list[Memory]:
  """Fits the leaves' shared memories to all workers, and keeps each worker's own ones.

  ``leaves`` are float32.
  """
  plan = step.plan
  if not plan.sends:
    return list(step.memory)
  data = () if plan.axis_name is None else axis_names(plan.axis_name)

  def adding(numbers: Sequence[int]) -> Adding:
    others = {axis for i in numbers for axis in plan.others[i]}
    names = (*data, *sorted(others))

    def add(counts: jax.Array) -> jax.Array:
      if not names:
        return counts
      with noted(FITTING):
        return totals([counts], names, STAGE)[0]

    return Adding(add, math.prod(map(require_size, names)))

  old = [x.shared for x in step.memory]
  shared = refitted(plan.codecs, leaves, old, plan.others, step.number, adding)
  return [x._replace(shared=y) for x, y in zip(step.memory, shared, strict=True)]
