"""Predicts what candidates cost, and chooses one of them."""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple, cast

from gradcomp._src.cost.cluster import Cluster, CodecSpeed
from gradcomp._src.cost.exchange import Breakdown, exchange_seconds
from gradcomp._src.cost.planner.candidates import DENSE, Candidate
from gradcomp._src.cost.planner.errors import Errors
from gradcomp._src.cost.planner.model import Model, explained
from gradcomp._src.cost.planner.speeds import SpeedOf
from gradcomp._src.cost.step import step_seconds
from gradcomp._src.exchange.all_gather import AllGather
from gradcomp._src.exchange.all_reduce import AllReduce
from gradcomp._src.exchange.hierarchical import Hierarchical
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.exchange.ring import Ring
from gradcomp._src.exchange.two_shot import TwoShot
from gradcomp._src.report.explain import Explanation

# The simplest first, which wins where times and errors are equal.
_EXCHANGES: tuple[Exchange, ...] = (
  AllReduce(),
  AllGather(),
  TwoShot(),
  Ring(),
  Hierarchical(),
)
_ALIKE = 1.02  # times of steps whose ratio is smaller count as equal


class Predicted(NamedTuple):
  """Holds what a step is predicted to take.

  Attributes:
    breakdown: the seconds of its exchange.
    step_seconds: those of the step; of the exchange alone if the passes are unknown.
    speedup: the step of a plain mean in float32, over this one.
  """

  breakdown: Breakdown
  step_seconds: float
  speedup: float


class Refusal(NamedTuple):
  """A candidate that a plan may not choose.

  Attributes:
    codec: its name.
    exchange: the name of the exchange; "" for all.
    reason: the reason, with its number.
  """

  codec: str
  exchange: str
  reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A candidate with an exchange.

  Attributes:
    candidate: the candidate.
    exchange: the exchange.
    error: that of the mean, see ``mean_error.mean_error``.
    model: the leaves of ``explanation``.
    speed: the speeds of its codec.
    explanation: what it sends.
    predicted: what it takes.
  """

  candidate: Candidate
  exchange: Exchange
  error: float
  model: Model
  speed: SpeedOf
  explanation: Explanation
  predicted: Predicted

  @property
  def name(self) -> str:
    """The names of the codec and the exchange."""
    return f"{self.candidate.name} {self.exchange.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """Holds what all rows of a plan share.

  Attributes:
    model: the parameters.
    workers: N, or the sizes of two axes.
    cluster: the workers and their links.
    forward: the seconds of the forward pass.
    backward: the seconds of the backward pass.
  """

  model: Model
  workers: int | tuple[int, int]
  cluster: Cluster
  forward: float
  backward: float

  def dense(self) -> Row:
    """Returns the row of a plain mean in float32."""
    row = self._row(DENSE, AllReduce(), 0.0, self.model, _no_speed, None)
    same = row.predicted._replace(speedup=1.0)
    return dataclasses.replace(row, predicted=same)

  def rows(
    self,
    candidate: Candidate,
    omega: float,
    errors: Errors,
    speed: SpeedOf,
    dense: Row,
  ) -> tuple[list[Row], list[Refusal]]:
    """Returns a candidate with every exchange, and why others cannot be.

    If the budget allows none of them, that is said once of all.
    """
    rows, refused = [], []
    excess: dict[float, str] = {}
    model = self.model
    if candidate.by_size:
      model = model.joined(sparse=candidate.density is not None)
    for exchange in _EXCHANGES:
      reason = self._dropping(candidate, exchange)
      if not reason:
        lost = errors.of_mean(candidate, omega, exchange)
        try:
          row = self._row(candidate, exchange, lost, model, speed, dense)
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

  def exact(self, row: Row, dense: Row) -> Row:
    """Returns a row for the leaves as they are."""
    given = row.candidate, row.exchange, row.error
    return self._row(*given, self.model, row.speed, dense)

  def _row(
    self,
    candidate: Candidate,
    exchange: Exchange,
    error: float,
    model: Model,
    speed: SpeedOf,
    dense: Row | None,
  ) -> Row:
    explanation = explained(candidate, cast(Hashable, exchange), model, self.workers)
    cost = exchange_seconds(explanation, self.cluster, speed)
    step = step_seconds(self.forward, self.backward, [(1.0, cost)], overlap=False)
    plain = dense.predicted.step_seconds if dense else step
    speedup = plain / step if step else 1.0
    return Row(
      candidate=candidate,
      exchange=exchange,
      error=error,
      model=model,
      speed=speed,
      explanation=explanation,
      predicted=Predicted(cost, step, speedup),
    )

  def _dropping(self, candidate: Candidate, exchange: Exchange) -> str:
    """Returns why owners must not encode sums of a sparse candidate; "" if they may.

    What they would drop waits again, and no study bounds that.
    """
    added_whole = exchange.of_leaves and not exchange.owners
    if candidate.density is None or added_whole:
      return ""
    union = 1 - (1 - candidate.density) ** self.cluster.workers
    return (
      f"{self.cluster.workers} workers together choose up to {union:.3g} of the "
      f"elements, of which owners would send {candidate.density:.3g}"
    )


def best(rows: Sequence[Row]) -> Row:
  """Returns the fastest row; of those that are as fast, the most exact and simplest."""
  least = min(row.predicted.step_seconds for row in rows)
  near = [row for row in rows if row.predicted.step_seconds <= _ALIKE * least]
  places = dict(zip((x.way for x in _EXCHANGES), itertools.count()))
  return min(near, key=lambda row: (row.error, places[row.exchange.way]))


def _no_speed(codec: object) -> CodecSpeed:
  raise AssertionError(f"a plain mean encodes nothing, got {codec!r}")
