"""``two_shot``: reduces each share at its owner, and broadcasts the results."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.bibliography import GRUBIC_2018, Citation
from gradcomp._src.checks import flag
from gradcomp._src.codecs.sums.sum import RowDecoder, Sent, Way
from gradcomp._src.exchange.all_gather import gather_rows
from gradcomp._src.exchange.collectives import Workers, join, scatter, shares, split
from gradcomp._src.exchange.contribution import Contribution, Total
from gradcomp._src.exchange.protocol import Work
from gradcomp._src.mesh.axes import AxisName


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoShot:
  r"""Sends each share to its owner, which adds it up and sends the mean to all.

  Each worker owns an Nth of the rows. If the codec has scales of its own, the owner
  decodes the rows that it receives, and averages them in float32. It adds its owner
  residual r, the rounding error of its last encoding :math:`Q_2`, and encodes again, to
  nearest:

  .. math:: y = Q_2(\tfrac{1}{N} \sum_i Q(g_i) + r), \qquad
     r' = \tfrac{1}{N} \sum_i Q(g_i) + r - y

  If the codec has shared statistics, the owner adds the codes as integers. It sends the
  sums in as many bits as they need. Then sums are exact, and there is no owner
  residual. A worker sends ``2 (N-1)/N c`` bytes, where c is the bytes of a payload.
  That is less than two payloads for any N.

  Attributes:
    feedback: whether owners keep r, an Nth of the gradient in float32. ``init`` must
      know the number of workers for it: call it inside the map, or under
      ``jax.set_mesh(mesh)``. If it does not, that is an error if the workers keep
      residuals. Else owners keep nothing, as with False. :math:`Q_2` then rounds at
      random where the codec does, so that its errors have the mean zero, and twice the
      variance. So it does with ``QSGD(bits=1)``, which has no value near zero to round
      to; owners keep r of it only if the workers keep residuals.

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning with Low-Precision
    Communication <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, section 2.4.1
  """

  feedback: bool = True

  citations: ClassVar[tuple[Citation, ...]] = (
    Citation(
      GRUBIC_2018,
      "Owners round means to nearest and keep what that loses, unless feedback=False.",
    ),
  )
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
    """Accepts any axes."""

  def run(self, own: Contribution, workers: Workers) -> Total:
    return broadcast(own, reduce(own, workers), workers)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    share = Fraction(1, math.prod(sizes))
    return Work(encoded=1 + share, decoded=Fraction(1), added=Fraction(1))


def reduce(own: Contribution, workers: Workers) -> list[Sent]:
  """Adds the rows that this worker owns, and encodes the sum of each codec for all."""
  sent = []
  owned = owned_rows(own, workers)
  for i, (total, rows) in enumerate(zip(own.sums, owned, strict=True)):
    partial = total.fold(rows, workers.scale, keep=own.keep)
    finished = total.finish(
      partial, own.of_whole(i), own.residuals[i], workers.size, keep=own.keep
    )
    sent.append(finished)
  return sent


def owned_rows(own: Contribution, workers: Workers) -> list[jax.Array]:
  """Receives this worker's share of all workers' rows, ``uint32[N, share, words]``."""
  lines = [shares(rows, workers) for rows in own.rows]
  received = scatter(join(lines, workers.size), workers.axis_name)
  return split(received, [line.shape[1:] for line in lines])


def broadcast(own: Contribution, sent: Sequence[Sent], workers: Workers) -> Total:
  """Sends the encoded sums of all owners to every worker, and decodes them."""
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
  """Decodes the sums of N owners.

  Args:
    own: the leaves of this worker.
    gathered: the shares of all owners, ``uint32[N, rows, words]`` for each codec.
    sent: this worker's encoded sum of each codec.
    lost: the rounding errors for this worker's residual, ``float32[rows, *tile_shape]``
      for each codec, or None.
    workers: the workers that exchange.
  """
  agreed_rows = own.agreed_rows

  def decoders() -> list[RowDecoder]:
    shares = [-(-rows // workers.size) for rows in own.layout.rows]
    return [
      total.value(rows, agreed, one.scale, share, workers.size)
      for total, rows, agreed, one, share in zip(
        own.sums, gathered, agreed_rows, sent, shares, strict=True
      )
    ]

  losses = [
    None if gone is None else total.loss(gone, agreed)
    for total, gone, agreed in zip(own.sums, lost, agreed_rows, strict=True)
  ]
  means = own.means(decoders, gathered[0])
  return Total(means, losses, [x.residual for x in sent])


def owned_loss(sent: Sent, workers: Workers) -> jax.Array | None:
  """Returns the rounding errors of this worker's share, with zeros in other rows."""
  return None if sent.lost is None else place(sent.lost[None], workers, workers.size)


def place(lost: jax.Array, workers: Workers, size: int) -> jax.Array:
  """Places the errors of shares ``(*, c)``, c this worker's place, among zeros.

  ``lost`` is ``float32[groups, share, ...]``, and the result ``float32[groups * size *
  share, ...]``, with ``size`` workers in a group.
  """
  groups, share, *tile = lost.shape
  own = lax.axis_index(workers.axis_name) % size
  mine = jnp.arange(size) == own
  placed = jnp.where(mine.reshape(-1, *[1] * (1 + len(tile))), lost[:, None], 0.0)
  return placed.reshape(groups * size * share, *tile)
