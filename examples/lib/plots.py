"""Plots of loss and accuracy against steps and against bytes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from examples.lib.training import Run


def curves(runs: Mapping[str, Sequence[Run]], title: str) -> Figure:
  """Draws a line for each codec, the mean over its seeds.

  A band goes from the lowest to the highest seed.

  Args:
    runs: the runs of every codec, one a seed, with points at the same steps.
    title: of the figure.
  """
  seeds = max(map(len, runs.values()))
  if seeds > 1:
    title += f", mean of {seeds} seeds and band from the lowest to the highest"
  figure = Figure(figsize=(10, 7), layout="constrained")
  figure.suptitle(title)
  axes = figure.subplots(2, 2, sharex="col", sharey="row")
  rows = (("test_loss", 1), ("test_accuracy", 100))
  columns = ("step", "bytes_sent")
  for (field, factor), row in zip(rows, axes, strict=True):
    for column, ax in zip(columns, row, strict=True):
      for codec, group in runs.items():
        x = [getattr(point, column) for point in group[0].points]
        y = factor * np.array(
          [[getattr(point, field) for point in run.points] for run in group]
        )
        (line,) = ax.plot(x, y.mean(axis=0), label=codec, linewidth=1.6)
        ax.fill_between(
          x, y.min(axis=0), y.max(axis=0), color=line.get_color(), alpha=0.15
        )
      ax.grid(alpha=0.3)
  (loss_by_step, loss_by_bytes), (by_step, by_bytes) = axes
  loss_by_step.set(ylabel="test loss", yscale="log")
  by_step.set(xlabel="steps", ylabel="test accuracy (%)")
  by_bytes.set(xlabel="bytes sent by each worker", xscale="log")
  loss_by_bytes.legend(title="codec")
  return figure
