"""The choice of a codec and an exchange for a model and its links."""

import contextlib
import dataclasses
import functools
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
from gradcomp._src.core import border, compression, transform
from gradcomp._src.cost import exchange as costs
from gradcomp._src.cost import rules
from gradcomp._src.cost.link import Cluster, Link
from gradcomp._src.cost.planner import candidates, errors
from gradcomp._src.cost.planner.candidates import Candidate
from gradcomp._src.cost.planner.sent import sent_by
from gradcomp._src.exchange.auto import as_exchange
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh import axes, study, trees, types
from gradcomp._src.report.collectives import aligned
from gradcomp._src.report.explain import Explanation, explain

# The simplest first, which wins where times and errors are equal.
_WAYS: Any = [*map(as_exchange, "psum all_gather two_shot ring hierarchical".split())]
_AXES: Any = {1: "workers", 2: ("between", "inside")}  # by their number
_ALIKE = 1.02  # times of steps whose ratio is smaller count as equal
_HEADER = "codec,exchange,bytes,encode ms,wire ms,decode ms,step ms,speed-up,error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(checks.Checked):
  """The options of :func:`gradcomp.cost.plan` that are seldom set.

  Attributes:
    forward: the seconds of the forward pass; without passes only exchanges are
      compared. Default: None.
    backward: those of the backward pass, given with ``forward`` only. Default: None.
    speeds: the speeds of codecs: CodecSpeeds by the names of candidates, one for all, a
      function from the codec of a leaf to its speeds, or ``"measure"``. By default the
      package's, which ``"cpu"``, ``"H100"`` and ``"TPU v5e"`` (XLA's estimates) name.
    optimizer: that of the training, ``"sgd"`` or ``"adam"``, for ``budget="paper"``. By
      default records of both count.
    gradients: gradients like the parameters, to measure errors on, which compiles each
      codec; normal numbers by default.
    candidates: candidates, or codecs; by default ``PlanOptions.candidates``.
    margin: the part of a step that compression must gain, from 0 to below 1.
    platform: as for :func:`gradcomp.explain`; by default that of ``speeds``, or a mesh.

  Raises:
    ValueError: a field breaks its rule.
  """

  forward: float | None = checks.field(None, checks.optional(rules.SECONDS))
  backward: float | None = checks.field(None, checks.optional(rules.SECONDS))
  speeds: candidates.Given = None
  optimizer: errors.Optimizer | None = checks.field(None, errors.OPTIMIZER)
  gradients: Any = None
  candidates: Sequence[Candidate | LeafCodec] = candidates.CANDIDATES
  margin: float = checks.field(0.05, checks.BELOW_1)
  platform: study.Platform | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    study.planned_for(self.platform)
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


class Row(NamedTuple):
  """A candidate with an exchange: its predicted times, or the reason to refuse it."""

  candidate: Candidate
  exchange: Exchange | None = None  # None in a refusal of all
  reason: str = ""  # to refuse it, with its number; "" for a row that was compared
  error: float = 0.0  # of the mean, squared, over its square
  options: Mapping[str, Any] = {}  # of `compress`: codec, exchange and feedback
  seconds: Callable[[Cluster], costs.Breakdown] | None = None  # over any links
  bytes_sent: int = 0  # that the worker sends in a step, at most, rounded up
  breakdown: costs.Breakdown = costs.Breakdown()  # the seconds of its exchange
  step_seconds: float = 0.0  # of a step; of the exchange if the passes are unknown
  speedup: float = 1.0  # the step of a plain mean in float32, over this one

  @property
  def name(self) -> str:
    """The names of the codec and the exchange."""
    return f"{self.candidate.name} {self.way}".strip()

  @property
  def way(self) -> str:
    """The name of the exchange; "" for a refusal of all."""
    return "" if self.exchange is None else self.exchange.name


