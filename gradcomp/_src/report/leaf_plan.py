"""``LeafPlan``: the codec, exchange and bytes of one leaf, a row of ``explain``."""

import dataclasses
import math
from fractions import Fraction

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.exchange.work import Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafPlan:
  """The codec, exchange and bytes of one leaf.

  Attributes:
    path: the path of the leaf in the parameters.
    shape: the shape of the leaf.
    codec: the codec that encodes it.
    bits: the bits on the wire for each of its elements, in one payload.
    exchange: the exchange that its message takes.
    message: the number of the message that it shares with other leaves.
    bytes_sent: the bytes that a worker sends for it in a step, and receives. They are
      fractional, because leaves share rows that fill up a message.
    rule: the rule of a policy that chose the codec; "" without one.
    reason: the reason for the exchange: it was asked for, or ``"auto"`` took it.
    slots: entries that a sparse message of the leaf has room for; None for a dense one.
    used: the entries that a worker filled in the last step, a mean over the workers;
      None if that is unknown.
    work: the work of a worker for it, as parts of its elements.
    keeps: whether workers keep a residual.
    every: n, if one of n steps sends it: see :func:`gradcomp.local.local_steps`.
  """

  path: str
  shape: tuple[int, ...]
  codec: LeafCodec
  bits: Fraction
  exchange: str
  message: int
  bytes_sent: Fraction
  reason: str
  rule: str = ""
  slots: int | None = None
  used: float | None = None
  work: Work = Work()
  keeps: bool = False
  every: int = 1

  @property
  def elements(self) -> int:
    """The number of elements of the leaf."""
    return math.prod(self.shape)
