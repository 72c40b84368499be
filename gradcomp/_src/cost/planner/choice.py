"""Compares candidates, and chooses one of them or the plain mean."""

import math
from collections.abc import Callable, Sequence

from gradcomp._src.cost.cluster import Cluster
from gradcomp._src.cost.planner import report
from gradcomp._src.cost.planner.candidates import Candidate
from gradcomp._src.cost.planner.errors import Errors
from gradcomp._src.cost.planner.result import Plan
from gradcomp._src.cost.planner.rows import Refusal, Row, Setting, best
from gradcomp._src.cost.planner.speeds import SpeedOf
from gradcomp._src.cost.step import crossover_rate


def choose(
  setting: Setting,
  candidates: Sequence[Candidate],
  errors: Errors,
  speed_of: Callable[[Candidate], SpeedOf | None],
  margin: float,
  notes: Sequence[str],
) -> Plan:
  """Returns the plan for the candidates.

  Args:
    setting: the model and the links.
    candidates: what may be chosen.
    errors: which errors are too much.
    speed_of: the speeds of a candidate, None where they are unknown.
    margin: the part of a step that compression must gain.
    notes: what the numbers do not say.
  """
  dense = setting.dense()
  rows: list[Row] = []
  refused: list[Refusal] = []
  for candidate in candidates:
    omega = errors.omega(candidate)
    reason = errors.refusal(candidate, omega)
    speed = None if reason else speed_of(candidate)
    if speed is None:
      unknown = f"`speeds` has none of this name; omega is {omega:.3g}"
      refused.append(Refusal(candidate.name, "", reason or unknown))
      continue
    found, others = setting.rows(candidate, omega, errors, speed, dense)
    rows += found
    refused += others
  if not rows:
    verdict = f"do not: of {len(candidates)} candidates none is allowed"
    return dense_plan(dense, [], refused, verdict, notes)
  while (row := best(rows)).model is not setting.model:
    exact = setting.exact(row, dense)
    rows = [exact if x is row else x for x in rows]
  if any(x.model is not setting.model for x in rows):
    leaves = len(setting.model.leaves)
    notes = [*notes, f"Rows behind the best are of few leaves in place of {leaves}."]
  if row.predicted.step_seconds > (1 - margin) * dense.predicted.step_seconds:
    rates = [_rate(x, dense, setting.cluster) for x in rows]
    rate, other = max(zip(rates, rows, strict=True), key=lambda pair: pair[0])
    verdict = report.refused(row, dense, margin, other, rate)
    return dense_plan(dense, rows, refused, verdict, notes)
  return Plan(
    chosen=row,
    rows=(dense, *rows),
    refused=tuple(refused),
    verdict=report.chosen(row, dense),
    notes=tuple(notes),
  )


def _rate(row: Row, dense: Row, cluster: Cluster) -> float:
  """Returns the bytes per second below which a row is faster than a plain mean.

  It is 0 for one that sends no less, or is slower at every rate.
  """
  if row.explanation.bytes_sent >= dense.explanation.bytes_sent:
    return 0.0
  rate = crossover_rate(row.explanation, cluster, row.speed)
  return rate if rate < math.inf else 0.0


def dense_plan(
  dense: Row,
  rows: Sequence[Row],
  refused: Sequence[Refusal],
  verdict: str,
  notes: Sequence[str],
) -> Plan:
  """Returns a plan that chooses the plain mean."""
  return Plan(
    chosen=dense,
    rows=(dense, *rows),
    refused=tuple(refused),
    verdict=verdict,
    notes=tuple(notes),
  )
