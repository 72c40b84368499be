"""The exchange of one message: agrees, encodes, exchanges and decodes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from gradcomp._src.codecs.memory import Memory
from gradcomp._src.exchange.addends import as_samples
from gradcomp._src.exchange.agree import agree
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.exchange.contribution import Contribution, Leaves
from gradcomp._src.exchange.keys import Keys
from gradcomp._src.exchange.local import Local
from gradcomp._src.exchange.plan import Message

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
