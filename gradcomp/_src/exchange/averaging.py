"""``Averaging``: the messages of a step, one after the other."""

import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.rounds import in_rounds
from gradcomp._src.codecs.sums.records import Context, Memory
from gradcomp._src.exchange.collectives import STAGE, totals
from gradcomp._src.exchange.owners import OwnerResiduals, owner_residuals
from gradcomp._src.exchange.plan import Message
from gradcomp._src.exchange.protocol import Stage
from gradcomp._src.exchange.step import Leaves, Own, Reduced, Sending, Step, times
from gradcomp._src.kernels.common.threefry import fold_key
from gradcomp._src.mesh.axes import axis_names, require_size
from gradcomp._src.mesh.study import FITTING, note, noted

Owned = Sequence[jax.Array | None]  # the owner residual of each codec


class Averaging:
  """Averages leaves over all workers, message by message and round by round.

  It yields each message before it is sent, and takes its result by :meth:`add`. Arrays
  that stand for leaves in a round need the means of the round before it. In a round the
  last message is the first to go, as the backward pass comes to its leaves first.
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
    parts = list(zip(step.plan.messages, step.later, residuals, strict=True))
    for message, keys, owned in sorted(reversed(parts), key=lambda x: x[0].round):
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
    mean, keep, watch = self._means, self._step.keep, self._step.watch
    unsent: dict[int, jax.Array] = {}
    rows: dict[int, Own | None] = {}
    chosen: dict[int, jax.Array | None] = {}
    sent: dict[int, jax.Array] = {}
    own = {i: x.own for i, x in enumerate(memory)}
    owned: OwnerResiduals = {axes: () for axes in self._step.owned or {}}
    self._done.sort(key=lambda x: plan.messages.index(x[0]))
    for message, part in self._done:
      leaves = message.leaves
      unsent |= zip(leaves, part.unsent, strict=keep)
      rows |= zip(leaves, part.own, strict=keep)
      chosen |= zip(leaves, part.chosen, strict=True)
      sent |= zip(leaves, part.sent, strict=watch)
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
      if not keep:
        continue
      sent[i] = leaf
      if workers is not None and workers.scale == 1:  # of a sum a worker sends an Nth
        sent[i] = leaf / workers.size
      unsent[i], rows[i] = self._leaves[i] - sent[i], None
    count = range(len(self._leaves))
    return Reduced(
      [mean[i] for i in count if i in mean],
      [shares for _, part in self._done for shares in part.shares],
      [unsent[i] for i in count if keep],
      [rows[i] for i in count if keep],
      [chosen[i] for i in count],
      None if self._step.owned is None else owned,
      [Memory(shared[i], own[i]) for i in count],
      [sent[i] for i in count if watch],
    )


def _sending(
  step: Step, message: Message, leaves: Leaves, keys: Sequence[Context], owned: Owned
) -> Sending:
  """Returns a message of a step, with ``keys`` and owner residuals for its codecs."""
  layout, workers, factor = message.layout, step.workers, 1
  if workers is not None and workers.scale == 1 and not layout.plain:
    # An addend is an Nth of a worker's gradient, and may underflow in a type that holds
    # the gradient. With N a power of two the products are exact, so that plain jax.jit
    # has the bits of maps. Leaves that are added without encoding stay addends.
    factor = workers.size
    leaves, workers = times(leaves, factor), workers._replace(scale=1 / factor)
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
  pairs = zip(own, memory, strict=True)
  contexts = [context._replace(memory=x, step=step.number) for context, x in pairs]
  if not layout.elements or not message.exchange.sends:
    workers = None
  return Sending(step, message, leaves, workers, contexts, stages, factor)


def _in_round(context: Context, number: int) -> Context:
  """Returns the context for a round of messages, unchanged for round 0."""
  if not number or context.key is None:
    return context
  key, shared = fold_key(context.key, number), context.dither
  if shared is not None:
    shared = jnp.append(fold_key(shared[:2], number), shared[2])
  return context._replace(key=key, dither=shared)


def refit(step: Step, leaves: Sequence[jax.Array]) -> list[Memory]:
  """Fits the shared memories of float32 leaves to all workers; own ones stay.

  A codec with ``fits`` counts all leaves that it encodes. Counts are added as integers,
  exactly, so that all workers fit the same state.
  """
  plan = step.plan
  result = list(step.memory)
  data = () if plan.axis_name is None else axis_names(plan.axis_name)
  for codec in dict.fromkeys(plan.codecs if plan.sends else ()):
    fits = codec.fits
    if fits is None:
      continue
    own = [i for i, other in enumerate(plan.codecs) if other == codec]
    names = (*data, *sorted({axis for i in own for axis in plan.others[i]}))
    # The counts of all leaves and workers fit in 32 bits, cut to fewer digits if need
    # be.
    most = len(own) * math.prod(map(require_size, names)) * fits.most
    shift = max(0, most.bit_length() - 31)

    def add(counts: jax.Array) -> jax.Array:
      if not names:  # noqa: B023
        return counts
      with noted(FITTING):
        return totals([counts], names, STAGE)[0]  # noqa: B023

    def fit(old: list[jax.Array]) -> list[jax.Array]:
      counts = sum(_count(codec, leaves[i]) >> shift for i in own)  # noqa: B023
      total = add(jnp.asarray(counts))
      return [fits.fit(total, state) for state in old]  # noqa: B023

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
