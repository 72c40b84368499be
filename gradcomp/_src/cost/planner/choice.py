"""The choice of a codec and an exchange for a model and its links."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.tree_util import keystr

from gradcomp._src import checks
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core.compression import Compression, paths_of
from gradcomp._src.core.inputs import pairs
from gradcomp._src.core.transform import compress
from gradcomp._src.cost import exchange as costs
from gradcomp._src.cost import rules
from gradcomp._src.cost.exchange import NO_WORK, Breakdown, Speeds
from gradcomp._src.cost.link import Cluster, CodecSpeed, Link
from gradcomp._src.cost.planner import candidates
from gradcomp._src.cost.planner.candidates import Candidate, SpeedOf
from gradcomp._src.cost.planner.errors import BudgetName, Errors, checked_budget
from gradcomp._src.cost.planner.sent import Sent, sent_by
from gradcomp._src.exchange import hierarchical, one_stage, ring, two_shot
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.place import Place
from gradcomp._src.mesh.platforms import Platform, planned_for, planned_on, platform
from gradcomp._src.mesh.trees import unboxed
from gradcomp._src.report.collectives import aligned
from gradcomp._src.report.explain import Explanation, explain

# The simplest first, which wins where times and errors are equal.
_WAYS: tuple[Exchange, ...] = (
  *(one_stage.AllReduce(), one_stage.AllGather(), two_shot.TwoShot(), ring.Ring()),
  hierarchical.Hierarchical(),
)
_ALIKE = 1.02  # times of steps whose ratio is smaller count as equal
_HEADER = (
  *("codec", "exchange", "bytes", "encode ms", "wire ms", "decode ms"),
  *("step ms", "speed-up", "error"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(checks.Checked):
  """The options of :func:`gradcomp.cost.plan` that are seldom set.

  Attributes:
    forward: the seconds of the forward pass of a step. Without the passes only
      exchanges are compared. Default: None.
    backward: the seconds of the backward pass, given with ``forward`` and only then.
      Default: None.
    speeds: the speeds of codecs: CodecSpeeds by the names of candidates, one for all, a
      function from the codec of a leaf to its speeds, or ``"measure"``. By default the
      package's for the device. ``"cpu"``, ``"H100"`` and ``"TPU v5e"`` are those by
      name; the last are XLA's estimates, which nobody has timed.
    gradients: gradients like the parameters, to measure errors on, which compiles each
      codec; normal numbers by default.
    candidates: candidates, or codecs; by default ``gradcomp.cost.CANDIDATES``.
    margin: the part of a step that compression must gain, from 0 to below 1.
    platform: that of the workers, ``"cpu"``, ``"gpu"`` or ``"tpu"``, by which
      ``message_bytes="auto"`` cuts messages. By default that of the named ``speeds``,
      else of a mesh that is measured, else as for :func:`gradcomp.explain`.

  Raises:
    ValueError: a field breaks its rule.
  """

  forward: float | None = checks.field(None, checks.optional(rules.SECONDS))
  backward: float | None = checks.field(None, checks.optional(rules.SECONDS))
  speeds: CodecSpeed | Mapping[str, CodecSpeed] | SpeedOf | candidates.Named | None = (
    None
  )
  gradients: Any = None
  candidates: Sequence[Candidate | LeafCodec] = candidates.CANDIDATES
  margin: float = checks.field(0.05, checks.BELOW_1)
  platform: Platform | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    planned_for(self.platform)
    if (self.forward is None) != (self.backward is None):
      raise ValueError(
        "`backward` must be given with `forward`, and only then, got "
        f"forward={self.forward!r} and backward={self.backward!r}."
      )
    given: Any = self.candidates
    if isinstance(given, str) or not isinstance(given, Sequence):
      raise ValueError(f"`candidates` must be a sequence of codecs, got {given!r}.")
    object.__setattr__(self, "candidates", tuple(map(candidates.as_candidate, given)))


_DEFAULTS = PlanOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A candidate with an exchange: its predicted times, or the reason to refuse it.

  Attributes:
    candidate: the candidate.
    exchange: the exchange; None in a refusal of all.
    reason: the reason to refuse it, with its number; "" for a row that was compared.
    options: the codec of the leaves, the exchange and the feedback, for ``compress``.
    error: of the mean, squared, over its square.
    speed: the speeds of the codecs of leaves.
    sent: the work on the leaves, and the collectives of a step.
    breakdown: the seconds of its exchange.
    step_seconds: the seconds of a step; of only the exchange if the passes are unknown.
    speedup: the step of a plain mean in float32, over this one.
  """

  candidate: Candidate
  exchange: Exchange | None = None
  reason: str = ""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  error: float = 0.0
  speed: Speeds = NO_WORK
  sent: Sent = Sent()
  breakdown: Breakdown = Breakdown()
  step_seconds: float = 0.0
  speedup: float = 1.0

  @property
  def name(self) -> str:
    """The names of the codec and the exchange."""
    return f"{self.candidate.name} {self.way}".strip()

  @property
  def way(self) -> str:
    """The name of the exchange; "" for a refusal of all."""
    return "" if self.exchange is None else self.exchange.name

  @property
  def cells(self) -> list[str]:
    """The cells of a line of the table."""
    cost = self.breakdown
    parts = cost.encode, cost.wire_seconds, cost.add + cost.decode, self.step_seconds
    gain = f"{self.speedup:.2f}", f"{self.error:.2g}"
    names = self.candidate.name, self.way
    return [*names, f"{self.sent.bytes_sent:,}", *map(_in_ms, parts), *gain]

  @property
  def time(self) -> str:
    """The milliseconds of a step, in words."""
    return f"{_in_ms(self.step_seconds)} ms"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The result of :func:`plan`; ``str(plan)`` is a table and a verdict.

  Attributes:
    chosen: the row of the choice: a plain mean where compression is not worth it.
    rows: all candidates that were compared, the plain mean first.
    refused: candidates that could not be chosen, with the reasons.
    verdict: one line, which begins with the advice.
    notes: caveats about the numbers.
    explanation: the messages and bytes of the choice, of every leaf.
  """

  chosen: Row
  rows: tuple[Row, ...]
  refused: tuple[Row, ...]
  verdict: str
  notes: tuple[str, ...]
  explanation: Explanation

  def transformation(
    self, *, axis_name: AxisName | None
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation to chain in front of an optimizer.

    Args:
      axis_name: the axis of the workers; two, (between, inside), if the plan is for
        two. None means the same as in :func:`gradcomp.compress`.
    """
    return compress(**self.chosen.options, axis_name=axis_name)

  def __str__(self) -> str:
    rows = sorted(self.rows, key=lambda row: row.step_seconds)
    cells = [_HEADER, *(row.cells for row in rows)]
    lines = aligned(cells, right=range(2, len(_HEADER)))
    whole = [x for x in self.refused if x.exchange is None]
    lines += [f"refused {x.name}: {x.reason}." for x in whole]
    if number := len(self.refused) - len(whole):
      lines.append(
        f"refused {number} other pairs of codec and exchange: see `refused`."
      )
    return "\n".join([*lines, *self.notes, self.verdict])


