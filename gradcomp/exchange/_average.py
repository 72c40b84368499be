"""One message: encode, exchange, decode, and what was lost on the way."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp.exchange._collectives import Workers, largest, split
from gradcomp.exchange._contribution import Contribution, Keys, Leaves
from gradcomp.exchange._local import Local
from gradcomp.exchange._plan import Message

Residuals = list[jax.Array | None]  # of the second stage, one for each codec


class Outcome(NamedTuple):
  """What :func:`average` returns.

  Attributes:
    mean: float32 leaves, equal on all workers.
    unsent: what this worker did not send, in the units of the leaves; None where nobody
      asked.
    residuals: what the owners' encodings lost.
    sent: this worker's own rows for each codec; None where it does not encode leaves.
  """

  mean: Leaves
  unsent: Leaves | None
  residuals: Sequence[jax.Array | None]
  sent: list[jax.Array] | None = None


def average(
  message: Message,
  leaves: Leaves,
  keys: Keys | None,
  workers: Workers | None,
  *,
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
    residuals: of the second stage, ``float32[share, tile_size]`` for each codec; None
      where none is kept.
    memory: of the codec that has one, equal on all workers.
    thresholds: for each leaf those that its codec uses again, this worker's own; None
      where there are none.
    keep: whether to return what was not sent.
  """
  layout = message.layout
  if not layout.elements or not message.exchange.sends:
    workers = None
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
  if workers is None:
    total = Local().run(own)
  else:
    total = message.exchange.run(own, workers)
  return Outcome(
    total.mean,
    own.unsent(total) if keep else None,
    total.residuals,
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
