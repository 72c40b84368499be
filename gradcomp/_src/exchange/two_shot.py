"""``two_shot``: reduces each share at its owner, and broadcasts the results."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

from jax import lax

from gradcomp._src import checks
from gradcomp._src.bibliography import GRUBIC_2018, Citation
from gradcomp._src.codecs.sums.sum import RowDecoder, Sent, Way
from gradcomp._src.exchange import collectives, lines, shares
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.exchange.in_turn import in_turn
from gradcomp._src.exchange.protocol import Outgoing, Received, StageRun, Work
from gradcomp._src.mesh.axes import AxisName


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoShot(checks.Checked):
  r"""Sends each share to its owner, which adds it up and sends the mean to all.

  Each worker owns an Nth of the rows. If the codec has scales of its own, the owner
  averages the rows that it receives in float32. It adds its owner residual r, the
  rounding error of its last encoding :math:`Q_2`, and encodes again, to nearest:

  .. math:: y = Q_2(\tfrac{1}{N} \sum_i Q(g_i) + r), \qquad
     r' = \tfrac{1}{N} \sum_i Q(g_i) + r - y

  If the codec has shared statistics, the owner adds the codes as integers, and sends
  the sums in as many bits as they need. They are exact, without an owner residual. A
  worker sends ``2 (N-1)/N c`` bytes, where c is the bytes of a payload.

  Attributes:
    feedback: whether owners keep r, an Nth of the gradient in float32. ``init`` must
      know the number of workers for it: call it inside the map, under
      ``jax.set_mesh(mesh)``, or with parameters on the mesh. If it does not, ``update``
      raises an error if the workers keep residuals, and warns if they keep none. Then
      owners keep nothing, as with False: :math:`Q_2` rounds at
      random where the codec does, with the mean zero and twice the variance. It always
      does so with ``QSGD(bits=1)``, which has no value near zero to round to; owners
      keep r of it only if the workers keep residuals.

    in_turn: whether a message is encoded when the one before it has come. On one slice
      of TPUs whose all-to-alls are asynchronous by a flag, each but the last then spans
      a product of the backward pass. Else XLA puts encoders behind the backward pass,
      and hides all but the first message beside these. Between slices messages go side
      by side without it, and none spans a product with it. The bits are the same.

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning with Low-Precision
    Communication <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, section 2.4.1
  """

  feedback: bool = checks.field(True, checks.FLAG)
  in_turn: bool = checks.field(False, checks.FLAG)

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

  @property
  def keeps(self) -> bool:
    return self.feedback

  def check_axes(self, axis_name: AxisName | None) -> None:
    """Accepts any axes."""

  @property
  def stages(self) -> tuple[StageRun, ...]:
    """To add the rows that a worker owns, and to send the sums to all."""
    return self._reduce, self._broadcast

  def run(self, own: Outgoing, workers: Workers) -> Received:
    return self._broadcast(own, workers, self._reduce(own, workers, None))

  def _reduce(self, own: Outgoing, workers: Workers, _: None) -> list[Sent]:
    scales = [workers.scale] * len(own.parts)
    return shares.finish_shares(own, shares.scatter_rows(own, workers), scales, workers)

  def _broadcast(
    self, own: Outgoing, workers: Workers, sent: Sequence[Sent]
  ) -> Received:
    rows = in_turn([x.rows for x in sent], own.before)
    line = shares.gather_line(own.layout, rows, workers)
    gathered = lines.split(line, [x.shape for x in rows])
    lost = [shares.owned_loss(x, workers) for x in sent]
    total = shares.owned_total(own, sent, lost, gathered, workers)
    return total._replace(line=line)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    share = Fraction(1, math.prod(sizes))
    return Work(encoded=1 + share, decoded=Fraction(1), added=Fraction(1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceScatter(TwoShot):
  """The first half of :class:`TwoShot`, for ZeRO: means stay with their owners."""

  feedback: bool = False

  @property
  def stages(self) -> tuple[StageRun, ...]:
    """To add the rows that a worker owns."""
    return (lambda own, workers, _: self.run(own, workers),)

  def run(self, own: Outgoing, workers: Workers) -> Received:
    split = functools.partial(shares.leaf_shares, own.layout, workers=workers)
    parts = [split(i, rows) for i, rows in enumerate(own.parts)]
    received = collectives.scatter(lines.join(parts), workers.axis_name)
    owned = lines.split(received, [part.shape[1:] for part in parts])

    def decoders() -> dict[int, RowDecoder]:
      number, found = lax.axis_index(workers.axis_name), {}
      for i, (total, agreed) in enumerate(
        zip(own.layout.sums, own.agreed, strict=True)
      ):
        mine = agreed
        if agreed is not None:
          mine = lax.dynamic_index_in_dim(split(i, agreed), number, keepdims=False)
        found[i] = total.gathered(owned[i], mine, workers.scale)
      return found

    return Received(owned, decoders, to_all=False)
