"""The verdict and the table of a plan."""

import math
from collections.abc import Sequence

from gradcomp._src.cost.planner.compare import CandidateRow, Refusal
from gradcomp._src.report.collectives import aligned

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
