"""The average of a step: agrees, encodes, exchanges and decodes, by messages."""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs import encoding
from gradcomp._src.codecs.protocol import Codec, from_tiles, tile_shape, to_tiles
from gradcomp._src.codecs.sums.records import Context, Memory
from gradcomp._src.exchange import collectives, schedules
from gradcomp._src.exchange import layout as layouts
from gradcomp._src.exchange import plan as plans
from gradcomp._src.exchange.collectives import ALONE, STAGE
from gradcomp._src.exchange.protocol import Exchange, Received, Sending, times
from gradcomp._src.kernels.materialize import (
  LARGE,
  materialized,
  packed,
  slice_at,
  unknown,
)
from gradcomp._src.mesh import axes, study

Leaves = list[jax.Array]
Arrays = Sequence[jax.Array] | Mapping[int, jax.Array]  # by the numbers of leaves


class Step(NamedTuple):
  """The facts of a step on one worker."""

  plan: plans.MessagePlan
  keys: Sequence[Context]  # key and dither of each leaf
  later: Sequence[Sequence[Context]]  # the same for codecs of messages
  memory: Sequence[Memory]  # the codec state of each leaf
  owned: plans.OwnerResiduals | None
  number: jax.Array  # the number of the step, int32[]
  keep: bool  # whether to return the unsent parts
  mark: bool  # whether to return the positions of the sent elements
  watch: bool  # whether to return the sent parts
  # The records that may compute a leaf's unsent part anew, for each leaf.
  anew: Sequence[tuple[type, ...]] = ()
  instead: Exchange | None = None  # the exchange of all messages, in place of their own


# The fields of a tree that are no arrays. A function of such a tree is traced once for
# leaves of a shape.
_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
  """A worker's own rows of a large leaf, to compute its unsent part anew."""

  rows: jax.Array  # uint32[rows, words]
  agreed: jax.Array | None  # the statistics of the leaf
  lost: jax.Array | None  # the errors of the rows that this worker owns
  first: jax.Array | None  # the leaf's first row, counted from these
  codec: Codec = dataclasses.field(metadata=_STATIC)
  shape: tuple[int, ...] = dataclasses.field(metadata=_STATIC)  # the view
  factor: int = dataclasses.field(metadata=_STATIC)  # as of the message

  def unsent(self, leaf: jax.Array) -> jax.Array:
    """Returns the unsent part of a leaf, given in the shape of the view."""
    (sample,) = times([leaf], self.factor)
    agreed, count = self.agreed, len(self.rows)
    if agreed is not None:
      agreed = jnp.broadcast_to(agreed, (count, agreed.shape[1]))
    like, sums = jax.ShapeDtypeStruct(self.shape, jnp.float32), self.codec.sums
    joined = lambda tiles: from_tiles(tiles, like, self.codec)
    own = sample - joined(sums.gathered(self.rows[None], agreed, 1.0)(0, count))
    if self.lost is not None and self.first is not None:
      around = jnp.pad(self.lost, [(count, count)] + [(0, 0)] * (self.lost.ndim - 1))
      lost = slice_at(around, jnp.maximum(self.first + count, 0), count)
      own = own + joined(sums.loss(lost, agreed)(0, count))
    return times([own], 1 / self.factor)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnEntries:
  """A worker's own entries of a large leaf, beside which all of it is unsent."""

  chosen: jax.Array  # as of Encoded, as is `lost`
  lost: jax.Array
  factor: int = dataclasses.field(metadata=_STATIC)  # as of the message

  def unsent(self, leaf: jax.Array) -> jax.Array:
    """Returns the unsent part of a leaf, given in any shape."""
    (sample,) = times([leaf], self.factor)
    given: Any = {"mode": "drop", "unique_indices": True}
    chosen = sample.reshape(-1).at[self.chosen]
    own = chosen.set(self.lost, **given, wrap_negative_indices=False)
    return times([own.reshape(leaf.shape)], 1 / self.factor)[0]


class Reduced(NamedTuple):
  """The result of a step for one leaf; None for parts that no option asks for."""

  mean: Any
  share: Any  # the rows that this worker owns, in place of a mean
  unsent: Any  # in units of the leaf; or an Own or OwnEntries, which computes it anew
  # The flat positions of the elements that this worker sent; None if it sent all of
  # them. A mask of 2**31 elements or more.
  chosen: jax.Array | None
  memory: Memory  # the new codec state
  sent: Any  # the decoded payload


