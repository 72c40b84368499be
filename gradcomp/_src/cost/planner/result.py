"""Holds the result of a plan."""

import dataclasses

import optax

from gradcomp._src.cost.planner import report
from gradcomp._src.cost.planner.model import transformation
from gradcomp._src.cost.planner.rows import Predicted, Refusal, Row
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.report.explain import Explanation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The result of :func:`plan`; ``str(plan)`` is a table and a verdict.

  Attributes:
    chosen: the row of the choice: a plain mean where compression is not worth it.
    rows: all that was compared, the plain mean first.
    refused: what could not be chosen, and why.
    verdict: one line, which begins with what to do.
    notes: what the numbers do not say.
  """

  chosen: Row
  rows: tuple[Row, ...]
  refused: tuple[Refusal, ...]
  verdict: str
  notes: tuple[str, ...]

  @property
  def explanation(self) -> Explanation:
    """Returns what the choice sends, of every leaf."""
    return self.chosen.explanation

  @property
  def predicted(self) -> Predicted:
    """Returns what the choice is predicted to take."""
    return self.chosen.predicted

  def transformation(
    self, axis_name: AxisName | None
  ) -> optax.GradientTransformationExtraArgs:
    """Returns what to chain in front of an optimizer.

    Args:
      axis_name: the axis of the workers; two, (between, inside), if the plan is for
        two. None means the same as in :func:`gradcomp.compress`.
    """
    row = self.chosen
    return transformation(row.candidate, row.exchange, row.model.paths, axis_name)

  def __str__(self) -> str:
    lines = [*report.table(self.rows), *report.refusals(self.refused), *self.notes]
    return "\n".join([*lines, self.verdict])