class Plan(NamedTuple):
  """The result of :func:`plan`; ``str(plan)`` is a table and a verdict."""

  chosen: Row  # a plain mean where compression is not worth it
  rows: tuple[Row, ...]  # all pairs that were compared, the plain mean first
  refused: tuple[Row, ...]  # those that could not be chosen, with the reasons
  verdict: str  # one line, which begins with the advice
  notes: tuple[str, ...]  # caveats about the numbers
  explanation: Explanation  # the messages and bytes of the choice, of every leaf

  def transformation(
    self, *, axis_name: axes.AxisName | None
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation to chain before an optimizer.

    Args:
      axis_name: the axis of the workers; two, (between, inside), if the plan is for
        two. None means the same as in :func:`gradcomp.compress`.
    """
    return transform.compress(**self.chosen.options, axis_name=axis_name)

  def __str__(self) -> str:
    cells = [_HEADER.split(",")]
    for x in sorted(self.rows, key=lambda row: row.step_seconds):
      cost, names = x.breakdown, (x.candidate.name, x.way)
      parts = cost.encode, cost.wire_seconds, cost.add + cost.decode, x.step_seconds
      gain = f"{x.speedup:.2f}", f"{x.error:.2g}"
      cells.append([*names, f"{x.bytes_sent:,}", *map(_in_ms, parts), *gain])
    lines = aligned(cells)
    whole = [x for x in self.refused if x.exchange is None]
    lines += [f"refused {x.name}: {x.reason}." for x in whole]
    if number := len(self.refused) - len(whole):
      lines += [f"refused {number} other pairs of codec and exchange: see `refused`."]
    return "\n".join([*lines, *self.notes, self.verdict])


def plan(
  params: Any,
  *,
  workers: int | tuple[int, int],
  link: Link | tuple[Link, Link] | Mesh,
  budget: errors.BudgetName | float = "paper",
  steps: int | None = None,
  options: PlanOptions = _DEFAULTS,
) -> Plan:
  r"""Returns a codec and an exchange for a model and a link, or advises a plain mean.

  It predicts the seconds of a step, ``forward + backward + exchange`` without overlap,
  for every candidate with every exchange that the codec allows, and takes the fastest
  within the error budget. Of those within 2 % it takes the smallest error, and then the
  simplest exchange; the plain mean, if that gains less than the ``margin`` of its step.
  Accuracy is not measured.

  A codec loses :math:`\omega = E \lVert Q(g) - g \rVert^2 / \lVert g \rVert^2` of a
  gradient. The error of the mean also depends on the exchange and on N. It is relative
  to a mean of independent gradients; over N, to one of equal gradients. A biased codec
  must keep residuals, which need :math:`\omega < 1`. In a sparse one an element waits
  for ``1 / density`` steps, at most a tenth of ``steps``. The budgets allow:

  ================  ==================================================================
  ``budget``        candidates
  ================  ==================================================================
  ``"none"``        float32 alone
  ``"tight"``       unbiased ones with error / N <= 0.01, and omega <= 0.01 with
                    residuals
  ``"paper"``       those that the study trained, if no record shows a loss above 0.5
                    points; with an error of at most 1.25 times that of its ``two_shot``
                    with 8 workers, or 0.01
  ``"aggressive"``  all
  a float           those with error / N up to that
  ================  ==================================================================

  A record has three seeds or more, and shows a loss if all of its interval of 95 %,
  paired by seeds, is below float32. Sparse codecs need records of two tasks. Of each
  task the nearest records count: those of the ``optimizer``, if there are any, and then
  those nearest to N. Notes name the candidates without a near one. Bytes are arithmetic
  of shapes; :func:`gradcomp.explain` traces the choice, and refuses what it cannot.

  Args:
    params: the parameters, or their ``jax.ShapeDtypeStruct``, whole.
    workers: N; ``(hosts, chips)`` for two axes.
    link: the link of each worker; for two axes a pair, between hosts and inside them. A
      mesh without shared memory is measured by :meth:`gradcomp.cost.Link.measure`.
    budget: the error that is allowed.
    steps: the steps of the training; without them sparse codecs below 1 % are refused.
    options: the optimizer, times of the passes, speeds, gradients, candidates, margin.

  Raises:
    ValueError: an argument breaks its rule.
    TypeError: a leaf is no array of floats, or ``options`` are no :class:`PlanOptions`.

  Example:
    >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    >>> link = gradcomp.cost.Link(latency=50e-6, bytes_per_second=125e6)
    >>> options = PlanOptions(candidates=PlanOptions.candidates[2:3])  # QSGD-4
    >>> found = plan(params, workers=4, link=link, options=options)
    >>> print(found.verdict)
    compress: QSGD-4 two_shot 116.9 ms, dense 805.6 ms: 6.89 x
    >>> tx = optax.chain(found.transformation(axis_name="data"), optax.adam(1e-3))
    >>> fast = gradcomp.cost.Link(latency=5e-6, bytes_per_second=100e9)
    >>> print(plan(params, workers=4, link=fast, options=options).verdict)
    do not: compression loses here: dense 1.0 ms, best QSGD-4 all_gather 14.5 ms;
      QSGD-4 two_shot would win below 48.8 Gbit/s

  References:
    Agarwal et al., `2022 <https://arxiv.org/abs/2103.00543>`_
  """
  options = checks.instance_of("options", PlanOptions, options)
  model, given = shapes_of(params), options.gradients
  sizes, cluster, alone = cluster_of(workers, link)
  budget = errors.checked_budget(budget)
  steps = None if steps is None else rules.count("steps", steps)
  given = None if given is None else _leaves(given, model)
  limits = errors.Errors(budget, sizes, steps, given, options.optimizer, model)
  platform, axis_name = _platform(options, link), _AXES[len(sizes)]
  like = jax.tree.map(border.pairs, model)
  across = types.Place(axis_name, limits.workers, others=[()] * len(named(model)))

  def timed(row: Row, speeds: costs.Speeds = costs.NO_WORK) -> Row:
    """Returns a row with its messages and seconds; ValueError if they are refused."""
    codec = row.candidate.codec_for([path for path, _ in named(model)])
    feedback = "error" if row.candidate.feedback else None
    made: Any = {"codec": codec, "exchange": row.exchange, "feedback": feedback}
    with study.planned_for(platform):
      planned = compression.Compression(**made, axis_name=axis_name).plan(like, across)
      leaves, sends, fitting = sent_by(planned, sizes)
    nbytes = math.ceil(sum((x.times * x.exact_bytes_sent for x in sends), fitting))
    seconds = functools.partial(costs.seconds, leaves, sends, speeds)
    row = row._replace(options=made, seconds=seconds, bytes_sent=nbytes)
    cost, passes = seconds(cluster), (options.forward or 0.0, options.backward or 0.0)
    return row._replace(breakdown=cost, step_seconds=sum(passes) + cost.total)

  # XLA for TPUs, and NCCL, add inside slices and hosts before they send between them.
  ways = [_WAYS[0], *_WAYS[-1:] * (len(sizes) > 1)]
  plain = [timed(Row(candidates.DENSE, way)) for way in ways]
  dense = min(plain, key=lambda row: row.step_seconds)
  every: Any = options.candidates
  on: Any = {"workers": sizes, "platform": platform}
  of = "normal numbers" if given is None else "the gradients"
  notes = [
    "Times are of the exchange alone: the passes of a step are unknown."
    if options.forward is None
    else "A step is forward, backward and exchange, without overlap.",
    f"Error: of the mean, squared, over its square, by a formula from the loss of {of}."
    " Accuracy is not measured.",
  ]
  found = [Row(x, reason=alone) for x in every]
  if not alone:
    speeds, says = candidates.speeds_of(options.speeds, platform)
    notes.append(says)
    found = [row for x in every for row in _rows(x, limits, speeds, timed)]
  gain = lambda x: dense.step_seconds / x.step_seconds if x.step_seconds else 1.0
  found = [x._replace(speedup=gain(x)) for x in found]
  rows, refused = ([x for x in found if bool(x.reason) is y] for y in (False, True))
  while True:
    none = alone or f"of {len(every)} candidates none is allowed"
    chosen, verdict = dense, f"do not: {none}"
    if rows:
      chosen, verdict = _chosen(rows, plain, cluster, options.margin)
    tx = transform.compress(**chosen.options, axis_name=axis_name)
    try:  # which refuses what cannot be traced
      traced = explain(tx, model, **on)
      break
    except ValueError as error:
      if chosen is dense:
        raise
      rows = [x for x in rows if x is not chosen]
      refused.append(chosen._replace(reason=str(error)))
  notes[2:2] = limits.notes(chosen.candidate, [row.candidate for row in rows])
  return Plan(chosen, (dense, *rows), tuple(refused), verdict, tuple(notes), traced)


def _rows(
  candidate: Candidate, limits: errors.Errors, given: Any, timed: Callable[..., Row]
) -> list[Row]:
  """Returns a candidate's row with each exchange; one if all have one refusal."""
  omega = limits.omega(candidate)
  if reason := limits.refusal(candidate, omega):
    return [Row(candidate, reason=reason)]
  if (speeds := candidates.speeds_for(candidate, given)) is None:
    unknown = f"`speeds` has none of this name; omega is {omega:.3g}"
    return [Row(candidate, reason=unknown)]
  # Elements that owners of a sparse sum would drop are delayed again, and no study
  # bounds that.
  rows, excess, dropping = [], {}, ""
  if (share := candidate.density) is not None:
    union = f"up to {1 - (1 - share) ** limits.workers:.3g} of the elements"
    who = f"{limits.workers} workers together choose {union}"
    dropping = f"{who}, and owners would send {share:.3g}"
  for way in _WAYS:
    row = Row(candidate, way, dropping * (way.owners or not way.of_leaves))
    if not row.reason:
      lost = errors.mean_error(candidate, omega, way, limits.sizes)
      try:
        row = timed(row._replace(error=lost), speeds)
        excess[lost] = limits.excess(candidate, omega, lost)
        row = row._replace(reason=excess[lost])
      except ValueError as error:
        row = row._replace(error=lost, reason=str(error))
    rows.append(row)
  if excess and all(excess.values()):
    return [Row(candidate, reason=excess[min(excess)])]
  return rows


def _chosen(
  rows: Sequence[Row], plain: Sequence[Row], cluster: Cluster, margin: float
) -> tuple[Row, str]:
  """Returns the best row, or the plain mean's if it gains too little; and why."""
  row, dense = best(rows), min(plain, key=lambda row: row.step_seconds)
  ours, theirs = (f"{_in_ms(x.step_seconds)} ms" for x in (row, dense))
  if row.step_seconds <= (1 - margin) * dense.step_seconds:
    times = f"{row.name} {ours}, dense {theirs}"
    return row, f"{row.candidate.verdict}: {times}: {row.speedup:.3g} x"
  times = f"dense {theirs}, best {row.name} {ours}"
  if (gain := 1 - row.step_seconds / dense.step_seconds) > 0:
    small = f"gains {gain:.1%} of a step here, below the margin of {margin:.0%}"
    return dense, f"do not: compression {small}: {times}"
  # At another rate another way of a plain mean may be the faster one.
  rates = [min(_rate(x, way, cluster) for way in plain) for x in rows]
  rate, slow = max(zip(rates, rows, strict=True), key=lambda pair: pair[0])
  who = "it" if slow is row else slow.name
  below = f"{who} would win below {8e-9 * rate:.3g} Gbit/s"
  below = below if rate else "none would win at any rate"
  return dense, f"do not: compression loses here: {times}; {below}"


def best(rows: Sequence[Row]) -> Row:
  """Returns the fastest row; of equally fast ones, the most exact and simplest."""
  least = min(row.step_seconds for row in rows)
  near = [row for row in rows if row.step_seconds <= _ALIKE * least]
  return min(near, key=lambda row: (row.error, _WAYS.index(row.exchange)))


def _rate(row: Any, dense: Any, cluster: Cluster) -> float:
  """Returns the bytes per second below which a row beats a plain mean; 0 for none."""
  gain = lambda at: dense.seconds(at).total - row.seconds(at).total
  rate = costs.rate_without_gain(gain, cluster)
  return rate if row.bytes_sent < dense.bytes_sent and rate < math.inf else 0.0


def _in_ms(seconds: float) -> str:
  """Returns milliseconds with a decimal, or with an exponent for weeks."""
  return f"{1e3 * seconds:.1f}" if seconds < 1e6 else f"{1e3 * seconds:.3g}"


def shapes_of(params: Any, name: str = "params") -> Any:
  """Returns the shapes in a tree of arrays of floats, the argument ``name``."""
  params = trees.unboxed(params)  # no box is part of a path: see paths_of in core
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    kind = getattr(leaf, "dtype", type(leaf).__name__)
    if not hasattr(leaf, "shape") or not jnp.issubdtype(kind, jnp.inexact):
      raise TypeError(
        f"`{name}`{keystr(path)} must be an array of floats, whose gradients are "
        f"exchanged, got {kind}; leave out what is not trained."
      )
  like = jax.eval_shape(lambda tree: tree, params)
  sizes = [leaf.size for leaf in jax.tree.leaves(like)]
  if not any(sizes):
    raise ValueError(
      f"`{name}` must have a leaf with an element, got {len(sizes)} leaves without."
    )
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)


