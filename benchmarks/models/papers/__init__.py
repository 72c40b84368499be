"""The five papers' models, and their printed numbers beside what these give.

A line of numbers.csv is a :class:`Number`. ``ours`` is an expression of the names in
its paper's module.
"""

import csv
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.models.papers import dettmers, fang, grubic, han, wen

_MODELS = {x.__name__.rpartition(".")[2]: x for x in (dettmers, wen, fang, grubic, han)}

# Whether a printed number can be right:
#   agrees   the model gives it, within the tolerance
#   wrong    the paper's own inputs give another number
#   open     it depends on what the paper does not print
#   ours     the paper prints none
Verdict = Literal["agrees", "wrong", "open", "ours"]


class Number(NamedTuple):
  """A number of a paper, beside what its model gives."""

  paper: str  # its first author
  what: str  # the quantity, with its unit
  inputs: str  # what it was computed from
  ours: float  # what the model gives
  printed: float | None  # the paper's number, if there is one
  verdict: Verdict
  tolerance: float | None  # relative, for those that agree
  why: str  # the reason of the tolerance or of another verdict

  @property
  def difference(self) -> float | None:
    """Ours over the printed number, less 1; None without a printed number."""
    return None if self.printed is None else self.ours / self.printed - 1

  @property
  def missed(self) -> bool:
    """True if the model does not give a number that it should give."""
    return self.verdict == "agrees" and not abs(self.difference) <= self.tolerance


def numbers() -> list[Number]:
  """Recomputes every number, paper by paper."""
  found = []
  lines = Path(__file__).with_name("numbers.csv").read_text().splitlines()
  for row in csv.DictReader(lines):
    given: dict[str, Any] = {**row}
    given["ours"] = eval(row["ours"], vars(_MODELS[row["paper"].lower()]))
    given |= {x: json.loads(row[x] or "null") for x in ("printed", "tolerance")}
    found.append(Number(**given))
  return found
