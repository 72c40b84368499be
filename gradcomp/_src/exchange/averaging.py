"""``Averaging``: the messages of a step, one after the other."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Context, Memory
from gradcomp._src.exchange.collectives import STAGE, totals
from gradcomp._src.exchange.owners import OwnerResiduals, owner_residuals
from gradcomp._src.exchange.plan import Message, whole_leaves
from gradcomp._src.exchange.protocol import Stage
from gradcomp._src.exchange.step import Leaves, Own, Reduced, Sending, Step, times
from gradcomp._src.mesh.axes import axis_names, require_size
from gradcomp._src.mesh.study import FITTING, noted

Owned = Sequence[jax.Array | None]  # the owner residual of each codec
Arrays = Sequence[jax.Array] | Mapping[int, jax.Array]  # by the numbers of leaves


class Averaging:
  """Averages arrays over all workers, message by message.

  It yields each message before it is sent, and takes its result by :meth:`add`. The
  last message is the first to go, as the backward pass comes to its leaves first.
  """

  parts = staticmethod(whole_leaves)  # what each average takes, which messages hold

  def __init__(self, step: Step, arrays: Arrays):
    self._step = step._replace(memory=refit(step, arrays))
    self._arrays = arrays
    self._done: list[tuple[Message, Reduced]] = []

  def __iter__(self) -> Iterator[Sending]:
    step = self._step
    residuals = owner_residuals(step.plan, step.owned)
    parts = list(zip(step.plan.messages, step.later, residuals, strict=True))
    for message, keys, owned in reversed(parts):
      leaves = [self._arrays[i] for i in message.leaves]
      yield _sending(step, message, leaves, keys, owned)

  def add(self, sending: Sending, reduced: Reduced) -> None:
    """Takes the result of a message."""
    self._done.append((sending.message, reduced))

  def result(self) -> Reduced:
    """Returns the results of all messages, by the numbers of their leaves."""
    plan, memory = self._step.plan, self._step.memory
    keep, watch = self._step.keep, self._step.watch
    mean: dict[int, jax.Array] = {}
    unsent: dict[int, jax.Array] = {}
    rows: dict[int, Own | None] = {}
    chosen: dict[int, jax.Array | None] = {}
    sent: dict[int, jax.Array] = {}
    own: dict[int, Memory] = {}
    owned: OwnerResiduals = {axes: () for axes in self._step.owned or {}}
    self._done.sort(key=lambda x: plan.messages.index(x[0]))
    for message, part in self._done:
      leaves = message.leaves
      mean |= zip(leaves, part.mean, strict=bool(part.mean))
      unsent |= zip(leaves, part.unsent, strict=keep)
      rows |= zip(leaves, part.own, strict=keep)
      chosen |= zip(leaves, part.chosen, strict=True)
      sent |= zip(leaves, part.sent, strict=watch)
      own |= zip(leaves, part.memory, strict=True)
      for axes, arrays in (part.owned or {}).items():
        owned[axes] = (*owned.get(axes, ()), *arrays)
    numbers = sorted(chosen)
    return Reduced(
      [mean[i] for i in numbers if i in mean],
      [shares for _, part in self._done for shares in part.shares],
      [unsent[i] for i in numbers if keep],
      [rows[i] for i in numbers if keep],
      [chosen[i] for i in numbers],
      None if self._step.owned is None else owned,
      [memory[i]._replace(own=own[i].own) for i in numbers],
      [sent[i] for i in numbers if watch],
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
  pairs = zip([step.keys[i] for i in message.leaves], memory, strict=True)
  contexts = [context._replace(memory=x, step=step.number) for context, x in pairs]
  if not layout.elements or not message.exchange.sends:
    workers = None
  return Sending(step, message, leaves, workers, contexts, stages, factor)


def refit(step: Step, leaves: Arrays) -> list[Memory]:
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
