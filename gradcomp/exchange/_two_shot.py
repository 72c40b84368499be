"""``two_shot``: reduce and broadcast. Each worker owns an Nth of the rows."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._checks import flag
from gradcomp.exchange._all_gather import gather_rows
from gradcomp.exchange._collectives import Workers, join, scatter, shares, split
from gradcomp.exchange._contribution import Contribution, Total
from gradcomp.sums import Sent, Way
from gradcomp.workers import AxisName


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoShot:
  r"""Each worker owns an Nth of the rows, adds what comes, and sends the mean to all.

  Of a codec with scales of its own, the owner decodes the rows and averages them in
  float32, adds what its last encoding :math:`Q_2` lost, and encodes again:

  .. math:: y = Q_2(\tfrac{1}{N} \sum_i Q(g_i) + r), \qquad
     r' = \tfrac{1}{N} \sum_i Q(g_i) + r - y

  Of a codec with shared statistics, it adds the codes as integers and sends the sums,
  in as many bits as they need: nothing is lost, and there is no residual. A worker
  sends ``2 (N-1)/N c`` bytes, with c the bytes of a payload, whatever N is.

  Attributes:
    feedback: whether, where workers keep residuals, owners keep r, an Nth of the
      gradient in float32. ``init`` must then know the number of workers: call it
      inside the map, or under ``jax.set_mesh(mesh)``.

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning with Low-Precision
    Communication <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, section 2.4.1
  """

  feedback: bool = True

  name: ClassVar[str] = "two_shot"
  way: ClassVar[Way] = "owned"
  owners: ClassVar[bool] = True
  of_leaves: ClassVar[bool] = True
  sends: ClassVar[bool] = True

  def __post_init__(self) -> None:
    flag("feedback", self.feedback)

  @property
  def keeps(self) -> bool:
    return self.feedback

  def check_axes(self, axis_name: AxisName | None) -> None:
    """Any will do."""

  def run(self, own: Contribution, workers: Workers) -> Total:
    return broadcast(own, reduce(own, workers), workers)


def reduce(own: Contribution, workers: Workers) -> list[Sent]:
  """The sums of the rows that this worker owns, one for each codec, to send to all."""
  lines = [shares(rows, workers) for rows in own.rows]
  received = scatter(join(lines, workers.size), workers.axis_name)
  owned = split(received, [line.shape[1:] for line in lines])
  sent = []
  for i, (total, rows) in enumerate(zip(own.sums, owned, strict=True)):
    partial = total.fold(rows, workers.scale, keep=own.keep)
    key, residual = own.keys.stages[i], own.residuals[i]
    finished = total.finish(
      partial, key, own.stage_stats(i), residual, workers.size, keep=own.keep
    )
    sent.append(finished)
  return sent


def broadcast(own: Contribution, sent: Sequence[Sent], workers: Workers) -> Total:
  """What the owners of equal shares send, at every worker."""
  gathered = gather_rows(own.layout, [x.rows for x in sent], workers)
  lost = [owned_loss(x, workers) for x in sent]
  return owned_total(own, gathered, sent, lost, workers)


def owned_total(
  own: Contribution,
  gathered: Sequence[jax.Array],
  sent: Sequence[Sent],
  lost: Sequence[jax.Array | None],
  workers: Workers,
) -> Total:
  """What N owners' rows stand for.

  Args:
    own: this worker's leaves.
    gathered: for each codec ``uint32[N, rows, words]``, a share of each owner.
    sent: what this worker sent, as one of them.
    lost: of all rows, what this worker has to keep: ``float32[rows, tile_size]``.
    workers: who exchanges.
  """
  decoders, losses = [], []
  for i, (total, rows) in enumerate(zip(own.sums, gathered, strict=True)):
    share = -(-own.layout.rows[i] // workers.size)
    value = total.value(rows, own.agreed[i], sent[i].scale, share, workers.size)
    decoders.append(value)
    gone = lost[i]
    losses.append(None if gone is None else total.loss(gone, own.agreed[i]))
  return Total(own.layout.decode(decoders), losses, [x.residual for x in sent])


def owned_loss(sent: Sent, workers: Workers) -> jax.Array | None:
  """What this worker lost of its share, among all rows."""
  return None if sent.lost is None else place(sent.lost[None], workers, workers.size)


def place(lost: jax.Array, workers: Workers, size: int) -> jax.Array:
  """The errors of shares ``(*, c)`` among all rows, which lost nothing here.

  Args:
    lost: ``float32[groups, share, width]``.
    workers: who exchanges; this one has place c in its group.
    size: workers in a group.

  Returns:
    ``float32[groups * size * share, width]``.
  """
  groups, share, width = lost.shape
  own = lax.axis_index(workers.axis_name) % size
  mine = (jnp.arange(size) == own)[None, :, None, None]
  placed = jnp.where(mine, lost[:, None], 0.0)
  return placed.reshape(groups * size * share, width)
