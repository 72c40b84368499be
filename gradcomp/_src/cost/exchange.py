"""The seconds of exchanges and of train steps: overlap and crossovers."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gradcomp._src.checks import instance_of
from gradcomp._src.cost.link import Cluster, CodecSpeed, collective_seconds
from gradcomp._src.cost.rules import at_least_0
from gradcomp._src.exchange.protocol import Work
from gradcomp._src.report.collectives import Collective, plain_bytes
from gradcomp._src.report.explain import Explanation

Speeds = CodecSpeed | Callable[[Any], CodecSpeed]  # of every codec, or for each
# The codec, elements and work of each leaf, and whether workers keep its residual.
Leaves = Sequence[tuple[Any, int, Work, bool]]

NO_WORK = CodecSpeed(encode=0.0, decode=0.0, add=0.0)


class Breakdown(NamedTuple):
  """The seconds of an exchange: to encode, on the wire, to add, and to decode."""

  encode: float = 0.0  # and to compute the loss of encoding where workers keep it
  wire: tuple[tuple[str, float, float], ...] = ()  # (collective, bytes sent, seconds)
  add: float = 0.0  # of payloads that are decoded, or of plain numbers by themselves
  decode: float = 0.0  # of sums

  @property
  def wire_seconds(self) -> float:
    """The seconds of all collectives."""
    return sum(seconds for _, _, seconds in self.wire)

  @property
  def bytes_sent(self) -> float:
    """The bytes that a worker sends."""
    return sum(nbytes for _, nbytes, _ in self.wire)

  @property
  def codec_seconds(self) -> float:
    """The seconds in which a worker encodes, adds and decodes."""
    return self.encode + self.add + self.decode

  @property
  def total(self) -> float:
    """All seconds, one after the other."""
    return self.codec_seconds + self.wire_seconds


def exchange_seconds(
  explanation: Explanation, cluster: Cluster, speeds: Speeds
) -> Breakdown:
  """Returns the predicted seconds of each part, from the gradients to their means.

  Each collective takes the seconds of its ring; see :class:`Link`. A worker computes
  before and after its collectives, not meanwhile.

  Args:
    explanation: the exchange, from :func:`gradcomp.explain`.
    cluster: the workers, as many as in the explanation.
    speeds: the speeds of all codecs, or a function from the codec of a leaf to its
      speeds. Leaves that the backend adds as they are need none.

  Raises:
    ValueError: the numbers of workers differ.

  Example:
    >>> link = Link(latency=50e-6, bytes_per_second=125e6)
    >>> speed = CodecSpeed(encode=0.4e-9, decode=0.2e-9, add=0.05e-9)
    >>> params = {"w": jnp.zeros((4096, 4096))}
    >>> optimizer = gradcomp.qsgd(bits=4, axis_name="data")
    >>> explanation = gradcomp.explain(optimizer, params, workers=4)
    >>> cost = exchange_seconds(explanation, Cluster(workers=4, link=link), speed)
    >>> [(name, f"{nbytes:,.0f}", f"{s:.4f}") for name, nbytes, s in cost.wire]
    [('all_to_all', '6,389,760', '0.0513'), ('all_gather', '6,389,760', '0.0513')]
    >>> f"{cost.encode:.4f} + {cost.add:.4f} + {cost.decode:.4f}, {cost.total:.4f}"
    '0.0084 + 0.0008 + 0.0034, 0.1151'
  """
  instance_of("cluster", Cluster, cluster)
  if explanation.workers != cluster.workers:
    raise ValueError(
      f"`cluster` must have the {explanation.workers} workers of the explanation, got "
      f"{cluster.workers}."
    )
  leaves = [(x.codec, x.elements, x.work, x.keeps) for x in explanation.leaves]
  return seconds(leaves, explanation.collectives, speeds, cluster)


def message_seconds(
  explanation: Explanation, cluster: Cluster, speeds: Speeds
) -> tuple[Breakdown, ...]:
  """Returns the predicted seconds of each message by itself.

  A leaf that travels in several messages is encoded for the last one of them.

  Args:
    explanation, cluster, speeds: as for :func:`exchange_seconds`.

  Raises:
    ValueError: the numbers of workers differ.
  """
  leaves, sent = explanation.leaves, explanation.collectives
  own = lambda part, i: tuple(x for x in part if x.message == i)
  of: Any = lambda i: {"leaves": own(leaves, i), "collectives": own(sent, i)}
  numbers = sorted({*(x.message for x in leaves), *(x.message for x in sent)})
  each = (dataclasses.replace(explanation, **of(i)) for i in numbers)
  return tuple(exchange_seconds(one, cluster, speeds) for one in each)


def dense_seconds(elements: float, cluster: Cluster) -> Breakdown:
  """Returns the seconds of a plain mean in float32: one all-reduce of all elements.

  Args:
    elements: the number of elements of the gradients.
    cluster: the workers.

  Raises:
    ValueError: ``elements`` is below 0.
  """
  workers = instance_of("cluster", Cluster, cluster).workers
  elements = at_least_0("elements", elements)
  where: Any = {"link": cluster.link, "add": elements * cluster.add}
  took = collective_seconds("all_reduce", 4 * elements, workers, **where)
  sent = float(plain_bytes(elements, workers))
  return Breakdown(wire=(("all_reduce", sent, took),))


def seconds(
  leaves: Leaves, collectives: Sequence[Collective], speeds: Speeds, cluster: Cluster
) -> Breakdown:
  """Predicts the seconds of the leaves and the collectives of a step."""
  encode = decode = add = 0.0
  for codec, size, work, keeps in (x for x in leaves if any(x[2])):
    speed = speeds if isinstance(speeds, CodecSpeed) else speeds(codec)
    keep = speed.keep if keeps else 0.0
    encode += size * float(work.encoded) * (speed.encode + keep)
    decode += size * float(work.decoded) * speed.decode
    add += size * (float(work.added) * speed.add + float(work.summed) * cluster.add)
  wire = []
  for x in collectives:
    name: Any = x.kind.replace("collective-", "p").replace("-", "_")
    link, adding = cluster.link_within(x.span), cluster.add * x.elements
    took = collective_seconds(name, x.bytes_in, x.workers, link, add=adding)
    wire.append((name, float(x.times * x.exact_bytes_sent), x.times * took))
  return Breakdown(encode=encode, wire=tuple(wire), add=add, decode=decode)


def step_seconds(
  forward: float,
  backward: float,
  messages: Sequence[tuple[float, Breakdown]],
  overlap: bool,
) -> float:
  r"""Returns the predicted seconds of a train step.

  Without overlap these are the sum of all. With it, message i may leave when a share
  :math:`s_i` of the backward pass is done. The seconds of its codec, :math:`q_i`, stall
  the passes, and :math:`w_i` on the wire do not. One message follows the other:

  .. math:: r_i = \text{forward} + s_i \, \text{backward} + \sum_{j \le i} q_j, \qquad
     t_i = \max(t_{i-1}, r_i) + w_i

  The step takes the longer of the last message and of all that the worker computes.

  Args:
    forward, backward: the seconds of each pass.
    messages: the share and the cost of each message, in the order in which they leave.
    overlap: whether messages travel while the backward pass goes on.

  Raises:
    ValueError: seconds are below 0, or a share is not between the last one and 1.

  Example:
    >>> link = Link(latency=0.0, bytes_per_second=1.0)
    >>> cost = dense_seconds(1, Cluster(workers=8, link=link))  # 7 s on the wire
    >>> step_seconds(2.0, 4.0, [(0.5, cost), (1.0, cost)], overlap=False)
    20.0
    >>> step_seconds(2.0, 4.0, [(0.5, cost), (1.0, cost)], overlap=True)
    18.0
  """
  compute = at_least_0("forward", forward) + at_least_0("backward", backward)
  shares = [0.0, *(share for share, _ in messages), 1.0]
  if not all(a <= b for a, b in itertools.pairwise(shares)):
    raise ValueError(
      f"`messages` must have rising shares from 0 to 1, got {shares[1:-1]}."
    )
  if not overlap:
    return compute + sum(cost.total for _, cost in messages)
  codec = sent = 0.0
  for share, cost in messages:
    codec += cost.codec_seconds
    sent = max(sent, forward + share * backward + codec) + cost.wire_seconds
  return max(compute + codec, sent)


def crossover_rate(explanation: Explanation, cluster: Cluster, speeds: Speeds) -> float:
  """Returns the bytes per second of ``cluster.link`` above which a plain mean wins.

  It is infinity if the exchange wins at high rates, too, and 0 if it wins at no rate.
  The seconds of both are ``a + b / rate``. Without latencies and factors the rate is
  the bytes that the exchange saves, over the seconds of its codec.

  Args:
    explanation, cluster, speeds: as for :func:`exchange_seconds`; no rate matters.

  Raises:
    ValueError: as for :func:`exchange_seconds`.
  """
  return rate_without_gain(lambda at: _gain(explanation, at, speeds), cluster)


def rate_without_gain(gain: Callable[[Cluster], float], cluster: Cluster) -> float:
  """Returns the rate of ``cluster.link`` at which a gain in seconds is 0."""
  link = cluster.link
  faster = dataclasses.replace(link, bytes_per_second=2 * link.bytes_per_second)
  gains = [gain(dataclasses.replace(cluster, link=each)) for each in (link, faster)]
  by_rate = 2 * (gains[0] - gains[1])  # what doubling the rate halves
  fixed = gains[0] - by_rate
  if fixed > 0 or fixed == 0 < by_rate:
    return math.inf
  return link.bytes_per_second * max(0.0, by_rate) / -fixed if fixed else 0.0


def crossover_workers(
  explanations: Sequence[Explanation], cluster: Cluster, speeds: Speeds
) -> int | None:
  """Returns the least number of workers for which a plain mean is as fast, or None.

  Args:
    explanations: the exchange with several numbers of workers, the least first.
    cluster: the links; its number of workers does not matter.
    speeds: as for :func:`exchange_seconds`.
  """
  sized = lambda x: dataclasses.replace(cluster, workers=x.workers)
  slower = (x for x in explanations if _gain(x, sized(x), speeds) <= 0)
  return next((x.workers for x in slower), None)


def _gain(explanation: Explanation, cluster: Cluster, speeds: Speeds) -> float:
  """Returns the seconds that an exchange saves, compared with a plain mean."""
  elements = sum(leaf.elements for leaf in explanation.leaves)
  dense = dense_seconds(elements, cluster).total
  return dense - exchange_seconds(explanation, cluster, speeds).total
