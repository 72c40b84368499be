"""Reduce-scatter of gradients and all-gather of updates: two_shot's halves, for ZeRO.

Between them the owner updates its rows, instead of encoding the mean a second time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax import lax

from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.codecs.tiles import elements
from gradcomp._src.exchange.all_gather import gather_rows
from gradcomp._src.exchange.average import Samples, agree, as_samples, refit
from gradcomp._src.exchange.collectives import Workers, shares
from gradcomp._src.exchange.contribution import Contribution, Leaves, Total
from gradcomp._src.exchange.keys import Keys
from gradcomp._src.exchange.notes import note, noted
from gradcomp._src.exchange.plan import Message, MessagePlan
from gradcomp._src.exchange.two_shot import owned_rows


class OwnedMeans(NamedTuple):
  """The result of :func:`average_owned`.

  Attributes:
    means: for each message the means of the rows that this worker owns, one array for
      each codec, ``float32[share, *tile_shape]``.
    unsent, memory, sent: as in ``messages.Exchanged``.
  """

  means: list[list[jax.Array]]
  unsent: list[jax.Array]
  memory: list[Memory]
  sent: Callable[[], list[jax.Array]]


def average_owned(
  plan: MessagePlan,
  leaves: Sequence[jax.Array],
  keys: Keys,
  workers: Workers,
  *,
  memory: Sequence[Memory],
  step: jax.Array,
  keep: bool,
) -> OwnedMeans:
  """Reduce-scatters leaves: averages each row at the worker that owns it.

  The arguments are those of ``messages.average_leaves``. The plan has one
  round.
  """
  note(plan, step)
  memory = refit(plan, leaves, memory, step)
  means: list[list[jax.Array]] = []
  unsent: dict[int, jax.Array] = {}
  kept = {i: x.own for i, x in enumerate(memory)}
  contributions: list[tuple[Sequence[int], Callable[[], Leaves]]] = []
  for message in plan.messages:
    layout, numbers = message.layout, message.leaves
    given = as_samples(layout, [leaves[i] for i in numbers], workers)
    with jax.named_scope("gradcomp_reduce_scatter"), noted(message):
      own = Contribution(
        layout,
        given.leaves,
        Keys([keys.leaves[i] for i in numbers], [None] * len(layout.codecs)),
        agree(layout.to_agree(given.leaves), workers),
        [memory[i] for i in numbers],
        step,
        [None] * len(layout.codecs),
        keep,
        True,
      )
      means.append(_means(own, given.workers or workers))
    total = Total([], own.nothing, own.nothing)
    if keep:
      unsent |= zip(numbers, given.back(own.unsent(total)), strict=True)
    kept |= zip(numbers, own.remembered, strict=True)
    contributions.append((numbers, functools.partial(_sent, own, total, given)))
  count = range(len(leaves))

  def sent() -> list[jax.Array]:
    found: dict[int, jax.Array] = {}
    for numbers, own_sent in contributions:
      found |= zip(numbers, own_sent(), strict=True)
    return [found[i] for i in count]

  return OwnedMeans(
    means,
    [unsent[i] for i in count if keep],
    [Memory(memory[i].shared, kept[i]) for i in count],
    sent,
  )


def _sent(own: Contribution, total: Total, given: Samples) -> Leaves:
  return given.back(own.sent(total))


def _means(own: Contribution, workers: Workers) -> list[jax.Array]:
  """Reduce-scatters rows, and returns the elements of the means."""
  owned = owned_rows(own, workers)
  parts = zip(own.sums, own.layout.codecs, owned, own.agreed_rows, strict=True)
  means = []
  for total, codec, rows, agreed in parts:
    lines_agreed = None if agreed is None else own_share(agreed, workers)
    with jax.named_scope("gradcomp_decode"):
      tiles = total.gathered(rows, lines_agreed, workers.scale)(0, rows.shape[1])
      means.append(elements(tiles, codec))
  return means


def gather_owned(
  message: Message, matrices: Sequence[jax.Array], workers: Workers
) -> list[jax.Array]:
  """All-gathers each owner's encoded rows, ``uint32[N, rows, words]`` a codec."""
  with jax.named_scope("gradcomp_all_gather"), noted(message):
    return gather_rows(message.layout, matrices, workers)


def own_share(rows: jax.Array, workers: Workers) -> jax.Array:
  """Returns the rows that this worker owns: ``[rows, ...]`` to ``[share, ...]``."""
  number = lax.axis_index(workers.axis_name)
  return lax.dynamic_index_in_dim(shares(rows, workers), number, keepdims=False)
