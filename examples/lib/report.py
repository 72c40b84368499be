"""Reports of a comparison: a table, two CSV files and curves."""

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from examples.lib import plots
from examples.lib.training import Point, Run


def by_codec(runs: Iterable[Run]) -> dict[str, list[Run]]:
  """Groups runs by codec, in the order of the first run of each."""
  groups: dict[str, list[Run]] = {}
  for run in runs:
    groups.setdefault(run.codec, []).append(run)
  return groups


def table(runs: Sequence[Run], *, perplexity: bool = False) -> str:
  """Formats a line for each codec: mean and standard deviation of its last points.

  Args:
    runs: one for each codec and seed.
    perplexity: whether a test loss is shown as the perplexity that it is.
  """
  loss = "perplexity" if perplexity else "test loss"
  header = ("codec", "test accuracy", loss, "bytes/step", "ratio", "ms/step")
  lines = [header]
  for codec, group in by_codec(runs).items():
    last = [run.points[-1] for run in group]
    losses = [point.test_loss for point in last]
    if perplexity:
      losses = [math.exp(min(loss, 50)) for loss in losses]
    lines.append(
      (
        codec,
        _spread([100 * point.test_accuracy for point in last], 2) + " %",
        _spread(losses, 3 if perplexity else 4),
        f"{group[0].bytes_a_step:,}",
        _ratio(group[0]),
        f"{statistics.median(run.step_ms for run in group):.1f}",
      )
    )
  widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i == 0 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    )
    for line in lines
  )


def write(runs: Sequence[Run], folder: Path, *, title: str) -> list[Path]:
  """Writes summary.csv, curves.csv and curves.png, and returns their paths."""
  folder.mkdir(parents=True, exist_ok=True)
  summary, curves = folder / "summary.csv", folder / "curves.csv"
  _write_csv(
    summary,
    ("codec", "seed", "bytes_a_step", "f32_bytes_a_step", "step_ms", *Point._fields),
    [(*run[:-1], *run.points[-1]) for run in runs],
  )
  _write_csv(
    curves,
    ("codec", "seed", *Point._fields),
    [(run.codec, run.seed, *point) for run in runs for point in run.points],
  )
  figure = folder / "curves.png"
  plots.curves(by_codec(runs), title).savefig(figure, dpi=150)
  return [summary, curves, figure]


def _spread(values: Sequence[float], digits: int) -> str:
  mean = f"{statistics.fmean(values):.{digits}f}"
  if len(values) == 1:
    return mean
  return f"{mean} ± {statistics.stdev(values):.{digits}f}"


def _ratio(run: Run) -> str:
  """Formats the ratio to the bytes of a float32 mean; a single worker sends none."""
  if not run.f32_bytes_a_step:
    return "-"
  return f"{run.bytes_a_step / run.f32_bytes_a_step:.4f}"


def _write_csv(
  path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
  with path.open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(header)
    writer.writerows(rows)