def plan(
  params: Any,
  *,
  workers: int | tuple[int, int],
  link: Link | tuple[Link, Link] | Mesh,
  budget: BudgetName | float = "paper",
  steps: int | None = None,
  options: PlanOptions = _DEFAULTS,
) -> Plan:
  r"""Chooses codec and exchange for a model and a link, or advises a plain mean.

  It predicts the seconds of a step for every candidate with every exchange that the
  codec allows: ``forward + backward + exchange``, without overlap. It takes the fastest
  within the error budget. Of those within 2 % it takes the smallest error, and then the
  simplest exchange. Where that gains less than the ``margin`` of a plain mean's step,
  it takes the plain mean. Nothing is trained: accuracy is not measured.

  A codec loses :math:`\omega = E \lVert Q(g) - g \rVert^2 / \lVert g \rVert^2` of a
  gradient. The error of the mean that workers receive also depends on the exchange and
  on N. It is relative to a mean of independent gradients. Over N, it is relative to one
  of equal gradients. A biased codec must keep residuals, which need :math:`\omega < 1`.
  A sparse one lets an element wait for ``1 / density`` steps, which may be a tenth of
  ``steps``. Of the others these are allowed, with N workers:

  ================  ==================================================================
  ``budget``        candidates
  ================  ==================================================================
  ``"none"``        float32 alone
  ``"tight"``       unbiased ones with error / N <= 0.01, and omega <= 0.01 with
                    residuals
  ``"paper"``       those that the study trained to the end, and never found more than
                    0.5 points below float32; with an error of at most 1.25 times that
                    of its ``two_shot`` with 8 workers, or 0.01
  ``"aggressive"``  all
  a float           those with error / N up to that
  ================  ==================================================================

  Bytes are arithmetic of the shapes of messages. The update of the choice is traced
  by :func:`gradcomp.explain`, and a pair that cannot be traced is refused then.

  Args:
    params: the parameters, or their ``jax.ShapeDtypeStruct``, whole.
    workers: N; ``(hosts, chips)`` for two axes.
    link: the link of each worker; for two axes a pair, between hosts and inside them. A
      mesh is measured, see :meth:`gradcomp.cost.Link.measure`, if its devices do not
      share one memory.
    budget: the error that is allowed.
    steps: the steps of the training; without them sparse codecs below 1 % are refused.
    options: times of the passes, speeds, gradients, candidates and margin.

  Returns:
    A :class:`Plan`. Chain its ``transformation(axis_name=...)``.

  Raises:
    ValueError: an argument breaks its rule.
    TypeError: a parameter or a gradient is no array of floats, or ``options`` is no
      :class:`PlanOptions`.

  Example:
    >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    >>> link = gradcomp.cost.Link(latency=50e-6, bytes_per_second=125e6)
    >>> options = PlanOptions(candidates=[gradcomp.cost.CANDIDATES[2]])  # QSGD-4
    >>> found = plan(params, workers=4, link=link, options=options)
    >>> print(found.verdict)
    compress: QSGD-4 two_shot 116.9 ms, dense 805.6 ms: 6.89 x
    >>> tx = optax.chain(found.transformation(axis_name="data"), optax.adam(1e-3))
    >>> fast = gradcomp.cost.Link(latency=5e-6, bytes_per_second=100e9)
    >>> print(plan(params, workers=4, link=fast, options=options).verdict)
    do not: compression loses here: dense 1.0 ms, best QSGD-4 all_gather 14.5 ms;
      QSGD-4 two_shot would win below 48.8 Gbit/s

  References:
    Agarwal et al., `On the Utility of Gradient Compression in Distributed Training
    Systems <https://arxiv.org/abs/2103.00543>`_, 2022
  """
  errors = Errors(checked_budget(budget), sizes_of(workers))
  if steps is not None:
    errors = errors._replace(steps=rules.count("steps", steps))
  options = checks.instance_of("options", PlanOptions, options)
  model = model_of(params)
  if options.gradients is not None:
    errors = errors._replace(gradients=_leaves(options.gradients, model))
  cluster = cluster_of(workers, link)
  passes = options.forward or 0.0, options.backward or 0.0
  setting = Setting(model, errors, _platform(options, link), cluster, passes)
  every = [candidates.as_candidate(x) for x in options.candidates]
  notes = [
    "Times are of the exchange alone: the passes of a step are unknown."
    if options.forward is None
    else "A step is forward, backward and exchange, without overlap.",
    "Error: of the mean, squared, over its square, by a formula from the loss of "
    + ("normal numbers" if options.gradients is None else "the gradients")
    + ". Accuracy is not measured.",
  ]
  # XLA for TPUs, and NCCL, add inside slices and hosts before they send between them.
  ways = [_WAYS[0], *_WAYS[-1:] * (len(errors.sizes) > 1)]
  plain = [setting.row(candidates.DENSE, way) for way in ways]
  dense = min(plain, key=lambda row: row.step_seconds)
  alone, found = "", []
  if errors.workers == 1:
    alone = "one worker sends nothing"
  elif shares_memory(link):
    alone = "emulated devices share one memory, and no link is between them"
  if alone:
    found = [Row(candidate=x, reason=alone) for x in every]
  else:
    speed_of, says = candidates.speeds_of(options.speeds, setting.platform)
    notes.append(says)
    for x in every:
      found += setting.rows(x, speed_of, dense)
  none = f"do not: {alone or f'of {len(every)} candidates none is allowed'}"
  rows, refused = ([x for x in found if bool(x.reason) is y] for y in (False, True))
  while True:
    chosen, verdict = dense, none
    if rows:
      chosen, verdict = _chosen(rows, dense, plain, cluster, options.margin)
    try:
      explanation = setting.explained(chosen)
    except ValueError as error:
      if chosen is dense:
        raise
      rows = [x for x in rows if x is not chosen]
      refused.append(dataclasses.replace(chosen, reason=str(error)))
    else:
      break
  return Plan(
    chosen=chosen,
    rows=(dense, *rows),
    refused=tuple(refused),
    verdict=verdict,
    notes=tuple(notes),
    explanation=explanation,
  )


