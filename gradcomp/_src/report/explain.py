"""``explain``: the bytes of an optimizer's leaves, or of a function, before it runs."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, overload

import jax
import jax.numpy as jnp
import optax

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core import state
from gradcomp._src.exchange import hierarchical, protocol
from gradcomp._src.exchange.plan import owner_shapes
from gradcomp._src.mesh import axes, study, trees, types
from gradcomp._src.report import reader, tracing, wire_report
from gradcomp._src.report.collectives import Collective, by_link, plain_bytes, table


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafPlan:
  """The codec, exchange and bytes of one leaf.

  Attributes:
    path, shape: the path of the leaf in the parameters, and its shape.
    codec: the codec that encodes it.
    bits: the bits on the wire for each of its elements, in one payload.
    exchange, message: those that it shares with other leaves, the second by number.
    bytes_sent: the bytes that a worker sends for it in a step, and receives: a
      fraction, because leaves share rows that fill up a message.
    rule: the rule of a policy that chose the codec; "" without one.
    reason: the reason for the exchange: it was asked for, or ``"auto"`` took it.
    slots: the entries that a sparse message has room for; None for a dense one.
    used: the entries that a worker filled in the last step, on average, if known.
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
  work: protocol.Work = protocol.Work()
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
    bytes_between: the part that ``hierarchical`` sends between groups, over two axes.
    ratio_between: the ratio of ``bytes_between`` to a plain mean in float32 that adds
      inside groups first: ``2 (h-1)/h 4 e / c`` bytes of ``e`` elements, between ``h``
      groups of ``c`` workers. It is 1 without groups.
    bytes_fitting: the part that fits a codec to the gradients, only in some steps.
    bytes_filling: the part that fills up rows, so that workers own equal shares.
    bytes_kept: the memory of an owner's residual, of the rounding of means.
    forgets: whether owners keep no residual, because the state was made without the
      number of workers. They round means at random then.
    collectives: those of a step, for :mod:`gradcomp.cost`, except those that fit a
      codec. Consecutive sums are one, as in XLA.
  """

  leaves: tuple[LeafPlan, ...]
  workers: int
  bytes_inside: int
  bytes_fitting: Fraction
  bytes_between: int = 0
  ratio_between: float = 1.0
  bytes_filling: int = 0
  bytes_kept: int = 0
  forgets: bool = False
  collectives: tuple[Collective, ...] = ()

  @property
  def bytes_sent(self) -> int:
    """The bytes that each worker sends in a step, at most, rounded up."""
    return math.ceil(sum((leaf.bytes_sent for leaf in self.leaves), self.bytes_fitting))

  @property
  def bytes_per_step(self) -> float:
    """The bytes that each worker sends in a step, on average over rounds."""
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
    """The ratio of ``bytes_sent`` to a plain f32 mean, which has each leaf once."""
    return self._ratio(self.bytes_sent, self._elements)

  @property
  def _elements(self) -> int:
    return sum({leaf.path: leaf.elements for leaf in self.leaves}.values())

  def _ratio(self, sent: Fraction | int, elements: int, bits: int = 32) -> float:
    """Returns the ratio to a plain mean; 1 if both are 0, as in a WireReport."""
    plain = plain_bytes(elements, self.workers) * bits / 32
    return float(sent / plain) if plain else math.inf if sent else 1.0

  def __str__(self) -> str:
    length = math.lcm(*(leaf.every for leaf in self.leaves))
    several = len({leaf.every for leaf in self.leaves}) > 1  # lengths of rounds

    def of(sent: Fraction | int, elements: int) -> dict[str, str]:
      ratio = lambda bits: f"{self._ratio(sent, elements, bits):.4g}"
      return {"sent": f"{math.ceil(sent):,}", "/f32": ratio(32), "/bf16": ratio(16)}

    rows = [
      {
        "leaf": x.path,
        "shape": str(list(x.shape)),
        "codec": type(x.codec).__name__,
        "bits": f"{float(x.bits):.4g}",
        "exchange": x.exchange,
        "message": str(x.message),
        **of(x.bytes_sent, x.elements),
        "slots": "" if x.slots is None else f"{x.slots:,}",
        "used": "" if None in (x.slots, x.used) else f"{x.used:,.0f}",
        "every": str(x.every) * several,
        "rule": x.rule,
      }
      for x in self.leaves
    ]
    lines = table([*rows, {"leaf": "total", **of(self.bytes_sent, self._elements)}])
    when = "a step" if length == 1 else f"a round of {length} steps"
    sends = f"sends {'in a step that sends all' if several else when}"
    lines.append(f"Bytes that each of {self.workers} workers {sends}.")
    lines[-1] += " It receives as many."
    if length > 1:
      bits = 8 * self.bytes_per_step / max(self._elements, 1)
      sent = f"In {when} it sends {math.ceil(length * self._per_step):,}. " * several
      lines.append(f"{sent}That is {bits:.3g} bits a parameter and step.")
    lines += dict.fromkeys(f"{leaf.exchange}: {leaf.reason}." for leaf in self.leaves)
    if self.bytes_inside:
      lines.append(
        f"{self.bytes_between:,} of them go between groups, {self.ratio_between:.4g} x "
        f"those of a plain f32 mean, and {self.bytes_inside:,} stay inside groups."
      )
    if fitting := math.ceil(self.bytes_fitting):
      lines.append(f"{fitting:,} of them only where levels are fitted.")
    if self.messages > 1:
      lines.append(
        f"{self.messages} messages; the last goes first. "
        f"{self.bytes_filling:,} bytes fill up their shares."
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


@dataclasses.dataclass(frozen=True)
class Directions:
  """The explanation of a function; ``str(directions)`` is a table for each pass.

  Attributes:
    forward: the collectives of the function.
    backward: the further collectives of the gradients of all arguments.
  """

  forward: wire_report.WireReport
  backward: wire_report.WireReport

  @property
  def bytes_sent(self) -> int:
    """The bytes that a worker sends in both passes."""
    return self.forward.bytes_sent + self.backward.bytes_sent

  def __str__(self) -> str:
    return f"Forward:\n{self.forward}\nBackward:\n{self.backward}"


@overload
def explain(
  optimizer: optax.GradientTransformation,
  params: Any,
  /,
  *,
  workers: axes.WorkerSizes,
  opt_state: Any = None,
  platform: str | None = None,
) -> Explanation: ...


@overload
def explain(
  function: Callable[..., Any],
  /,
  *args: Any,
  workers: Mapping[str, int],
  platform: str | None = None,
) -> Directions: ...


def explain(
  optimizer: Any,
  /,
  *args: Any,
  workers: Any,
  opt_state: Any = None,
  platform: str | None = None,
) -> Explanation | Directions:
  """Returns the bytes of an optimizer with gradcomp's transformations, or a function.

  The :class:`Explanation` prints as a table: bits an element on the wire, and the bytes
  of a worker in a step, also over plain means in float32 and 16 bits. Nothing is
  computed, and no axis or device is needed: it traces ``update`` with shapes in a map
  over the workers, and reads its collectives. Bytes are those on the wire, with the
  zeros that fill up rows, shares and lines. A leaf shares the bytes of its message by
  its rows there, and has a line for each transformation that sees it. Of branches, the
  last that sends something counts. Without ``axis_name``, exchanges are over the axes
  that gradients are unreduced over. Results are kept as long as the optimizer, which
  must not change.

  Of a function, :class:`Directions` list its collectives and its gradient's, with the
  bytes that :func:`gradcomp.wire_report` reads from the compiled program. Trips of
  loops count, except those of ``while``.

  Args:
    optimizer: an optax transformation with gradcomp's in it; or a function of the
      arrays that one worker has: one collective, a layer, or a whole loss.
    args: the parameters, or their ``jax.ShapeDtypeStruct``, whole; or the arguments of
      the function, likewise.
    workers: the number of workers that share the axis; ``(hosts, chips)`` for
      ``"hierarchical"`` over two axes; or the size of each axis, in the order of the
      mesh, like ``{"host": 2, "chip": 4}``, as a function needs.
    opt_state: the state after a step, outside of any transformed function: it has the
      used slots of sparse messages, and shows whether owners keep residuals.
    platform: that of the workers, ``"cpu"``, ``"gpu"`` or ``"tpu"``, by which
      ``message_bytes="auto"`` cuts messages. By default that of the mesh of
      ``jax.set_mesh``, and without one that of the default backend.

  Raises:
    TypeError: an optimizer gets other arguments than its parameters, or a function gets
      ``opt_state``.
    ValueError: ``workers`` is no such number, lacks an axis, does not fit the groups or
      ``opt_state``, or is more than ``2**18``; ``platform`` is none; or a leaf has more
      rows than 32 bits count.

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
  is_function = callable(optimizer)
  if (len(args) != 1 and not is_function) or (opt_state is not None and is_function):
    raise TypeError(
      "`args` must be the parameters of an optimizer, or the arguments of a function, "
      f"which has no opt_state=, got {len(args)} and {optimizer!r}."
    )
  with study.planned_for(platform):
    if is_function:
      return _passes(optimizer, args, workers)
    transformations = tracing.study(optimizer, args[0], workers).found
  states = state.states_in(trees.unboxed(opt_state))
  leaves, collectives = list[LeafPlan](), list[Collective]()
  number, kept, forgets = 0, 0, False
  filling = between = mean_between = Fraction(0)
  for found in transformations:
    plan, used = found.plan, dict[int, float]()
    # In a scan owners keep something only where workers do.
    keeps = plan.feedback or not found.layers
    owned = [*itertools.chain(*owner_shapes(plan).values())] if keeps else []
    kept += sum(4 * math.prod((*found.layers, *shape)) for shape in owned)
    if states and found.state is not None:
      one = states[found.state]
      forgets |= bool(owned) and one.server_residual is None
      used = state.used_by_leaf(plan, one.memory) if one.memory else {}
    if found.inside:
      between += sum(found.by_leaf) - found.inside
      # A plain mean that adds inside groups first sends an nth of all elements.
      elements = math.prod(found.layers) * sum(leaf.size for leaf in plan.leaves)
      mean_between += plain_bytes(elements, found.sizes[0]) / found.sizes[1]
    own: dict[int, LeafPlan] = {}
    sent = [Fraction(0)] * len(plan.messages)
    for x in found.collectives:
      collectives.append(dataclasses.replace(x, message=number + x.message))
      sent[x.message] += x.times * x.exact_bytes_sent
    for message, size in zip(plan.messages, sent, strict=True):
      layout, exchange = message.layout, message.exchange
      if isinstance(exchange, hierarchical.Hierarchical):
        axes.check_both(plan.axis_name, workers)
      if exchange.way not in ("gathered", "reduced") and layout.nbytes:
        # Rows of matrices are filled up to shares.
        pairs = zip(layout.rows, layout.codecs, strict=True)
        more = sum(4 * (-rows % plan.workers) * x.row_words for rows, x in pairs)
        filling += size * Fraction(more, layout.nbytes + more)
      work = exchange.work(found.sizes, plain=layout.plain)
      for i, like, slot in zip(message.leaves, layout.like, layout.slots, strict=True):
        codec = layout.codecs[slot.group]
        share = Fraction(like.size, plan.leaves[i].size) if like.size else 1
        bits = share * Fraction(32 * codec.row_words, codec.tile_size)
        own[i] = LeafPlan(
          path=plan.names[i],
          shape=(*found.layers, *plan.leaves[i].shape),
          codec=plan.codecs[i],
          bits=bits + (own[i].bits if i in own else 0),
          exchange=exchange.name,
          message=number,
          bytes_sent=found.by_leaf[i],
          reason=message.reason,
          rule=plan.rules[i],
          slots=codec.sums.slots(slot.stop - slot.start),
          used=used.get(i),
          # A codec that averages others in place of a leaf: only the leaf is coded.
          work=work if codec == plan.codecs[i] else protocol.CODED_ONCE,
          keeps=plan.feedback,
          every=found.every,
        )
      number += 1
    leaves += [own[i] for i in sorted(own)]
  return Explanation(
    leaves=tuple(leaves),
    workers=math.prod(axes.sizes_of(workers)[0]),
    bytes_inside=math.ceil(sum(x.inside for x in transformations)),
    bytes_between=math.ceil(between),
    ratio_between=float(between / mean_between) if mean_between else 1.0,
    bytes_fitting=sum((x.fitting for x in transformations), Fraction(0)),
    bytes_filling=math.ceil(filling),
    bytes_kept=0 if forgets else kept,
    forgets=forgets,
    collectives=tuple(collectives),
  )


