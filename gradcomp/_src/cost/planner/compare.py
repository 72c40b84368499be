"""The rows of a plan: each candidate with each exchange, and their predicted times."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from gradcomp._src.core.transform import compress
from gradcomp._src.cost.cluster import Cluster, CodecSpeed
from gradcomp._src.cost.exchange import Breakdown, exchange_seconds
from gradcomp._src.cost.planner.candidates import DENSE, Candidate, SpeedOf, is_last
from gradcomp._src.cost.planner.errors import Errors
from gradcomp._src.cost.step import step_seconds
from gradcomp._src.exchange.hierarchical import Hierarchical
from gradcomp._src.exchange.one_stage import AllGather, AllReduce
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.exchange.ring import Ring
from gradcomp._src.exchange.two_shot import TwoShot
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.trees import unboxed
from gradcomp._src.report.collectives import aligned
from gradcomp._src.report.explain import Explanation, explain

_FEW = 8  # leaves that are not worth joining
# Elements from which leaves are hardly ever so small that they travel in float32, and
# elements from which a sparse message has more slots than elements to send.
_SIZES = (1 << 15, 1 << 20)

Leaf = jax.ShapeDtypeStruct
WorkerCount = int | tuple[int, int]  # N, or the sizes of two axes


class SampledModel(NamedTuple):
  """The shapes of parameters, hashable."""

  treedef: Any  # of the parameters
  leaves: tuple[Leaf, ...]  # the shape and dtype of each
  paths: tuple[str, ...]  # the path of each

  @property
  def params(self) -> Any:
    """The parameters' shapes, in their tree."""
    return jax.tree.unflatten(self.treedef, self.leaves)

  def joined(self, *, sparse: bool) -> "SampledModel":
    """Returns a model with the same elements in few leaves, to be traced fast."""
    # The fillings of rows are lost, so that bytes come out too low, if anything: the
    # row that seems best is traced anew. Output layers stay apart, and with `sparse`
    # leaves of 2**20 elements and more do, for which messages have more slots.
    if len(self.leaves) <= _FEW:
      return self
    kinds: dict[Any, list[tuple[str, int]]] = {}
    for path, leaf in zip(self.paths, self.leaves, strict=True):
      size = math.prod(leaf.shape)
      place = sum(size >= bound for bound in _SIZES[: 1 + sparse])
      kinds.setdefault((is_last(path), place, leaf.dtype), []).append((path, size))
    joined: dict[str, Leaf] = {}
    for (_, place, dtype), found in kinds.items():
      total = sum(size for _, size in found)
      count = -(-total // (_SIZES[-1] - 1)) if sparse and place < len(_SIZES) else 1
      for number in range(count):  # all of one shape, which is traced once
        joined[f"{found[0][0]}/{number}"] = Leaf((-(-total // count),), dtype)
    return model_of(joined)


def model_of(params: Any, name: str = "params") -> SampledModel:
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
  model = SampledModel(
    treedef,
    tuple(Leaf(leaf.shape, leaf.dtype) for _, leaf in found),
    tuple(keystr(path, simple=True, separator="/") for path, _ in found),
  )
  if not any(math.prod(leaf.shape) for leaf in model.leaves):
    raise ValueError(
      f"`{name}` must have a leaf with an element, got {len(found)} leaves without."
    )
  return model


def transformation(
  candidate: Candidate, exchange: Exchange, paths: Sequence[str], axis: AxisName | None
) -> optax.GradientTransformationExtraArgs:
  """Returns the exchange of gradients by a candidate; ValueError if it is refused."""
  return compress(
    candidate.codec_for(paths),
    axis_name=axis,
    exchange=exchange,
    feedback="error" if candidate.feedback else None,
  )


@functools.lru_cache(maxsize=1024)
def explained(
  candidate: Candidate,
  exchange: Exchange,
  model: SampledModel,
  workers: WorkerCount,
  platform: str,
) -> Explanation:
  """Explains a candidate: its messages and their bytes; ValueError where refused."""
  axis_name = ("between", "inside") if isinstance(workers, tuple) else "workers"
  # Tracing without kernels for GPUs takes half the time, and the bytes are the same.
  plain = candidate.without_kernels()
  tx = transformation(plain, exchange, model.paths, axis_name)
  return explain(tx, model.params, workers=workers, platform=platform)


# The simplest first, which wins where times and errors are equal.
_WAYS: Sequence[Exchange] = AllReduce(), AllGather(), TwoShot(), Ring(), Hierarchical()
_ALIKE = 1.02  # times of steps whose ratio is smaller count as equal


class Predicted(NamedTuple):
  """The predicted times of a step.

  Attributes:
    breakdown: the seconds of its exchange.
    step_seconds: of the step; of only the exchange if the passes are unknown.
    speedup: the step of a plain mean in float32, over this one.
  """

  breakdown: Breakdown
  step_seconds: float
  speedup: float


class Refusal(NamedTuple):
  """A candidate that a plan may not choose."""

  codec: str  # its name
  exchange: str  # its name; "" for all
  reason: str  # with its number


@dataclasses.dataclass(frozen=True)
class CandidateRow:
  """A candidate with an exchange."""

  candidate: Candidate
  exchange: Exchange
  error: float  # of the mean, see ``errors.mean_error``
  model: SampledModel  # the leaves of ``explanation``
  speed: SpeedOf  # the speeds of its codec
  explanation: Explanation  # its messages and bytes
  predicted: Predicted

  @property
  def name(self) -> str:
    """The names of the codec and the exchange."""
    return f"{self.candidate.name} {self.exchange.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """The model, the workers and the passes that all rows of a plan share."""

  model: SampledModel
  workers: WorkerCount
  platform: str  # of the workers
  cluster: Cluster
  forward: float  # seconds of the pass
  backward: float  # seconds of the pass

  @functools.cached_property
  def plain(self) -> list[CandidateRow]:
    """The rows of a plain mean in float32, by the ways in which backends send it."""
    # XLA for TPUs, and NCCL, add inside slices and hosts before they send between them.
    ways: list[Exchange] = [AllReduce()]
    if isinstance(self.workers, tuple):
      ways.append(Hierarchical())
    return [self._row(DENSE, way, 0.0, self.model, _free) for way in ways]

  @property
  def dense(self) -> CandidateRow:
    """The faster row of a plain mean."""
    return min(self.plain, key=lambda row: row.predicted.step_seconds)

  def rows(
    self, candidate: Candidate, omega: float, errors: Errors, speed: SpeedOf
  ) -> tuple[list[CandidateRow], list[Refusal]]:
    """Returns a candidate's row with every exchange, and the refusals of others."""
    rows, refused = [], []
    excess: dict[float, str] = {}
    model = self.model
    if candidate.by_size:
      model = model.joined(sparse=candidate.density is not None)
    for exchange in _WAYS:
      reason = self._dropping(candidate, exchange)
      if not reason:
        lost = errors.of_mean(candidate, omega, exchange)
        try:
          row = self._row(candidate, exchange, lost, model, speed)
          reason = errors.excess(candidate, omega, lost)
        except ValueError as error:
          reason = str(error)
        else:
          excess[lost] = reason
      if reason:
        refused.append(Refusal(candidate.name, exchange.name, reason))
      else:
        rows.append(row)
    if excess and all(excess.values()):
      refused = [Refusal(candidate.name, "", excess[min(excess)])]
    return rows, refused

  def exact(self, row: CandidateRow) -> CandidateRow:
    """Returns a row for the leaves as they are, unjoined."""
    return self._row(row.candidate, row.exchange, row.error, self.model, row.speed)

  def _row(
    self,
    candidate: Candidate,
    exchange: Exchange,
    error: float,
    model: SampledModel,
    speed: SpeedOf,
  ) -> CandidateRow:
    place = self.workers, self.platform
    explanation = explained(candidate, cast(Hashable, exchange), model, *place)
    cost = exchange_seconds(explanation, self.cluster, speed)
    step = step_seconds(self.forward, self.backward, [(1.0, cost)], overlap=False)
    speedup = 1.0
    if step and speed is not _free:
      speedup = self.dense.predicted.step_seconds / step
    predicted = Predicted(cost, step, speedup)
    return CandidateRow(
      candidate, exchange, error, model, speed, explanation, predicted
    )

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


def best(rows: Sequence[CandidateRow]) -> CandidateRow:
  """Returns the fastest row; of equally fast ones, the most exact and simplest."""
  least = min(row.predicted.step_seconds for row in rows)
  near = [row for row in rows if row.predicted.step_seconds <= _ALIKE * least]
  places = dict(zip((x.way for x in _WAYS), itertools.count()))
  return min(near, key=lambda row: (row.error, places[row.exchange.way]))


def _free(codec: object) -> CodecSpeed:
  """Returns the speed of a plain mean, which encodes nothing."""
  return CodecSpeed(encode=0.0, decode=0.0, add=0.0)


_HEADER = (
  *("codec", "exchange", "bytes", "encode ms", "wire ms", "decode ms"),
  *("step ms", "speed-up", "error"),
)


def chosen(row: CandidateRow, dense: CandidateRow) -> str:
  """Returns the verdict for a candidate that is faster than a plain mean."""
  return (
    f"{row.candidate.verdict}: {row.name} {_ms(row)}, dense {_ms(dense)}: "
    f"{row.predicted.speedup:.3g} x"
  )


def refused(
  row: CandidateRow, dense: CandidateRow, margin: float, slow: CandidateRow, rate: float
) -> str:
  """Returns the verdict where the best candidate gains less than ``margin``."""
  # `slow` beats a plain mean up to the highest `rate`, in bytes per second, or 0.
  gain = 1 - row.predicted.step_seconds / dense.predicted.step_seconds
  times = f"dense {_ms(dense)}, best {row.name} {_ms(row)}"
  if gain > 0:
    return (
      f"do not: compression gains {gain:.1%} of a step here, below the margin of "
      f"{margin:.0%}: {times}"
    )
  who = "it" if slow is row else slow.name
  below = f"{who} would win below {8e-9 * rate:.3g} Gbit/s"
  if not rate:
    below = "none would win at any rate"
  return f"do not: compression loses here: {times}; {below}"


def table(rows: Sequence[CandidateRow]) -> list[str]:
  """Returns the lines of the table, the fastest row first."""
  rows = sorted(rows, key=lambda row: row.predicted.step_seconds)
  return aligned([_HEADER, *map(_cells, rows)], right=range(2, len(_HEADER)))


def refusals(refused: Sequence[Refusal]) -> list[str]:
  """Returns a line for each candidate that is refused, and one for the other pairs."""
  whole = [x for x in refused if not x.exchange]
  lines = [f"refused {x.codec}: {x.reason}." for x in whole]
  if count := len(refused) - len(whole):
    lines.append(f"refused {count} other pairs of codec and exchange: see `refused`.")
  return lines


def _cells(row: CandidateRow) -> list[str]:
  predicted = row.predicted
  cost = predicted.breakdown
  parts = (cost.encode, cost.wire_seconds, cost.add + cost.decode)
  return [
    row.candidate.name,
    row.exchange.name,
    f"{math.ceil(row.explanation.bytes_sent):,}",
    *map(_in_ms, (*parts, predicted.step_seconds)),
    f"{predicted.speedup:.2f}",
    f"{row.error:.2g}",
  ]


def _ms(row: CandidateRow) -> str:
  return f"{_in_ms(row.predicted.step_seconds)} ms"


def _in_ms(seconds: float) -> str:
  """Returns milliseconds with a decimal, or with an exponent for weeks."""
  return f"{1e3 * seconds:.1f}" if seconds < 1e6 else f"{1e3 * seconds:.3g}"