class Model(NamedTuple):
  """The shapes of parameters."""

  treedef: Any  # of the parameters
  leaves: tuple[jax.ShapeDtypeStruct, ...]  # the shape and dtype of each
  paths: tuple[str, ...]  # the path of each

  @property
  def params(self) -> Any:
    """The parameters' shapes, in their tree."""
    return jax.tree.unflatten(self.treedef, self.leaves)


class Setting(NamedTuple):
  """The facts that all rows of a plan share."""

  model: Model
  errors: Errors
  platform: str  # of the workers
  cluster: Cluster
  passes: tuple[float, float]  # seconds, forward and backward

  @property
  def axis_name(self) -> AxisName:
    """The axes of the workers."""
    return "workers" if len(self.errors.sizes) == 1 else ("between", "inside")

  def rows(
    self,
    candidate: Candidate,
    speed_of: Callable[[Candidate], Speeds | None],
    dense: Row,
  ) -> list[Row]:
    """Returns a candidate's row with each exchange; one if all have one refusal."""
    errors = self.errors
    omega = errors.omega(candidate)
    reason = errors.refusal(candidate, omega)
    speeds = None if reason else speed_of(candidate)
    if speeds is None:
      unknown = f"`speeds` has none of this name; omega is {omega:.3g}"
      return [Row(candidate=candidate, reason=reason or unknown)]
    speed, rows = candidates.by_leaf(speeds), []
    excess: dict[float, str] = {}
    for exchange in _WAYS:
      row = Row(candidate=candidate, exchange=exchange)
      if not (reason := self._dropping(candidate, exchange)):
        lost = errors.of_mean(candidate, omega, exchange)
        try:
          row = self.row(candidate, exchange, lost, speed, dense.step_seconds)
          reason = excess[lost] = errors.excess(candidate, omega, lost)
        except ValueError as error:
          reason = str(error)
      rows.append(dataclasses.replace(row, reason=reason))
    if excess and all(excess.values()):
      return [Row(candidate=candidate, reason=excess[min(excess)])]
    return rows

  def row(
    self,
    candidate: Candidate,
    exchange: Exchange,
    error: float = 0.0,
    speed: Speeds = NO_WORK,
    plain: float = 0.0,
  ) -> Row:
    """Returns a row, beside the seconds of a plain mean; ValueError if refused."""
    axis_name, number = self.axis_name, self.errors.workers
    options: dict[str, Any] = {
      "codec": candidate.codec_for(self.model.paths),
      "exchange": exchange,
      "feedback": "error" if candidate.feedback else None,
    }
    parts = Compression(**options, axis_name=axis_name)
    like = [pairs(x) for x in self.model.leaves]
    place = Place(axis_name, others=[()] * len(like))
    across = place, Workers(axis_name, number, 1 / number)
    with planned_for(self.platform):
      planned = parts.plan(like, paths_of(self.model.params), *across)
      found = sent_by(planned, self.errors.sizes)
    cost = costs.seconds(*found[:2], self.cluster, speed)
    step = costs.step_seconds(*self.passes, [(1.0, cost)], overlap=False)
    return Row(
      candidate=candidate,
      exchange=exchange,
      options=options,
      error=error,
      speed=speed,
      sent=found,
      breakdown=cost,
      step_seconds=step,
      speedup=plain / step if plain and step else 1.0,
    )

  def explained(self, row: Row) -> Explanation:
    """Traces the update of a row; ValueError where that is refused."""
    tx = compress(**row.options, axis_name=self.axis_name)
    workers: Any = self.errors.sizes
    return explain(tx, self.model.params, workers=workers, platform=self.platform)

  def _dropping(self, candidate: Candidate, exchange: Exchange) -> str:
    """Returns the reason why owners must not encode a sparse sum; "" if they may."""
    # Elements that they would drop are delayed again, and no study bounds that.
    added_whole = exchange.of_leaves and not exchange.owners
    if candidate.density is None or added_whole:
      return ""
    union = 1 - (1 - candidate.density) ** self.cluster.workers
    return (
      f"{self.cluster.workers} workers together choose up to {union:.3g} of the "
      f"elements, of which owners would send {candidate.density:.3g}"
    )