def _passes(
  function: Callable[..., Any], args: tuple[Any, ...], workers: Any
) -> Directions:
  """Traces a function, and its gradient, in a map over the axes of the workers."""
  _, sizes = axes.sizes_of(workers)
  if not sizes:
    raise ValueError(
      "`workers` must be the axes of the function with their sizes, like "
      f"{{'model': 4}}, got {workers!r}; for an optimizer, call its factory first."
    )

  def forward(*args: Any) -> list[jax.Array]:
    # The floats of the result, which have cotangents.
    leaves = jax.tree.leaves(function(*args))
    return [x for x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

  def backward(*args: Any) -> Any:
    result, pull = jax.vjp(forward, *args)
    return pull(result)  # a cotangent of the right types

  def traced(function: Callable[..., Any]) -> tuple[Collective, ...]:
    def local(*args: Any) -> jax.Array:
      function(*types.mark_varying(args, tuple(sizes)))
      return jnp.zeros([])

    found = reader.events(reader.traced(local, sizes, *args))
    return tuple(reader.collective_of(x, sizes) for x in found)

  there, both = traced(forward), traced(backward)
  report = lambda found: wire_report.WireReport(by_link(found), axes=tuple(sizes))
  # JAX computes a function before its gradient, which may send some of it once more.
  return Directions(report(there), report(both[len(there) :]))
