"""``explain``: the codec, exchange and bytes of each leaf, before a step runs."""

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import Any

import optax

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core.codec_memory import used_by_leaf
from gradcomp._src.core.state import states_in
from gradcomp._src.exchange.hierarchical import Hierarchical
from gradcomp._src.exchange.owners import owner_shapes
from gradcomp._src.exchange.plan import Message
from gradcomp._src.exchange.protocol import CODED_ONCE, Work
from gradcomp._src.mesh.axes import WorkerSizes, check_both, sizes_of
from gradcomp._src.report import tracing
from gradcomp._src.report.collectives import SHARE_SENT, Collective
from gradcomp._src.report.table import aligned


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
  """The result of :func:`gradcomp.explain`; ``str(explanation)`` is a table.

  Attributes:
    leaves: one plan a leaf and transformation.
    workers: N, along all axes together.
    bytes_inside: the part of all bytes that ``hierarchical`` sends inside groups.
    bytes_fitting: the part of all bytes that fits a codec to the gradients, which only
      some steps send.
    bytes_kept: the memory of an owner's residual, of the rounding of means.
    forgets: whether owners keep no residual, because the state was made without the
      number of workers. They round means at random then.
    collectives: those of a step, from which :mod:`gradcomp.cost` predicts seconds.
      Those that fit a codec are not among them. Consecutive sums are one, as in XLA.
  """

  leaves: tuple[LeafPlan, ...]
  workers: int
  bytes_inside: int
  bytes_fitting: Fraction
  bytes_kept: int = 0
  forgets: bool = False
  collectives: tuple[Collective, ...] = ()

  @property
  def bytes_sent(self) -> int:
    """The bytes that each worker sends in a step, at most, rounded up."""
    return math.ceil(sum((leaf.bytes_sent for leaf in self.leaves), self.bytes_fitting))

  @property
  def bytes_per_step(self) -> float:
    """The bytes that each worker sends in a step, on average over many.

    It is less than ``bytes_sent``, the bytes of the last step of a round, if workers
    take local steps.
    """
    return float(self._per_step)

  @property
  def _per_step(self) -> Fraction:
    rest = (leaf.bytes_sent * (1 - Fraction(1, leaf.every)) for leaf in self.leaves)
    return self.bytes_sent - sum(rest, Fraction(0))

  @property
  def bytes_received(self) -> int:
    """The bytes that each worker receives, ``bytes_sent`` in every exchange."""
    return self.bytes_sent

  @property
  def messages(self) -> int:
    """The number of messages a stage."""
    return len({leaf.message for leaf in self.leaves})

  @property
  def ratio(self) -> float:
    """The ratio of ``bytes_sent`` to the bytes of a plain mean in float32.

    That mean is over all workers, and has each leaf once, also if several
    transformations send it.
    """
    return self._ratio(bits=32)

  @property
  def _elements(self) -> int:
    return sum({leaf.path: leaf.elements for leaf in self.leaves}.values())

  def _ratio(self, bits: int) -> float:
    return _ratio(Fraction(self.bytes_sent), self._elements, self.workers, bits)

  def _ratios(self, bits: int) -> list[str]:
    """Returns the ratio of each leaf, and of all, in the table."""
    each = [_ratio(x.bytes_sent, x.elements, self.workers, bits) for x in self.leaves]
    return [f"{ratio:.4g}" for ratio in (*each, self._ratio(bits))]

  def __str__(self) -> str:
    leaves = self.leaves
    columns = {
      "leaf": [*(x.path for x in leaves), "total"],
      "shape": [str(list(x.shape)) for x in leaves],
      "codec": [type(x.codec).__name__ for x in leaves],
      "bits": [f"{float(x.bits):.4g}" for x in leaves],
      "exchange": [x.exchange for x in leaves],
      "message": [str(x.message) for x in leaves],
      "sent": [
        *(f"{math.ceil(x.bytes_sent):,}" for x in leaves),
        f"{self.bytes_sent:,}",
      ],
      "/f32": self._ratios(32),
      "/bf16": self._ratios(16),
    }
    if any(x.slots is not None for x in leaves):
      known = [(x.slots, None if x.slots is None else x.used) for x in leaves]
      columns["slots"] = ["" if slots is None else f"{slots:,}" for slots, _ in known]
      columns["used"] = ["" if used is None else f"{used:,.0f}" for _, used in known]
    if len(self._rounds) > 1:
      columns["every"] = [str(x.every) for x in leaves]
    if any(x.rule for x in leaves):
      columns["rule"] = [x.rule for x in leaves]
    rows = [[*columns], *itertools.zip_longest(*columns.values(), fillvalue="")]
    left = ("leaf", "shape", "codec", "exchange", "rule")
    lines = aligned(rows, right=[i for i, x in enumerate(columns) if x not in left])
    lines += self._when()
    reasons = dict.fromkeys((leaf.exchange, leaf.reason) for leaf in self.leaves)
    lines += [f"{exchange}: {reason}." for exchange, reason in reasons]
    if self.bytes_inside:
      lines.append(f"{self.bytes_inside:,} of them stay inside groups.")
    if self.bytes_fitting:
      lines.append(
        f"{math.ceil(self.bytes_fitting):,} of them only where levels are fitted."
      )
    if self.forgets:
      lines.append(
        "Owners forget what encoding a mean loses. Call optimizer.init inside the map, "
        "or under jax.set_mesh(mesh)."
      )
    elif self.bytes_kept:
      lines.append(
        f"An owner keeps what encoding a mean loses, {self.bytes_kept:,} bytes, if "
        "optimizer.init knows the workers."
      )
    return "\n".join(lines)

  @property
  def _rounds(self) -> set[int]:
    """The lengths of the rounds: a leaf with length n is sent in one of n steps."""
    return {leaf.every for leaf in self.leaves} or {1}

  def _when(self) -> list[str]:
    """Describes in words the steps that send, and the bits an element of each."""
    length = math.lcm(*self._rounds)
    bits = 8 * self.bytes_per_step / max(self._elements, 1)
    when = "a step" if length == 1 else f"a round of {length} steps"
    if len(self._rounds) > 1:
      when = "in a step that sends all"
    lines = [
      f"Bytes that each of {self.workers} workers sends {when}. It receives as many."
    ]
    if len(self._rounds) > 1:
      sent = f"{math.ceil(length * self._per_step):,}"
      lines.append(
        f"In a round of {length} steps it sends {sent}. That is {bits:.3g} bits a "
        "parameter and step."
      )
    elif length > 1:
      lines.append(f"That is {bits:.3g} bits a parameter and step.")
    return lines


