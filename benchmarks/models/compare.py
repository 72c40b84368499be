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

import itertools
import sys
from typing import Any

from benchmarks.common import cli, tables
from benchmarks.models import papers

COLUMNS = ("what", "inputs", "ours", "paper", "difference", "verdict", "why")


def entry(row: papers.Number) -> dict[str, Any]:
  """Returns a number as it is written to the JSON file."""
  kept = {key: value for key, value in row._asdict().items() if value is not None}
  if row.difference is not None:
    kept["difference"] = row.difference
  return kept


def digits(number: float) -> str:
  """Returns four digits, or all of a large number."""
  return f"{number:,.0f}" if abs(number) >= 1e4 else f"{number:.4g}"


def numbers(rows: list[papers.Number]) -> str:
  lines = []
  for row in rows:
    cells = [row.what, row.inputs, digits(row.ours), "", "", row.verdict, row.why]
    if row.printed is not None:
      cells[3:5] = digits(row.printed), f"{row.difference:+.1%}"
    if row.verdict == "agrees" and row.tolerance:
      cells[5] += f" within {row.tolerance:.2g}"
    lines.append(cells)
  return f"{tables.table(COLUMNS, lines)}\n"


def page(rows: list[papers.Number]) -> str:
  parts = [
    "# What the papers predict, recomputed\n\n"
    "Made by `python -m benchmarks.models.compare`; "
    "[the models' page](../../models/README.md) says what it means.\n\n"
    "* *agrees*: the model gives the printed number, within the relative tolerance "
    "beside it.\n"
    "* *wrong*: the paper's own inputs give another number.\n"
    "* *open*: the number depends on what the paper does not print.\n"
    "* *ours*: the paper prints none.\n"
  ]
  for paper, group in itertools.groupby(rows, lambda row: row.paper):
    parts.append(f"\n## {paper}\n\n{numbers(list(group))}")
  return "".join(parts)


def main() -> None:
  parser = cli.parser(__doc__, quick="the same", output="folder of the two files")
  options = parser.parse_args()
  rows = papers.numbers()
  for paper, group in itertools.groupby(rows, lambda row: row.paper):
    verdicts = [row.verdict for row in group]
    counts = [f"{verdicts.count(x)} {x}" for x in ("agrees", "wrong", "open", "ours")]
    print(f"{paper}: {', '.join(counts)}")
  for row in rows:
    if row.verdict == "wrong" or row.missed:
      said = "MISSED" if row.missed else "wrong"
      print(
        f"{said}: {row.paper}, {row.what}, {row.inputs}: {row.ours:.4g}, "
        f"printed {row.printed:.4g}"
      )
  cli.write(options.output, "paper_models", [entry(x) for x in rows], page(rows))
  sys.exit(any(row.missed for row in rows))


if __name__ == "__main__":
  main()
