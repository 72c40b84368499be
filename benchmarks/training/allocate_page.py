"""Writes the page about the lines of benchmarks.training.allocate."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common.tables import table
from benchmarks.training.adam_page import Line, interval, read

__all__ = ["markdown", "read"]


def markdown(lines: Sequence[Line]) -> str:
  """Writes a table for each net and training."""
  paragraphs = [
    "# Bits for each leaf",
    "`python -m benchmarks.training.allocate` writes this file, and says what it "
    "trains. *More loss* and *less accuracy* are against 4 bits for each leaf, at the "
    "end, seed by seed, with an interval of 95 %; points are of a hundred.",
  ]
  apart = ("net", "steps", "seeds", "workers", "parameters", "device")
  groups: dict[Any, list[Line]] = {}
  for line in lines:
    groups.setdefault(tuple(line[x] for x in apart), []).append(line)
  for (net, steps, seeds, workers, parameters, device), group in groups.items():
    title = f"{net}, {parameters:,} parameters, {steps} steps, {workers} workers"
    paragraphs.append(f"## {title}, {seeds} seeds, on {device}")
    uniform = next((x for x in group if x["arm"] == "uniform"), None)
    header = ["arm", "bytes a step", "of uniform", "loss", "accuracy"]
    header += ["more loss", "less accuracy, points"]
    paragraphs.append(table(header, [_row(line, uniform) for line in group]))
    for line in group:
      if "late_error" in line:
        paragraphs.append(
          "Of the gradients at the end of the pilot run the allocated bits lose "
          f"{line['late_error']:.3g} times what 4 bits lose."
        )
  return "\n\n".join(paragraphs) + "\n"


def _row(line: Line, uniform: Line | None) -> list[str]:
  losses, right = (_ends(line, name) for name in ("test_loss", "accuracy"))
  row = [line["arm"], f"{line['bytes_a_step']:,.0f}", ""]
  row += [f"{losses.mean():.4f}", f"{right.mean():.2%}", "", ""]
  if uniform and line is not uniform:
    row[2] = f"{line['bytes_a_step'] / uniform['bytes_a_step']:.3f}"
    more = losses - _ends(uniform, "test_loss")
    less = 100 * (_ends(uniform, "accuracy") - right)
    row[5] = "{:+.4f} ± {:.4f}".format(*interval(more.tolist()))
    row[6] = "{:+.2f} ± {:.2f}".format(*interval(less.tolist()))
  return row


def _ends(line: Line, name: str) -> np.ndarray:
  return np.array(line[name])[:, -1]
