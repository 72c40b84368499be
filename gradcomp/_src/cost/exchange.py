"""The seconds of an exchange, predicted from the collectives in its explanation."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gradcomp._src.cost import collectives as rings
from gradcomp._src.cost.cluster import Cluster, CodecSpeed
from gradcomp._src.cost.rules import at_least_0, instance_of
from gradcomp._src.report.collectives import SHARE_SENT, Collective

if TYPE_CHECKING:  # at run time this would import JAX
  from gradcomp._src.report.explain import Explanation, LeafPlan

Speeds = CodecSpeed | Callable[[Any], CodecSpeed]  # of every codec, or for each

_NO_WORK = CodecSpeed(encode=0.0, decode=0.0, add=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breakdown:
  """The seconds of an exchange: to encode, on the wire, to add, and to decode.

  Attributes:
    encode: to encode, and to compute the loss of encoding where workers keep it.
    wire: for each collective, its name, the bytes that a worker sends, and the seconds.
    add: to decode and add payloads, or to add plain numbers outside of collectives.
    decode: to decode sums.
  """

  encode: float = 0.0
  wire: tuple[tuple[str, float, float], ...] = ()
  add: float = 0.0
  decode: float = 0.0

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
  explanation: "Explanation", cluster: Cluster, speeds: Speeds
) -> Breakdown:
  """Predicts the seconds from the gradients to their means.

  Each collective takes the seconds of its ring; see :class:`Link`. A worker computes
  before and after its collectives, not meanwhile.

  Args:
    explanation: the exchange, from :func:`gradcomp.explain`.
    cluster: the workers, as many as in the explanation.
    speeds: the speeds of all codecs, or a function from the codec of a leaf to its
      speeds. It is not asked for leaves that the backend adds as they are.

  Returns:
    The seconds of each part.

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
  _check_workers(explanation, cluster)
  return _seconds(explanation.leaves, explanation.collectives, cluster, speeds)


def message_seconds(
  explanation: "Explanation", cluster: Cluster, speeds: Speeds
) -> tuple[Breakdown, ...]:
  """Predicts the seconds of each message by itself.

  A leaf that travels in several messages is encoded for the last one of them.

  Args:
    explanation, cluster, speeds: as for :func:`exchange_seconds`.

  Returns:
    The seconds of each part, one for each message.

  Raises:
    ValueError: the numbers of workers differ.
  """
  _check_workers(explanation, cluster)
  leaves, collectives = explanation.leaves, explanation.collectives
  numbers = {x.message for x in leaves} | {x.message for x in collectives}
  of = lambda parts, number: [x for x in parts if x.message == number]
  parts = ((of(leaves, number), of(collectives, number)) for number in sorted(numbers))
  return tuple(_seconds(*both, cluster, speeds) for both in parts)


def dense_seconds(elements: float, cluster: Cluster) -> Breakdown:
  """Returns the seconds of a plain mean in float32: one all-reduce of all elements.

  Args:
    elements: the number of elements of the gradients.
    cluster: the workers.

  Raises:
    ValueError: ``elements`` is below 0.
  """
  instance_of("cluster", Cluster, cluster)
  elements = at_least_0("elements", elements)
  workers, nbytes, add = cluster.workers, 4 * elements, elements * cluster.add
  seconds = rings.all_reduce_seconds(nbytes, workers, cluster.link, add=add)
  sent = SHARE_SENT["all-reduce"](workers) * nbytes
  return Breakdown(wire=(("all_reduce", float(sent), seconds),))


def _check_workers(explanation: "Explanation", cluster: Cluster) -> None:
  instance_of("cluster", Cluster, cluster)
  if explanation.workers != cluster.workers:
    raise ValueError(
      f"`cluster` must have the {explanation.workers} workers of the explanation, got "
      f"{cluster.workers}."
    )


def _seconds(
  leaves: Iterable["LeafPlan"],
  collectives: Iterable[Collective],
  cluster: Cluster,
  speeds: Speeds,
) -> Breakdown:
  encode = decode = add = 0.0
  for leaf in leaves:
    work, size = leaf.work, leaf.elements
    speed = _NO_WORK
    if any(work):
      speed = speeds if isinstance(speeds, CodecSpeed) else speeds(leaf.codec)
    keep = speed.keep if leaf.keeps else 0.0
    encode += size * float(work.encoded) * (speed.encode + keep)
    decode += size * float(work.decoded) * speed.decode
    add += size * (float(work.added) * speed.add + float(work.summed) * cluster.add)
  wire = []
  for x in collectives:
    name, seconds_of = _COLLECTIVES[x.kind]
    link = cluster.link_within(x.span)
    sums = {"add": cluster.add * x.elements} if x.kind == "all-reduce" else {}
    seconds = seconds_of(x.bytes_in, x.workers, link, **sums)
    wire.append((name, float(x.times * x.exact_bytes_sent), x.times * seconds))
  return Breakdown(encode=encode, wire=tuple(wire), add=add, decode=decode)


# The names of links' factors, and the seconds, by the kinds of collectives.
_COLLECTIVES: dict[str, tuple[str, Callable[..., float]]] = {
  "all-gather": ("all_gather", rings.all_gather_seconds),
  "all-reduce": ("all_reduce", rings.all_reduce_seconds),
  "all-to-all": ("all_to_all", rings.all_to_all_seconds),
  "collective-permute": ("ppermute", rings.ppermute_seconds),
}
