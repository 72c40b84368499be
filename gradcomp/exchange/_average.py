"""One message: encode, exchange, decode, and what was lost on the way."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from gradcomp.codecs import Memory
from gradcomp.exchange._agree import largest_stats
from gradcomp.exchange._collectives import Workers
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
    own: of each leaf what this worker remembers for itself; None where it does not
      encode leaves.
    chosen: of each leaf where this worker sends something, flat; None for everywhere,
      or where nobody asked.
  """

  mean: Leaves
  unsent: Leaves | None
  residuals: Sequence[jax.Array | None]
  own: list[Any] | None
  chosen: list[jax.Array | None]


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
  """The mean of all workers' leaves, and what was lost.

  Args:
    message: the plan.
    leaves: float32 arrays; float64 ones only for a plain mean.
    keys: for stochastic rounding.
    workers: who exchanges; None to exchange nothing.
    residuals: of the second stage, ``float32[share, tile_size]`` for each codec; None
      where none is kept.
    memory: what the codec of each leaf remembers.
    step: ``int32[]``.
    keep: whether to return what was not sent.
    mark: whether to return where something was sent.
  """
  layout = message.layout
  if not message.exchange.sends:  # then no worker knows what the others remember
    memory = [x._replace(shared=()) for x in memory]
  if not layout.elements or not message.exchange.sends:
    workers = None
  stats = layout.stats(leaves)
  own = Contribution(
    layout,
    leaves,
    keys,
    stats if workers is None else largest_stats(stats, workers),
    memory,
    step,
    residuals,
    keep,
  )
  if workers is None:
    total = Local().run(own)
  else:
    total = message.exchange.run(own, workers)
  numbers = range(len(leaves))
  return Outcome(
    total.mean,
    own.unsent(total) if keep else None,
    total.residuals,
    own.remembered if total.encoded else None,
    [own.chosen(i) if total.encoded and mark else None for i in numbers],
  )