def named(model: Any) -> list[tuple[str, jax.ShapeDtypeStruct]]:
  """Returns the path and the shape of each leaf."""
  found = jax.tree_util.tree_leaves_with_path(model)
  return [(keystr(path, simple=True, separator="/"), leaf) for path, leaf in found]


def _platform(options: PlanOptions, link: Any) -> str:
  """Returns the platform of the workers."""
  named = options.speeds if isinstance(options.speeds, str) else ""
  given = options.platform or candidates.SOURCES.get(named, ("", None))[1]
  on = study.planned_on if isinstance(link, Mesh) else contextlib.nullcontext
  with on(link), study.planned_for(given):
    return study.platform()


def _leaves(gradients: Any, model: Any) -> list[np.ndarray]:
  """Returns the leaves of gradients; ValueError unless they are like the model's."""
  like = shapes_of(gradients, "gradients")
  structures: Any = map(jax.tree.structure, (model, like))
  whole, own = structures
  if own != whole:
    raise ValueError(f"`gradients` must have the tree of `params`, {whole}, got {own}.")
  for (path, a), (_, b) in zip(named(model), named(like), strict=True):
    if a.shape != b.shape:
      rule = f"the shapes of `params`, of {path} {a.shape}"
      raise ValueError(f"`gradients` must have {rule}, got {b.shape}.")
  return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(gradients)]