class Averaged(NamedTuple):
  """The result of all messages of an average."""

  leaves: dict[int, Reduced]  # by number
  owned: plans.OwnerResiduals | None  # the new owner residuals
  came: Sequence[jax.Array]  # the arrays that the next average waits for


def average(
  step: Step, arrays: Arrays, came: Sequence[jax.Array] = (), turn: int = 0
) -> Averaged:
  """Averages arrays over all workers, after ``came``, arrays of an earlier average."""
  step = step._replace(memory=refit(step, arrays))
  found: dict[int, Reduced] = {}
  residuals: list[Sequence[jax.Array | None]] = []
  for sending in sendings(step, arrays, turn):
    with sending.scope():
      encoded = encode(agree(sending), came)
      received: Any = None
      for stage in encoded.exchange.stages:
        received = stage(encoded, received)
      came = received.words if received.line is None else [received.line]
      found |= zip(sending.message.leaves, decode(encoded, received), strict=True)
    residuals.append(received.residuals)
  owned: plans.OwnerResiduals | None = None
  if step.owned is not None:
    kept = plans.as_stored(step.plan, residuals[::-1])  # the last message went first
    owned = dict.fromkeys(step.owned, ()) | kept
  return Averaged(found, owned, came)


def sendings(step: Step, arrays: Arrays, turn: int = 0) -> Iterator[Sending]:
  """Yields the messages of an average, the last one first, before they are encoded."""
  residuals = plans.owner_residuals(step.plan, step.owned)
  every = list(enumerate(zip(step.plan.messages, step.later, strict=True)))
  for number, (message, keys) in reversed(every):
    if message.turn != turn:
      continue
    layout, workers, factor = message.layout, step.plan.group, 1
    leaves = [arrays[i] for i in message.leaves]
    if workers.scale == 1 and not layout.plain:
      # An addend is an Nth of a worker's gradient, and may underflow in a type that
      # holds the gradient. With N a power of two the products are exact, so that plain
      # jax.jit has the bits of maps. Leaves that are added without encoding stay
      # addends.
      factor = workers.size
      leaves, workers = times(leaves, factor), workers._replace(scale=1 / factor)
    memory = [step.memory[i] for i in message.leaves]
    exchange = step.instead or message.exchange
    if not message.exchange.sends:  # no worker knows the memories of others
      memory = [x._replace(shared=()) for x in memory]
    if workers == ALONE or not layout.elements or not message.exchange.sends:
      exchange, workers = schedules.Local(), ALONE
    own, first = [], dict[int, Memory]()
    for i, slot, x in zip(message.leaves, layout.slots, memory, strict=True):
      own.append(step.keys[i]._replace(memory=x, step=step.number))
      first.setdefault(slot.group, Memory(x.shared, None))
    later = [x._replace(memory=first[i], step=step.number) for i, x in enumerate(keys)]
    owned = [residuals.get((number, group)) for group in range(len(keys))]
    facts = message, layout, exchange, workers, leaves, own, later, owned, factor
    anew = [step.anew[i] for i in message.leaves] if step.keep and step.anew else ()
    yield Sending(*facts, step.keep, step.mark, step.watch, anew)


def agree(sending: Sending) -> Sending:
  """Takes the maximum of each leaf's statistics over all workers at once."""
  leaves, contexts, layout = sending.leaves, sending.contexts, sending.layout
  codecs = [layout.codecs[slot.group] for slot in layout.slots]
  groups = encoding.grouped(codecs, leaves, contexts)
  agreed, measured = encoding.statistics_of(groups, leaves)
  own = [x for x in agreed if x is not None]
  if own and sending.exchange.sends:
    message = jnp.concatenate([lax.collapse(x, 0) for x in own])
    most = collectives.largest(message, sending.workers.axis_name)
    parts = iter(layouts.cut(most, [x.size for x in own]))
    agreed = [x if x is None else next(parts).reshape(x.shape) for x in agreed]
  known = zip(contexts, agreed, measured, strict=True)
  contexts = [x._replace(agreed=y, measured=z) for x, y, z in known]
  return sending._replace(contexts=contexts, groups=groups)