def _chosen(
  rows: Sequence[Row],
  dense: Row,
  plain: Sequence[Row],
  cluster: Cluster,
  margin: float,
) -> tuple[Row, str]:
  """Returns the best row, or the plain mean's if it gains too little; and a verdict."""
  row = best(rows)
  if row.step_seconds <= (1 - margin) * dense.step_seconds:
    return row, (
      f"{row.candidate.verdict}: {row.name} {row.time}, dense {dense.time}: "
      f"{row.speedup:.3g} x"
    )
  gain = 1 - row.step_seconds / dense.step_seconds
  times = f"dense {dense.time}, best {row.name} {row.time}"
  if gain > 0:
    return dense, (
      f"do not: compression gains {gain:.1%} of a step here, below the margin of "
      f"{margin:.0%}: {times}"
    )
  # At another rate another way of a plain mean may be the faster one.
  rates = [min(_rate(x, way, cluster) for way in plain) for x in rows]
  rate, slow = max(zip(rates, rows, strict=True), key=lambda pair: pair[0])
  who = "it" if slow is row else slow.name
  below = f"{who} would win below {8e-9 * rate:.3g} Gbit/s"
  if not rate:
    below = "none would win at any rate"
  return dense, f"do not: compression loses here: {times}; {below}"


def best(rows: Sequence[Row]) -> Row:
  """Returns the fastest row; of equally fast ones, the most exact and simplest."""
  least = min(row.step_seconds for row in rows)
  near = [row for row in rows if row.step_seconds <= _ALIKE * least]
  simplest = [way.name for way in _WAYS]
  return min(near, key=lambda row: (row.error, simplest.index(row.way)))


