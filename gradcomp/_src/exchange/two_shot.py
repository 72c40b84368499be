"""``two_shot``: reduces each share at its owner, and broadcasts the results."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src import checks
from gradcomp._src.codecs.sums.sum import RowDecoder, Sent, Way
from gradcomp._src.exchange import collectives, lines, protocol


def _reduce(own: protocol.Sending, _: None) -> list[Sent]:
  """Adds the rows that a worker owns."""
  send = functools.partial(collectives.scatter, axis_name=own.workers.axis_name)
  rows = protocol.exchanged([lines.shares(x, own.workers) for x in own.parts], send)
  return protocol.finish_shares(own, rows, [own.workers.scale] * len(rows))


def _broadcast(own: protocol.Sending, sent: Sequence[Sent]) -> protocol.Received:
  """Sends the sums to all."""
  workers = own.workers
  rows = collectives.in_turn([x.rows for x in sent], own.before)
  gathered, line = protocol.gather_rows(own.layout, rows, workers)
  place = lambda lost: lines.place(lost[None], workers, workers.size)
  lost = [None if x.lost is None else place(x.lost) for x in sent]
  owned = {i: x.lost for i, x in enumerate(sent) if x.lost is not None}
  total = protocol.owned_total(own, sent, lost, gathered)
  return total._replace(line=line, owned=owned)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoShot(protocol.Exchange, checks.Checked):
  r"""Sends each share to its owner, which adds it up and sends the mean to all.

  Each worker owns an Nth of the rows. If the codec has its own scales, the owner
  averages the received rows in float32. It adds its owner residual r, the rounding
  error of its last encoding :math:`Q_2`, and encodes again, to nearest:

  .. math:: y = Q_2(\tfrac{1}{N} \sum_i Q(g_i) + r), \qquad
     r' = \tfrac{1}{N} \sum_i Q(g_i) + r - y

  If the codec shares its statistics, the owner adds the codes as integers, and sends
  the sums in as many bits as they need: exact, without an owner residual. A worker
  sends ``2 (N-1)/N c`` bytes, where c is the bytes of a payload.

  Attributes:
    feedback: whether owners keep r, an Nth of the gradient in float32. ``init`` must
      then know the number of workers: call it inside the map, under
      ``jax.set_mesh(mesh)``, or with parameters on the mesh. If it does not, ``update``
      raises an error if the workers keep residuals, and else warns. Owners then keep
      nothing, as with False: :math:`Q_2` rounds at random where the codec does,
      unbiased with twice the variance. ``QSGD(bits=1)`` always rounds at random,
      because it has no value near zero; its owners keep r only if the workers keep
      residuals.
    in_turn: whether a message is encoded after the one before it has come. On one slice
      of TPUs with asynchronous all-to-alls (a flag), each message but the last then
      spans a product of the backward pass. Else XLA puts encoders after the backward
      pass, and hides all but the first message beside these. Between slices messages go
      side by side without it, and none spans a product with it. The bits are the same.

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning
    <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, section 2.4.1
  """

  feedback: bool = checks.field(True, checks.FLAG)
  in_turn: bool = checks.field(False, checks.FLAG)

  papers: ClassVar[tuple[str, ...]] = ("grubic2018synchronous",)
  name: ClassVar[str] = "two_shot"
  way: ClassVar[Way] = "owned"
  owners: ClassVar[bool] = True
  stages: ClassVar[tuple[protocol.Stage, ...]] = (_reduce, _broadcast)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> protocol.Work:
    share = Fraction(1, math.prod(sizes))
    return protocol.Work(encoded=1 + share, decoded=Fraction(1), added=Fraction(1))


def _to_owners(own: protocol.Sending, _: None) -> protocol.Received:
  """Sends the rows of each leaf to their owners, which add them."""
  layout, workers = own.layout, own.workers

  def split(group: int, rows: jax.Array) -> jax.Array:
    """Splits the rows of each leaf in a matrix into shares, ``[N, shares, ...]``."""
    leaves = [lax.slice_in_dim(rows, *x[1:]) for x in layout.slots if x.group == group]
    return jnp.concatenate([lines.shares(x, workers) for x in leaves], axis=1)

  send = functools.partial(collectives.scatter, axis_name=workers.axis_name)
  shares = [split(i, rows) for i, rows in enumerate(own.parts)]
  owned = protocol.exchanged(shares, send)

  def decoders() -> dict[int, RowDecoder]:
    number, found = lax.axis_index(workers.axis_name), {}
    for i, (total, agreed) in enumerate(zip(layout.sums, own.agreed, strict=True)):
      mine = agreed
      if agreed is not None:
        mine = lax.dynamic_index_in_dim(split(i, agreed), number, keepdims=False)
      found[i] = total.gathered(owned[i], mine, workers.scale)
    return found

  return protocol.Received(owned, decoders, to_all=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceScatter(TwoShot):
  """The first half of :class:`TwoShot`, for ZeRO: means stay with their owners."""

  feedback: bool = False
  stages: ClassVar[tuple[protocol.Stage, ...]] = (_to_owners,)