def encode(sending: Sending, before: Sequence[jax.Array] = ()) -> Sending:
  """Encodes leaves to rows, or cuts them into tiles to add, after ``before``."""
  layout, exchange, leaves = sending.layout, sending.exchange, sending.leaves
  if exchange.in_turn:
    leaves = collectives.behind(leaves, before)
  contexts, sent = sending.contexts, sending._replace(leaves=leaves, before=before)
  if layout.plain and (exchange.way == "reduced" or not exchange.sends):
    return sent._replace(adjacent=[[x] for x in leaves])  # added as they are
  coded = [x for x in sending.groups if exchange.of_leaves or x.codec.facts.of_rows]
  counts = collections.Counter(slot.group for slot in layout.slots)
  rows, adjacent, tiles, lines = {}, {}, {}, {}
  # Every leaf is encoded by itself, and then the rows are stacked. Flattening the
  # gradient in float32 first would cost five times as much.
  with jax.named_scope("gradcomp_encode"):
    encoded = encoding.encode_leaves(coded, leaves, contexts, keep=sending.keep)
    for i, x in encoded.items():
      # Of several leaves XLA would fuse encoders into the concatenation, and that into
      # each slice of it that is sent. Rows with scales after their codes are
      # concatenated there already. A matrix of one large leaf is materialized, but not
      # where its unsent part has been computed from it.
      apart = contexts[i].agreed is not None
      if counts[layout.slots[i].group] == 1:
        apart = not (sending.keep and x.unsent is not None)
      rows[i] = packed(x.rows) if exchange.sends and apart else x.rows
    for group, own_rows in layout.adjacent(rows).items():
      matrix = jnp.concatenate(own_rows)
      adjacent[group] = [matrix if exchange.sends else packed(matrix)]
  for i, (group, start, stop) in enumerate(layout.slots):
    codec, line = layout.codecs[group], contexts[i].agreed
    if i not in encoded:
      tiles[i] = to_tiles(leaves[i], codec).reshape(-1, *tile_shape(codec))
    if line is not None:
      lines[i] = jnp.broadcast_to(line, (stop - start, line.shape[1]))
  adjacent |= layout.adjacent(tiles)
  stats = {group: jnp.concatenate(x) for group, x in layout.adjacent(lines).items()}
  numbers = range(len(layout.codecs))
  of_rows, in_order = [stats.get(i) for i in numbers], [adjacent[i] for i in numbers]
  return sent._replace(encoded=encoded, adjacent=in_order, agreed=of_rows)


def _anew(sending: Sending, received: Received) -> dict[int, Own | OwnEntries]:
  """Returns the records that compute unsent parts anew, by the numbers of leaves."""
  layout, found = sending.layout, dict[int, Own | OwnEntries]()
  firsts = [slot.start for slot in layout.slots]
  starts = functools.cache(lambda: unknown(firsts, sending.leaves[0]))
  for i, allowed in enumerate(sending.anew):
    (group, start, stop), coded = layout.slots[i], sending.encoded.get(i)
    codec, mine, first = layout.codecs[group], received.owned.get(group), None
    leaf, shape = sending.leaves[i], layout.view(i)
    # Errors of other workers' rows would be held in place of the unsent part.
    loses = group in received.lost
    held = loses and mine is None
    if coded is None or held or leaf.size < LARGE or shape == leaf.shape:
      continue
    if codec.facts.drops:  # decoding its elements would scatter them into zeros
      chosen, lost = coded.chosen, coded.lost
      if not (loses or chosen is None or lost is None) and OwnEntries in allowed:
        found[i] = OwnEntries(chosen, lost, sending.factor)
    elif Own in allowed:
      if mine is not None:
        first = starts()[i] - lax.axis_index(sending.workers.axis_name) * len(mine)
      rows = lax.slice_in_dim(sending.adjacent[group][0], start, stop)
      given = rows, sending.contexts[i].agreed, mine, first
      found[i] = Own(*given, codec, shape, sending.factor)
  return found


def _unsent(
  sending: Sending, i: int, view: jax.Array | None, lost: jax.Array | None
) -> jax.Array:
  """Returns the unsent part of a sample, with the errors of sums that it keeps."""
  leaf, coded, shape = sending.leaves[i], sending.encoded.get(i), sending.layout.view(i)
  if coded is None:
    return jnp.zeros_like(leaf) if lost is None else lost
  unsent = coded.unsent
  if unsent is None:
    assert view is not None
    unsent = lax.reshape(leaf, shape) - view
  unsent = lax.reshape(unsent, shape)
  return unsent if lost is None else lax.add(unsent, lax.reshape(lost, shape))


