"""The exchange of one message: agrees, encodes, exchanges and decodes."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.memory import Adding, refitted
from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.exchange.collectives import STAGE, Workers, largest, totals
from gradcomp._src.exchange.contribution import Contribution, Leaves
from gradcomp._src.exchange.keys import Keys
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.exchange.local import Local
from gradcomp._src.exchange.notes import FITTING, noted
from gradcomp._src.exchange.plan import Message, MessagePlan
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.kernels.materialize import unknown
from gradcomp._src.mesh.axes import axis_names, require_size


class Samples(NamedTuple):
  """Leaves to encode, the workers that average them, and the way back to addends."""

  leaves: Leaves
  workers: Workers | None
  back: Callable[[Leaves], Leaves]


def as_samples(layout: Layout, leaves: Leaves, workers: Workers | None) -> Samples:
  """Multiplies addends of a sum by N, which makes the sum their mean; others stay.

  Leaves that are added without encoding stay addends.
  """
  # An addend is an Nth of a worker's gradient, and may underflow in a type that holds
  # the gradient. With N a power of two the products are exact, so that plain jax.jit
  # has the bits of maps.
  plain = all(codec.sums.plain for codec in layout.codecs)
  if workers is None or workers.scale != 1 or plain:
    return Samples(leaves, workers, lambda leaves: leaves)
  count = workers.size
  return Samples(
    _times(leaves, count),
    workers._replace(scale=1 / count),
    lambda leaves: _times(leaves, 1 / count),
  )


def _times(leaves: Leaves, factor: float) -> Leaves:
  # Else a compiler contracts this product with a sum, and in maps another one.
  narrow = lambda x: x.dtype == jnp.float32
  return [scaled(x, factor) if narrow(x) else x * factor for x in leaves]


def agree(
  wanted: Sequence[jax.Array | None], workers: Workers
) -> list[jax.Array | None]:
  """Takes the maximum of each leaf's statistics over all workers, in one message.

  A leaf whose codec has no statistics has None.
  """
  own = [x for x in wanted if x is not None]
  if not own:
    return list(wanted)
  message = jnp.concatenate([x.reshape(-1) for x in own])
  agreed = largest(message, workers.axis_name)
  # So leaves of one shape have equal programs, of which XLA compiles one.
  ends = list(itertools.accumulate(x.size for x in own))
  starts = iter(unknown([0, *ends[:-1]], agreed))
  part = functools.partial(jax.lax.dynamic_slice_in_dim, allow_negative_indices=False)
  return [
    None if x is None else part(agreed, next(starts), x.size).reshape(x.shape)
    for x in wanted
  ]


def refit(
  plan: MessagePlan,
  leaves: Sequence[jax.Array],
  memory: Sequence[Memory],
  step: jax.Array,
) -> list[Memory]:
  """Fits the leaves' shared memories to all workers, and keeps each worker's own ones.

  ``leaves`` are float32, and ``step`` is the number of the step, ``int32[]``.
  """
  if not plan.sends:
    return list(memory)
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

  old = [x.shared for x in memory]
  shared = refitted(plan.codecs, leaves, old, plan.others, step, adding)
  return [x._replace(shared=y) for x, y in zip(memory, shared, strict=True)]


Residuals = list[jax.Array | None]  # owner residuals, one for each codec


class Outcome(NamedTuple):
  """The result of :func:`average`.

  Attributes:
    mean: the mean of each leaf, float32, equal on all workers.
    unsent, chosen, sent: as in ``messages.Exchanged``; None without
      ``keep``.
    residuals: the owner residual of each codec; None where none is kept.
    own: each leaf's memory of this worker; None if it encodes sums instead of leaves.
  """

  mean: Leaves
  unsent: Leaves | None
  residuals: Sequence[jax.Array | None]
  own: list[Any] | None
  chosen: list[jax.Array | None]
  sent: Callable[[], Leaves]


def average(
  message: Message,
  leaves: Leaves,
  keys: Keys,
  workers: Workers | None,
  *,
  residuals: Residuals,
  memory: Sequence[Memory],
  step: jax.Array,
  keep: bool,
  mark: bool,
) -> Outcome:
  """Averages the leaves of a message over all workers.

  The arguments are those of ``messages.average_leaves``, for one message.
  ``residuals`` has the owner residual of each codec, ``float32[share, *tile_shape]``,
  or None. Leaves are float64 only for a plain mean.
  """
  layout = message.layout
  leaves, workers, back = as_samples(layout, leaves, workers)
  if not message.exchange.sends:  # no worker knows the memories of others
    memory = [x._replace(shared=()) for x in memory]
  if not layout.elements or not message.exchange.sends:
    workers = None
  wanted = layout.to_agree(leaves)
  own = Contribution(
    layout,
    leaves,
    keys,
    wanted if workers is None else agree(wanted, workers),
    memory,
    step,
    residuals,
    keep,
    workers is not None,
  )
  if workers is None:
    total = Local().run(own)
  else:
    total = message.exchange.run(own, workers)
  numbers = range(len(leaves))
  return Outcome(
    total.mean if workers is not None else back(total.mean),
    back(own.unsent(total)) if keep else None,
    total.residuals,
    own.remembered if total.encoded else None,
    [own.chosen(i) if total.encoded and mark else None for i in numbers],
    lambda: back(own.sent(total)),
  )