def _rate(row: Row, dense: Row, cluster: Cluster) -> float:
  """Returns the bytes per second below which a row beats a plain mean; 0 for none."""
  if row.sent.bytes_sent >= dense.sent.bytes_sent:
    return 0.0

  def seconds(row: Row, at: Cluster) -> float:
    leaves, collectives, _ = row.sent
    return costs.seconds(leaves, collectives, at, row.speed).total

  gain = lambda at: seconds(dense, at) - seconds(row, at)
  rate = costs.rate_without_gain(gain, cluster)
  return rate if rate < math.inf else 0.0


def _in_ms(seconds: float) -> str:
  """Returns milliseconds with a decimal, or with an exponent for weeks."""
  return f"{1e3 * seconds:.1f}" if seconds < 1e6 else f"{1e3 * seconds:.3g}"


def model_of(params: Any, name: str = "params") -> Model:
  """Returns the model of a tree of arrays of floats, the argument ``name``."""
  params = unboxed(params)  # no box is part of a path: see paths_of in core
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    kind = getattr(leaf, "dtype", type(leaf).__name__)
    if not hasattr(leaf, "shape") or not jnp.issubdtype(kind, jnp.inexact):
      raise TypeError(
        f"`{name}`{keystr(path)} must be an array of floats, whose gradients are "
        f"exchanged, got {kind}; leave out what is not trained."
      )
  like = jax.eval_shape(lambda params: params, params)
  found, treedef = jax.tree_util.tree_flatten_with_path(like)
  model = Model(
    treedef,
    tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in found),
    tuple(keystr(path, simple=True, separator="/") for path, _ in found),
  )
  if not any(math.prod(leaf.shape) for leaf in model.leaves):
    raise ValueError(
      f"`{name}` must have a leaf with an element, got {len(found)} leaves without."
    )
  return model


