"""The choice of a codec and an exchange for a model and its links."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from gradcomp._src.checks import share_below_1
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.cost.cluster import Cluster
from gradcomp._src.cost.exchange import exchange_seconds
from gradcomp._src.cost.link import Link
from gradcomp._src.cost.planner import compare
from gradcomp._src.cost.planner.candidates import (
  CANDIDATES,
  SOURCES,
  Candidate,
  Given,
  SpeedOf,
  as_candidate,
  speeds_of,
)
from gradcomp._src.cost.planner.compare import CandidateRow, Refusal
from gradcomp._src.cost.planner.errors import BudgetName, Errors, checked_budget
from gradcomp._src.cost.rules import at_least_0, count, instance_of
from gradcomp._src.cost.step import rate_without_gain
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.platforms import (
  Platform,
  planned_for,
  planned_on,
  platform,
)
from gradcomp._src.report.explain import Explanation


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
  """The options of :func:`gradcomp.cost.plan` that are seldom set.

  Attributes:
    forward, backward: the seconds of the passes of a step, both or neither. Without
      them only exchanges are compared.
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

  forward: float | None = None
  backward: float | None = None
  speeds: Given = None
  gradients: Any = None
  candidates: Sequence[Candidate | LeafCodec] = CANDIDATES
  margin: float = 0.05
  platform: Platform | None = None

  def __post_init__(self) -> None:
    share_below_1("margin", self.margin)
    planned_for(self.platform)
    if (self.forward is None) != (self.backward is None):
      raise ValueError(
        "`backward` must be given with `forward`, and only then, got "
        f"forward={self.forward!r} and backward={self.backward!r}."
      )
    for name in ("forward", "backward"):
      if (seconds := getattr(self, name)) is not None:
        object.__setattr__(self, name, at_least_0(name, seconds))
    given: Any = self.candidates
    if isinstance(given, str) or not isinstance(given, Sequence):
      raise ValueError(f"`candidates` must be a sequence of codecs, got {given!r}.")
    object.__setattr__(self, "candidates", tuple(map(as_candidate, given)))


_DEFAULTS = PlanOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The result of :func:`plan`; ``str(plan)`` is a table and a verdict.

  Attributes:
    chosen: the row of the choice: a plain mean where compression is not worth it.
    rows: all candidates that were compared, the plain mean first.
    refused: candidates that could not be chosen, and the reasons.
    verdict: one line, which begins with the advice.
    notes: caveats about the numbers.
  """

  chosen: CandidateRow
  rows: tuple[CandidateRow, ...]
  refused: tuple[Refusal, ...]
  verdict: str
  notes: tuple[str, ...]

  @property
  def explanation(self) -> Explanation:
    """The messages and bytes of the choice, of every leaf."""
    return self.chosen.explanation

  @property
  def predicted(self) -> compare.Predicted:
    """The predicted times of the choice."""
    return self.chosen.predicted

  def transformation(
    self, *, axis_name: AxisName | None
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation to chain in front of an optimizer.

    Args:
      axis_name: the axis of the workers; two, (between, inside), if the plan is for
        two. None means the same as in :func:`gradcomp.compress`.
    """
    row, paths = self.chosen, self.chosen.model.paths
    return compare.transformation(row.candidate, row.exchange, paths, axis_name)

  def __str__(self) -> str:
    lines = [*compare.table(self.rows), *compare.refusals(self.refused), *self.notes]
    return "\n".join([*lines, self.verdict])


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

  More than eight leaves are joined to fewer for the comparison. The choice is always
  predicted with the leaves as they are.

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
    errors = errors._replace(steps=count("steps", steps))
  options = instance_of("options", PlanOptions, options)
  model = compare.model_of(params)
  if options.gradients is not None:
    errors = errors._replace(gradients=_leaves(options.gradients, model))
  cluster = cluster_of(workers, link)
  setting = compare.Setting(
    model=model,
    workers=workers,
    platform=_platform(options, link),
    cluster=cluster,
    forward=options.forward or 0.0,
    backward=options.backward or 0.0,
  )
  candidates = [as_candidate(x) for x in options.candidates]
  notes = [
    "Times are of the exchange alone: the passes of a step are unknown."
    if options.forward is None
    else "A step is forward, backward and exchange, without overlap.",
    "Error: of the mean, squared, over its square, by a formula from the loss of "
    + ("normal numbers" if options.gradients is None else "the gradients")
    + ". Accuracy is not measured.",
  ]
  dense = setting.dense
  rows: list[CandidateRow] = []
  chosen, alone = dense, ""
  if errors.workers == 1:
    alone = "one worker sends nothing"
  elif shares_memory(link):
    alone = "emulated devices share one memory, and no link is between them"
  if alone:
    refused = [Refusal(x.name, "", alone) for x in candidates]
    verdict = f"do not: {alone}"
  else:
    speed_of, says = speeds_of(options.speeds, setting.platform)
    notes.append(says)
    rows, refused = _compared(setting, candidates, errors, speed_of)
    verdict = f"do not: of {len(candidates)} candidates none is allowed"
  if rows:
    chosen, verdict = _chosen(rows, setting, options.margin)
  if any(row.model is not model for row in rows):
    leaves = len(model.leaves)
    notes.append(f"Rows behind the best are of few leaves in place of {leaves}.")
  return Plan(
    chosen=chosen,
    rows=(dense, *rows),
    refused=tuple(refused),
    verdict=verdict,
    notes=tuple(notes),
  )


