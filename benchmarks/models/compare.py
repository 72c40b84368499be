"""Recomputes what the five papers predict, and compares it with what they print.

  python -m benchmarks.models.compare [--output FOLDER]

Each number has its inputs, what the model gives, what the paper prints, and whether
that can be right:

  agrees  The model gives the printed number, within the tolerance beside it.
  wrong   The paper's own inputs give another number.
  open    The number depends on what the paper does not print.
  ours    The paper prints none.

Nothing is measured here. It ends with 1 if a number that must agree does not. With
--output, writes paper_models.json and paper_models.md there.
"""

import csv
import itertools
import json
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from benchmarks.common import cli, tables
from benchmarks.models.papers import dettmers, fang, grubic, han, wen

Verdict = Literal["agrees", "wrong", "open", "ours"]
COLUMNS = ("what", "inputs", "ours", "paper", "difference", "verdict", "why")
_MODELS = {x.__name__.rpartition(".")[2]: x for x in (dettmers, wen, fang, grubic, han)}


class Number(NamedTuple):
  """A number of a paper, beside what its model gives: a line of papers/numbers.csv."""

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
  lines = Path(__file__).with_name("papers").joinpath("numbers.csv").read_text()
  for row in csv.DictReader(lines.splitlines()):
    given: dict[str, Any] = {**row}
    given["ours"] = eval(row["ours"], vars(_MODELS[row["paper"].lower()]))
    given |= {x: json.loads(row[x] or "null") for x in ("printed", "tolerance")}
    found.append(Number(**given))
  return found


def digits(number: float) -> str:
  """Returns four digits, or all of a large number."""
  return f"{number:,.0f}" if abs(number) >= 1e4 else f"{number:.4g}"


def page(rows: list[Number]) -> str:
  parts = [tables.page(__file__, "compare") + "\n"]
  for paper, group in itertools.groupby(rows, lambda row: row.paper):
    lines = []
    for row in group:
      cells = [row.what, row.inputs, digits(row.ours), "", "", row.verdict, row.why]
      if row.printed is not None:
        cells[3:5] = digits(row.printed), f"{row.difference:+.1%}"
      if row.verdict == "agrees" and row.tolerance:
        cells[5] += f" within {row.tolerance:.2g}"
      lines.append(cells)
    parts.append(f"\n## {paper}\n\n{tables.table(COLUMNS, lines)}\n")
  return "".join(parts)


def main() -> None:
  parser = cli.parser(__doc__, quick="the same", output="folder of the two files")
  options = parser.parse_args()
  rows = numbers()
  for paper, group in itertools.groupby(rows, lambda row: row.paper):
    verdicts = [row.verdict for row in group]
    counts = (f"{verdicts.count(x)} {x}" for x in get_args(Verdict))
    print(f"{paper}: {', '.join(counts)}")
  for row in rows:
    if row.verdict == "wrong" or row.missed:
      said = f"{row.paper}, {row.what}, {row.inputs}: {row.ours:.4g}"
      kind = "MISSED" if row.missed else "wrong"
      print(f"{kind}: {said}, printed {row.printed:.4g}")
  entries = [row._asdict() | {"difference": row.difference} for row in rows]
  known = [{k: x for k, x in entry.items() if x is not None} for entry in entries]
  cli.write(options.output, "paper_models", known, page(rows))
  sys.exit(any(row.missed for row in rows))


if __name__ == "__main__":
  main()
