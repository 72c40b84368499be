"""Writes the page about the lines of benchmarks.training.adam."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.common.tables import table
from benchmarks.training.adam_arms import BASELINE

CLOSE = 0.01  # of AdamW's perplexity, or of its loss on images
Line = dict[str, Any]


def read(path: Path | None) -> list[Line]:
  """Returns the lines of a file, or none without it."""
  if not path or not path.exists():
    return []
  return [json.loads(x) for x in path.read_text().splitlines()]


def append(path: Path | None, line: Line) -> None:
  """Writes a line behind those of a file, so that a run that ends early keeps it."""
  if path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
      file.write(json.dumps(line) + "\n")


def interval(values: Sequence[float]) -> tuple[float, float]:
  """Returns the mean of seeds, and half of its interval of 95 %.

  Example:
    >>> mean, half = interval([1.0, 2.0, 3.0])
    >>> mean, round(half, 2)
    (2.0, 2.48)
  """
  half = math.nan
  if len(values) > 1:
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
  return float(np.mean(values)), half


def verdict(mean: float, half: float) -> str:
  """Says whether the end is within 1 % of AdamW's, by the interval's worse side."""
  if mean + half <= CLOSE:
    return "within 1 %"
  return "worse" if mean - half > CLOSE else "open"


def markdown(lines: Sequence[Line]) -> str:
  """Writes a table for each net and training."""
  paragraphs = [
    "# What to put in front of Adam, or in its place",
    "`python -m benchmarks.training.adam` writes this file, and says what it trains. "
    "*More* is by how much the perplexity (of LeNet: the loss) at the end is above "
    "that of AdamW of the plain mean, seed by seed, with an interval of 95 %, and "
    "*points* are those of accuracy above it. Bytes a step are those behind a dense "
    "start, if an arm has one; *fewer* counts it, too.",
  ]
  groups: dict[str, list[Line]] = {}
  for line in lines:
    groups.setdefault(_title(line), []).append(line)
  for title, group in groups.items():
    first = next((x for x in group if x["arm"] == BASELINE), None)
    paragraphs.append(f"## {title}")
    if first:
      paragraphs.append(
        f"In the last quarter of AdamW's training its loss falls by "
        f"{first['last_quarter']:.2%}."
      )
    header = ["arm", "bytes a step", "fewer", "loss", "accuracy", "points", "more", ""]
    paragraphs.append(table(header, [_row(line, first) for line in group]))
  return "\n\n".join(paragraphs) + "\n"


def _title(line: Line) -> str:
  """Names what the trainings of a table have in common."""
  images = f"{line['images']:,} images, " if "images" in line else ""
  return (
    f"{line['net']}, {line['parameters']:,} parameters, {images}{line['steps']} "
    f"steps, {line['workers']} workers, {line['seeds']} seeds, on {line['device']}"
  )


def _row(line: Line, first: Line | None) -> list[str]:
  losses, right = (np.array(line[x]) for x in ("test_loss", "accuracy"))
  sent = line["bytes_a_step"]
  row = [line["arm"], f"{sent:,.0f}", ""]
  if first:
    dense, start = first["bytes_a_step"], line["start"]
    row[-1] = f"{dense / (start * dense + (1 - start) * sent):.1f} x"
  row += [f"{losses.mean():.4f}", f"{right.mean():.2%}"]
  if first is None:
    return [*row, "", "", ""]
  theirs, others = (np.array(first[x]) for x in ("test_loss", "accuracy"))
  points = interval((100 * (right - others)).tolist())
  row.append("{:+.2f} ± {:.2f}".format(*points))
  if losses.max() > 100 * theirs.max() or np.isnan(losses).any():
    return [*row, "diverged", "worse"]
  relative = losses / theirs if line["net"] == "lenet" else np.exp(losses - theirs)
  mean, half = interval((relative - 1).tolist())
  return [*row, f"{mean:+.2%} ± {half:.2%}", verdict(mean, half)]


def last_quarter(curves: np.ndarray) -> float:
  """Returns the share that the mean loss falls by in the last quarter of the steps."""
  curve = curves.mean(0)
  then = curve[len(curve) * 3 // 4 - 1]
  return float((then - curve[-1]) / then)