def decode(sending: Sending, received: Received) -> list[Reduced]:
  """Decodes the means, and this worker's own part where its residual needs that."""
  layout, encoded, factor = sending.layout, sending.encoded, 1 / sending.factor
  means: list[Any] = [None] * len(layout.slots)
  shares, of = means, received.decoders
  if of is None:
    means = list(received.words) or means
  elif received.to_all:
    # A residual and every state of an optimizer read large leaves. A CPU goes through
    # them in the shape of tiles.
    read, words = functools.partial(layout.viewed, of), received.words[0]
    tiled = any(layout.view(i) != x.shape for i, x in enumerate(layout.like))
    found = materialized(read, words) if tiled else read(words)
    means = [lax.reshape(found[i], x.shape) for i, x in enumerate(layout.like)]
  else:
    shares = layout.shares(of(), received.words, sending.workers.size)
  if not sending.exchange.sends:
    means = times(means, factor)
  anew, views, losses = _anew(sending, received), dict[int, Any](), dict[int, Any]()
  unread = any(x.unsent is None for i, x in encoded.items() if i not in anew)
  if encoded and (sending.watch or (sending.keep and unread)):
    views = layout.viewed(sending.decoders, but=anew)
  if sending.keep:
    losses = layout.viewed(lambda: received.lost, but=anew)
  result = []
  for i, leaf in enumerate(sending.leaves):
    unsent: Any = anew.get(i)
    chosen, sent, coded = None, None, encoded.get(i)
    memory = sending.contexts[i].memory or Memory()
    if coded is not None:
      memory, chosen = memory._replace(own=coded.own), coded.chosen
      if sending.mark and chosen is None:
        group, start, stop = layout.slots[i]
        rows = lax.slice_in_dim(sending.adjacent[group][0], start, stop)
        chosen = layout.sums[group].sent_at(rows, layout.like[i].size)
    if sending.keep and i not in anew:
      (unsent,) = times([_unsent(sending, i, views.get(i), losses.get(i))], factor)
    if sending.watch:  # a leaf that was added to others first was sent as it is
      (sent,) = times([views[i].reshape(leaf.shape) if i in views else leaf], factor)
    result.append(Reduced(means[i], shares[i], unsent, chosen, memory, sent))
  return result


def refit(step: Step, leaves: Arrays) -> list[Memory]:
  """Fits the shared memories of float32 leaves to the integer counts of all workers."""
  plan, result = step.plan, list(step.memory)
  for codec in dict.fromkeys(plan.codecs if plan.sends else ()):
    fits = codec.fits
    if fits is None:
      continue
    own = [i for i, other in enumerate(plan.codecs) if other == codec]
    others = sorted({axis for i in own for axis in plan.others[i]})
    names = plans.own_axes(plan.axis_name, tuple(others))
    # The counts of all leaves and workers fit in 32 bits, cut to fewer digits if need
    # be.
    most = len(own) * math.prod(map(axes.require_size, names)) * fits.most
    shift = max(0, most.bit_length() - 31)

    def fit(old: list[jax.Array]) -> list[jax.Array]:
      counts: Any = sum(_count(codec, leaves[i]) >> shift for i in own)  # noqa: B023
      counts = jnp.asarray(counts)
      if names:  # noqa: B023
        with study.noted(study.FITTING):
          (counts,) = collectives.totals([counts], names, STAGE)  # noqa: B023
      return [fits.fit(counts, state) for state in old]  # noqa: B023

    # Leaves that vary over the same axes have states of one type.
    first = {plan.others[i]: result[i].shared for i in reversed(own)}
    due = step.number % fits.every == 0
    again = lax.cond(due, fit, lambda old: old, list(first.values()))
    fitted = dict(zip(first, again, strict=True))
    for i in own:
      result[i] = result[i]._replace(shared=fitted[plan.others[i]])
  return result


@functools.partial(jax.jit, static_argnums=0)
def _count(codec: Codec, leaf: jax.Array) -> jax.Array:
  """Counts a leaf's elements; jitted, so that leaves of one shape are traced once."""
  assert codec.fits is not None
  return codec.fits.count(leaf)