def cluster_of(workers: Any, link: Any) -> tuple[tuple[int, ...], Cluster, str]:
  """Returns the sizes of the axes, the workers, and why they send nothing, or ""."""
  sizes, _ = axes.sizes_of(workers)
  number = math.prod(sizes)
  alone = "one worker sends nothing" if number == 1 else ""
  links: tuple[Any, ...] = link if isinstance(link, tuple) else (link,)
  if isinstance(link, Mesh):
    if link.size != number:
      raise ValueError(
        f"`workers` must be the {link.size} devices of the mesh, got {workers!r}."
      )
    own = jax.process_index()
    near = lambda device: device.platform == "cpu" and device.process_index == own
    if not alone and all(map(near, link.devices.flat)):
      alone = "emulated devices share one memory, and no link is between them"
    measured = Link(latency=0.0, bytes_per_second=1.0) if alone else Link.measure(link)
    links = (measured,) * len(sizes)
  if len(links) != len(sizes) or not all(isinstance(x, Link) for x in links):
    raise ValueError(
      "`link` must be a Link, for two axes a pair of them, (between, inside), or a "
      f"mesh to measure, got {link!r} for workers={workers!r}."
    )
  inside = {"inside": links[1], "group_size": sizes[1]} if len(sizes) > 1 else {}
  return sizes, Cluster(workers=number, link=links[0], **inside), alone