def _platform(options: PlanOptions, link: Any) -> str:
  """Returns the platform of the workers."""
  named = options.speeds if isinstance(options.speeds, str) else ""
  given = options.platform or candidates.SOURCES.get(named, ("", None))[1]
  on = planned_on(link) if isinstance(link, Mesh) else contextlib.nullcontext()
  with on, planned_for(given):
    return platform()


def _leaves(gradients: Any, model: Model) -> list[np.ndarray]:
  """Returns the leaves of gradients; ValueError unless they are like the model's."""
  like = model_of(gradients, "gradients")
  if like.treedef != model.treedef:
    raise ValueError(
      f"`gradients` must have the tree of `params`, {model.treedef}, got "
      f"{like.treedef}."
    )
  for path, a, b in zip(model.paths, model.leaves, like.leaves, strict=True):
    if a.shape != b.shape:
      raise ValueError(
        f"`gradients` must have the shapes of `params`, of {path} {a.shape}, got "
        f"{b.shape}."
      )
  return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(gradients)]


def sizes_of(workers: Any) -> tuple[int, ...]:
  """Returns the sizes of the axes; raises ValueError for all but a number or a pair."""
  sizes = workers if isinstance(workers, tuple) else (workers,)
  if len(sizes) > 2 or not sizes:
    rule = "an integer of 1 or more, or a pair of them, (between, inside)"
    raise ValueError(f"`workers` must be {rule}, got {workers!r}.")
  return tuple(rules.count("workers", size) for size in sizes)


def shares_memory(link: Any) -> bool:
  """Returns True for a mesh of emulated devices: CPUs of only this process."""
  return isinstance(link, Mesh) and all(
    device.platform == "cpu" and device.process_index == jax.process_index()
    for device in link.devices.flat
  )


def cluster_of(workers: int | tuple[int, int], link: Any) -> Cluster:
  """Returns the workers with their links; ValueError for no link an axis."""
  sizes = sizes_of(workers)
  number = math.prod(sizes)
  links: tuple[Any, ...] = link if isinstance(link, tuple) else (link,)
  if isinstance(link, Mesh):
    if link.size != number:
      raise ValueError(
        f"`workers` must be the {link.size} devices of the mesh, got {workers!r}."
      )
    idle = shares_memory(link) or number == 1
    measured = Link(latency=0.0, bytes_per_second=1.0) if idle else Link.measure(link)
    links = (measured,) * len(sizes)
  if len(links) != len(sizes) or not all(isinstance(x, Link) for x in links):
    raise ValueError(
      "`link` must be a Link, for two axes a pair of them, (between, inside), or a "
      f"mesh to measure, got {link!r} for workers={workers!r}."
    )
  if len(sizes) == 1:
    return Cluster(workers=number, link=links[0])
  return Cluster(workers=number, link=links[0], inside=links[1], group_size=sizes[-1])