def _ratio(sent: Fraction, elements: int, workers: int, bits: int) -> float:
  """Returns the ratio of bytes; 1 if both are 0, as in a WireReport."""
  plain = SHARE_SENT["all-reduce"](workers) * elements * bits / 8
  if plain:
    return float(sent / plain)
  return math.inf if sent else 1.0


def _work(
  message: Message, sent: LeafCodec, codec: LeafCodec, sizes: tuple[int, ...]
) -> Work:
  """Returns the work for a leaf of a message."""
  # A codec that averages other arrays in place of a leaf: only the leaf is coded.
  plain = all(codec.facts.plain for codec in message.layout.codecs)
  return message.exchange.work(sizes, plain=plain) if sent == codec else CODED_ONCE


def explain(
  optimizer: optax.GradientTransformation,
  params: Any,
  *,
  workers: WorkerSizes,
  opt_state: Any = None,
) -> Explanation:
  """Explains the messages that gradcomp's transformations in an optimizer send.

  Nothing is computed, and no axis or device is needed: ``update`` is traced with
  shapes, as a map over the workers would trace it, and its collectives are read. That
  takes the time of tracing a step, once for an optimizer, the shapes and the workers:
  the last results are kept as long as the optimizer. An optimizer with attributes that
  change is explained as it was at first: make another one instead. A leaf shares the
  bytes of its message by the rows that it has there. A leaf that no gradcomp
  transformation sees is not in the table. One that two see is there twice, and ratios
  count it once. For
  :func:`gradcomp.wrappers.switch`, and wherever else a step takes one of several
  branches, the table shows the last that sends something. Without ``axis_name``, the
  table shows an exchange over the axes that gradients are unreduced over.

  Args:
    optimizer: an optax transformation with gradcomp's in it.
    params: the parameters, or their ``jax.ShapeDtypeStruct``, whole.
    workers: the number of workers that share the axis; ``(hosts, chips)`` for
      ``"hierarchical"`` over two axes. Where transformations exchange over different
      axes, the size of each axis that workers are on, in the order of the mesh, like
      ``{"host": 2, "chip": 4}``.
    opt_state: the state after a step, outside of any transformed function. With it,
      the table has the used slots of sparse messages, a mean over the workers, and
      knows whether owners keep residuals.

  Returns:
    An :class:`gradcomp.wire.Explanation`. ``print`` shows for each leaf the codec, its
    real bits an element on the wire, the exchange (see
    :func:`gradcomp.exchange.choose`), the bytes that a worker sends in a step, and
    these against plain means in float32 and in 16 bits.

  Raises:
    ValueError: ``workers`` is no number of workers, lacks an axis, does not fit the
      groups of ``"hierarchical"``, is not that of ``opt_state``, or is more than
      ``2**18``. Or a leaf has more rows than 32 bits count.

  Example:
    >>> optimizer = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.sgd(0.1))
    >>> params = {"b": jnp.zeros(64), "w": jnp.zeros((256, 256))}
    >>> print(explain(optimizer, params, workers=4))
    leaf   shape       codec   bits  exchange  message    sent    /f32   /bf16
    ['b']  [64]        Dense     32  two_shot        0   3,072       8      16
    ['w']  [256, 256]  QSGD   4.062  two_shot        0  49,920   0.127  0.2539
    total                                               52,992  0.1346  0.2693
    Bytes that each of 4 workers sends a step. It receives as many.
    two_shot: it sends 2/N of all_gather's bytes.
    An owner keeps what encoding a mean loses, 65,536 bytes, if optimizer.init knows the
      workers.
  """
  states = states_in(opt_state)
  transformations = tracing.study(optimizer, params, workers).found
  leaves: list[LeafPlan] = []
  collectives: list[Collective] = []
  number = kept = 0
  forgets = False
  for found in transformations:
    plan, memory = found.plan, None
    owned = [shape for shapes in owner_shapes(plan).values() for shape in shapes]
    kept += sum(4 * math.prod(shape) for shape in owned)
    if states and found.state is not None:
      memory = states[found.state].memory
      forgets |= bool(owned) and states[found.state].server_residual is None
    used = {} if memory is None else used_by_leaf(plan, memory)
    own: dict[int, LeafPlan] = {}
    collectives += [
      dataclasses.replace(x, message=number + x.message) for x in found.collectives
    ]
    for message in plan.messages:
      if isinstance(message.exchange, Hierarchical):
        check_both(plan.axis_name, workers)
      layout = message.layout
      for i, like, slot in zip(message.leaves, layout.like, layout.slots, strict=True):
        codec = layout.codecs[slot.group]
        share = Fraction(like.size, plan.leaves[i].size) if like.size else 1
        bits = share * Fraction(32 * codec.row_words, codec.tile_size)
        own[i] = LeafPlan(
          path=plan.names[i],
          shape=plan.leaves[i].shape,
          codec=plan.codecs[i],
          bits=bits + (own[i].bits if i in own else 0),
          exchange=message.exchange.name,
          message=number,
          bytes_sent=found.by_leaf[i],
          reason=message.reason,
          rule=plan.rules[i],
          slots=codec.sums.slots(slot.stop - slot.start),
          used=used.get(i),
          work=_work(message, codec, plan.codecs[i], found.sizes),
          keeps=plan.feedback,
          every=found.every,
        )
      number += 1
    leaves += [own[i] for i in sorted(own)]
  return Explanation(
    leaves=tuple(leaves),
    workers=math.prod(sizes_of(workers)[0]),
    bytes_inside=math.ceil(sum(x.inside for x in transformations)),
    bytes_fitting=sum((x.fitting for x in transformations), Fraction(0)),
    bytes_kept=0 if forgets else kept,
    forgets=forgets,
    collectives=tuple(collectives),
  )
