"""The exchange of one message: agrees, encodes, exchanges and decodes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from gradcomp.codecs import Memory
from gradcomp.exchange._addends import as_samples
from gradcomp.exchange._agree import agree
from gradcomp.exchange._collectives import Workers
from gradcomp.exchange._contribution import Contribution, Leaves
from gradcomp.exchange._keys import Keys
from gradcomp.exchange._local import Local
from gradcomp.exchange._plan import Message

Residuals = list[jax.Array | None]  # owner residuals, one for each codec


class Outcome(NamedTuple):
  """The result of :func:`average`.

  Attributes:
    mean: the mean of each leaf, float32, equal on all workers.
    unsent: the unsent part of each leaf, in the units of the leaf; None without
      ``keep``.
    residuals: the owner residual of each codec; None where none is kept.
    own: each leaf's memory of this worker; None if it encodes sums instead of leaves.
    chosen: for each leaf, the flat positions of the elements that this worker sends;
      None if it sends all of them, or without ``mark``.
    sent: decodes this worker's payload of each leaf.
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

  Args:
    message: the layout of the leaves, and their exchange.
    leaves: float32 arrays; float64 ones only for a plain mean.
    keys: the keys of this worker and step.
    workers: the workers that exchange; None to exchange nothing.
    residuals: the owner residual of each codec, ``float32[share, *tile_shape]``; None
      where none is kept.
    memory: the memory of each leaf.
    step: the number of the step, ``int32[]``.
    keep: whether to return the unsent parts.
    mark: whether to return the positions of the sent elements.
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
