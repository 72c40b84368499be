"""Explains what a transformation sends, and why, before anything runs."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import jax
import optax

from gradcomp import _planning
from gradcomp._checks import static_integer
from gradcomp._table import aligned
from gradcomp.codecs import Codec, SparseCodec
from gradcomp.exchange import Hierarchical, bytes_by_leaf, fit_bytes, inside_bytes
from gradcomp.layout import Slot

_WORKERS_RULE = "a number of workers, 1 or more, or a tuple of the sizes of two axes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafPlan:
  """The way in which one leaf travels.

  Attributes:
    path: the path of the leaf in the parameters.
    shape: the shape of the leaf.
    codec: the codec that encodes it.
    exchange: the exchange that its message takes.
    message: the number of the message that it shares with other leaves.
    bytes_sent: the bytes that a worker sends for it in a step, and receives. They are
      fractional, because leaves share rows that fill up a message.
    reason: the reason for the exchange: it was asked for, or ``"auto"`` took it.
    slots: entries that a sparse message of the leaf has room for; None for a dense one.
    used: the entries that a worker filled in the last step, a mean over the workers;
      None if that is unknown.
  """

  path: str
  shape: tuple[int, ...]
  codec: Codec
  exchange: str
  message: int
  bytes_sent: Fraction
  reason: str
  slots: int | None = None
  used: float | None = None

  @property
  def elements(self) -> int:
    """The number of elements of the leaf."""
    return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
  """The result of :func:`explain`; ``str(explanation)`` is a table.

  Attributes:
    leaves: one plan a leaf.
    workers: N.
    bytes_inside: the part of all bytes that ``hierarchical`` sends inside groups.
    bytes_fitting: the part of all bytes that fits a codec to the gradients, which only
      some steps send.
  """

  leaves: tuple[LeafPlan, ...]
  workers: int
  bytes_inside: int
  bytes_fitting: Fraction

  @property
  def bytes_sent(self) -> int:
    """The bytes that each worker sends in a step, at most, rounded up."""
    return math.ceil(sum((leaf.bytes_sent for leaf in self.leaves), self.bytes_fitting))

  @property
  def bytes_received(self) -> int:
    """The bytes that each worker receives: as many as it sends, in every exchange."""
    return self.bytes_sent

  @property
  def messages(self) -> int:
    """The number of messages a stage."""
    return len({leaf.message for leaf in self.leaves})

  @property
  def ratio(self) -> float:
    """The ratio of ``bytes_sent`` and the bytes of a plain mean in float32."""
    return self._ratio(bits=32)

  def _ratio(self, bits: int) -> float:
    elements = sum(leaf.elements for leaf in self.leaves)
    return _ratio(Fraction(self.bytes_sent), elements, self.workers, bits)

  def __str__(self) -> str:
    header = "leaf,shape,codec,bits,exchange,message,sent,received,/f32,/bf16"
    rows = [header.split(","), *map(self._row, self.leaves)]
    total = f"{self.bytes_sent:,}"
    ratios = [f"{self._ratio(bits):.4g}" for bits in (32, 16)]
    rows.append(["total", "", "", "", "", "", total, total, *ratios])
    if any(leaf.slots is not None for leaf in self.leaves):
      columns = [["slots", "used"], *map(_slots, self.leaves), ["", ""]]
      rows = [row + column for row, column in zip(rows, columns, strict=True)]
    lines = aligned(rows, right=(3, 5, 6, 7, 8, 9, 10, 11))
    lines.append(
      f"Bytes that each of {self.workers} workers sends and receives a step."
    )
    reasons = dict.fromkeys((leaf.exchange, leaf.reason) for leaf in self.leaves)
    lines += [f"{exchange}: {reason}." for exchange, reason in reasons]
    if self.bytes_inside:
      lines.append(f"{self.bytes_inside:,} of them stay inside groups.")
    if self.bytes_fitting:
      lines.append(
        f"{math.ceil(self.bytes_fitting):,} of them only where levels are fitted."
      )
    return "\n".join(lines)

  def _row(self, leaf: LeafPlan) -> list[str]:
    sent = f"{math.ceil(leaf.bytes_sent):,}"
    ratios = [
      _ratio(leaf.bytes_sent, leaf.elements, self.workers, bits) for bits in (32, 16)
    ]
    return [
      leaf.path,
      str(list(leaf.shape)),
      type(leaf.codec).__name__,
      f"{32 * leaf.codec.row_words / leaf.codec.tile_size:.4g}",
      leaf.exchange,
      str(leaf.message),
      sent,
      sent,
      *(f"{ratio:.4g}" for ratio in ratios),
    ]


def _slots(leaf: LeafPlan) -> list[str]:
  used = "" if leaf.slots is None or leaf.used is None else f"{leaf.used:,.0f}"
  return ["" if leaf.slots is None else f"{leaf.slots:,}", used]


def _ratio(sent: Fraction, elements: int, workers: int, bits: int) -> float:
  """Returns the ratio of bytes; 1 if both are 0, as in a WireReport."""
  plain = Fraction(2 * (workers - 1), workers) * elements * bits / 8
  if plain:
    return float(sent / plain)
  return math.inf if sent else 1.0


def _leaf_slots(codec: Codec, slot: Slot) -> int | None:
  if not isinstance(codec, SparseCodec):
    return None
  return (slot.stop - slot.start) * codec.slots


def _check_groups(group_size: int | None, sizes: tuple[int, ...]) -> None:
  """Raises ValueError if workers are not groups as ``hierarchical`` would find them."""
  if group_size is None and len(sizes) != 2:
    raise ValueError(
      "`workers` must be the sizes of both axes, (between, inside), for "
      f'exchange="hierarchical" over two axes, got {sizes[0]}.'
    )
  if group_size is not None and math.prod(sizes) % group_size:
    raise ValueError(
      f"`workers` must be a multiple of group_size={group_size}, got {sizes}."
    )


def explain(
  optimizer: optax.GradientTransformation,
  params: Any,
  *,
  workers: int | tuple[int, int],
  opt_state: Any = None,
) -> Explanation:
  """Explains what gradcomp's transformations in an optimizer send for these parameters.

  Nothing is computed, and no axis or device is needed: ``update`` is traced with shapes
  alone. A leaf that no gradcomp transformation sees is not in the table. One that two
  see is there twice. For :func:`gradcomp.switch` the table shows the last
  transformation.

  Args:
    optimizer: an optax transformation with gradcomp's in it.
    params: the parameters, or their ``jax.ShapeDtypeStruct``, whole.
    workers: the number of workers that share the axis; ``(hosts, chips)`` for
      ``"hierarchical"`` over two axes.
    opt_state: the state after a step, outside of any transformed function. It says how
      many slots of sparse messages were used, as a mean over the workers.

  Returns:
    An :class:`Explanation`. ``print`` shows for each leaf the codec, its real bits an
    element on the wire, the exchange (see :func:`gradcomp.exchange.choose`), the bytes
    that a worker sends and receives in a step, and these against plain means in float32
    and in 16 bits.

  Raises:
    ValueError: ``workers`` is no number of workers, or does not fit the groups of
      ``"hierarchical"``, or is not that of ``opt_state``.

  Example:
    >>> optimizer = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.sgd(0.1))
    >>> params = {"b": jnp.zeros(64), "w": jnp.zeros((256, 256))}
    >>> print(explain(optimizer, params, workers=4))
    leaf   shape       codec   bits  exchange  message    sent  received    /f32   /bf16
    ['b']  [64]        Dense     32  two_shot        0   3,072     3,072       8      16
    ['w']  [256, 256]  QSGD   4.062  two_shot        0  49,920    49,920   0.127  0.2539
    total                                               52,992    52,992  0.1346  0.2693
    Bytes that each of 4 workers sends and receives a step.
    two_shot: it sends 2/N of all_gather's bytes.
  """
  sizes: tuple[int, ...] = workers if isinstance(workers, tuple) else (workers,)
  if len(sizes) not in (1, 2):
    raise ValueError(f"`workers` must be {_WORKERS_RULE}, got {workers!r}.")
  sizes = tuple(static_integer("workers", _WORKERS_RULE, size) for size in sizes)
  if min(sizes) < 1:
    raise ValueError(f"`workers` must be {_WORKERS_RULE}, got {workers!r}.")
  count = math.prod(sizes)
  with _planning.planning(count) as plans:
    # The cache of a jit inside would give back traces of another occasion.
    with jax.disable_jit():
      jax.make_jaxpr(
        lambda p: optimizer.update(
          p, optimizer.init(p) if opt_state is None else opt_state, p
        )
      )(params)
  leaves: list[LeafPlan] = []
  inside, fitting, number = Fraction(0), Fraction(0), 0
  for plan in plans:
    group_size = plan.group_size or sizes[-1]
    if any(isinstance(message.exchange, Hierarchical) for message in plan.messages):
      _check_groups(plan.group_size, sizes)
    found = []
    fitting += fit_bytes(plan.codec, plan.messages, count)
    for message in plan.messages:
      layout = message.layout
      sent = bytes_by_leaf(message.exchange, layout, count, group_size)
      for i, like, slot, bytes_sent in zip(
        message.leaves, layout.like, layout.slots, sent, strict=True
      ):
        leaf = LeafPlan(
          path=plan.paths[i],
          shape=like.shape,
          codec=layout.codecs[slot.group],
          exchange=message.exchange.name,
          message=number,
          bytes_sent=bytes_sent,
          reason=message.reason,
          slots=_leaf_slots(layout.codecs[slot.group], slot),
          used=plan.used.get(i),
        )
        found.append((i, leaf))
      if isinstance(message.exchange, Hierarchical) and plan.group_size is None:
        inside += inside_bytes(layout, count, group_size)
      number += 1
    leaves += [leaf for _, leaf in sorted(found, key=lambda pair: pair[0])]
  return Explanation(
    leaves=tuple(leaves),
    workers=count,
    bytes_inside=math.ceil(inside),
    bytes_fitting=fitting,
  )
