"""One message: encode, exchange, decode, and what was lost on the way."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp.exchange._all_gather import all_gather
from gradcomp.exchange._all_reduce import all_reduce, all_reduce_plain
from gradcomp.exchange._collectives import Workers, largest, split
from gradcomp.exchange._contribution import Contribution, Keys, Leaves, Total
from gradcomp.exchange._hierarchical import hierarchical
from gradcomp.exchange._plan import Message
from gradcomp.exchange._ring import ring
from gradcomp.exchange._two_shot import two_shot

Residuals = list[jax.Array | None]  # of the second stage, one for each codec


class Outcome(NamedTuple):
  """What :func:`average` returns.

  Attributes:
    mean: float32 leaves, equal on all workers.
    unsent: what this worker did not send, in the units of the leaves; None for a plain
      mean, which loses nothing, and where nobody asked.
    residuals: what the owners' encodings lost.
    sent: this worker's own rows for each codec; None where it does not encode leaves.
  """

  mean: Leaves
  unsent: Leaves | None
  residuals: Residuals
  sent: list[jax.Array] | None = None


def average(
  message: Message,
  leaves: Leaves,
  keys: Keys | None,
  workers: Workers | None,
  *,
  group_size: int | None,
  residuals: Residuals,
  memory: jax.Array | None,
  thresholds: Sequence[jax.Array | None],
  keep: bool,
) -> Outcome:
  """The mean of all workers' leaves, and what was lost.

  Args:
    message: the plan.
    leaves: float32 arrays; float64 ones only for a plain mean.
    keys: for stochastic rounding, or None.
    workers: who exchanges; None to exchange nothing.
    group_size: for ``hierarchical`` over one axis.
    residuals: of the second stage, ``float32[share, tile_size]`` for each codec; None
      where none is kept.
    memory: of the codec that has one, equal on all workers.
    thresholds: for each leaf those that its codec uses again, this worker's own; None
      where there are none.
    keep: whether to return what was not sent.
  """
  layout = message.layout
  if not layout.elements or message.exchange == "local":
    workers = None
  if message.exchange == "local" and any(c.fitted for c in layout.codecs):
    memory = None  # nobody agrees on levels
  stats = layout.stats(leaves)
  own = Contribution(
    layout,
    leaves,
    keys,
    stats if workers is None else _shared(stats, workers),
    memory,
    thresholds,
    residuals,
    keep,
  )
  plain = all(total.plain for total in own.sums)
  if workers is None:
    if plain:
      return Outcome(leaves, None, residuals)
    sent = layout.decode(own.decoders)
    nothing: list[None] = [None] * len(own.sums)
    unsent = own.unsent(Total(own.decoders, nothing, residuals), sent) if keep else None
    return Outcome(sent, unsent, residuals, own.rows)
  if plain and message.exchange == "psum":
    return Outcome(all_reduce_plain(leaves, workers), None, residuals)
  if message.exchange == "all_gather":
    total = all_gather(own, workers)
  elif message.exchange == "two_shot":
    total = two_shot(own, workers)
  elif message.exchange == "ring":
    total = ring(own, workers)
  elif message.exchange == "hierarchical":
    total = hierarchical(own, workers, group_size)
  else:
    total = all_reduce(own, workers)
  return Outcome(
    layout.decode(total.decoders),
    own.unsent(total) if keep else None,
    list(total.residuals),
    own.rows if total.encoded else None,
  )


def _shared(
  stats: Sequence[jax.Array | None], workers: Workers
) -> list[jax.Array | None]:
  """The largest statistics of all workers, in one message."""
  own = [x for x in stats if x is not None]
  if not own:
    return list(stats)
  message = jnp.concatenate([x.reshape(-1) for x in own])
  agreed = iter(
    split(largest(message, workers.axis_name)[None], [x.shape for x in own])
  )
  return [None if x is None else next(agreed)[0] for x in stats]