def _compared(
  setting: compare.Setting,
  candidates: Sequence[Candidate],
  errors: Errors,
  speed_of: Callable[[Candidate], SpeedOf | None],
) -> tuple[list[CandidateRow], list[Refusal]]:
  """Returns the allowed rows, the best one for the model as it is, and the refusals."""
  rows: list[CandidateRow] = []
  refused: list[Refusal] = []
  for candidate in candidates:
    omega = errors.omega(candidate)
    reason = errors.refusal(candidate, omega)
    speed = None if reason else speed_of(candidate)
    if speed is None:
      unknown = f"`speeds` has none of this name; omega is {omega:.3g}"
      refused.append(Refusal(candidate.name, "", reason or unknown))
      continue
    found, others = setting.rows(candidate, omega, errors, speed)
    rows += found
    refused += others
  while rows and (row := compare.best(rows)).model is not setting.model:
    exact = setting.exact(row)
    rows = [exact if x is row else x for x in rows]
  return rows, refused


def _chosen(
  rows: Sequence[CandidateRow], setting: compare.Setting, margin: float
) -> tuple[CandidateRow, str]:
  """Returns the best row, or the plain mean's if it gains too little; and a verdict."""
  row, dense = compare.best(rows), setting.dense
  if row.predicted.step_seconds <= (1 - margin) * dense.predicted.step_seconds:
    return row, compare.chosen(row, dense)
  # At another rate another way of a plain mean may be the faster one.
  rate_of = lambda x: min(_rate(x, way, setting.cluster) for way in setting.plain)
  rates = [rate_of(x) for x in rows]
  rate, other = max(zip(rates, rows, strict=True), key=lambda pair: pair[0])
  return dense, compare.refused(row, dense, margin, other, rate)


def _rate(row: CandidateRow, dense: CandidateRow, cluster: Cluster) -> float:
  """Returns the bytes per second below which a row beats a plain mean; 0 for none."""
  if row.explanation.bytes_sent >= dense.explanation.bytes_sent:
    return 0.0

  def seconds(row: CandidateRow, at: Cluster) -> float:
    return exchange_seconds(row.explanation, at, row.speed).total

  rate = rate_without_gain(lambda at: seconds(dense, at) - seconds(row, at), cluster)
  return rate if rate < math.inf else 0.0


def _platform(options: PlanOptions, link: Any) -> str:
  """Returns the platform of the workers."""
  named = SOURCES.get(options.speeds) if isinstance(options.speeds, str) else None
  given = options.platform or (named and named.platform)
  on = planned_on(link) if isinstance(link, Mesh) else contextlib.nullcontext()
  with on, planned_for(given):
    return platform()


def _leaves(gradients: Any, model: compare.SampledModel) -> list[np.ndarray]:
  """Returns the leaves of gradients; ValueError unless they are like the model's."""
  like = compare.model_of(gradients, "gradients")
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
  return tuple(count("workers", size) for size in sizes)


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
