"""Draws what `gradcomp.telemetry.inspect` shows of a run."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from gradcomp.telemetry import Inspection


def errors(found: Inspection) -> Figure:
  """Draws the relative error and the cosine of each leaf of a step."""
  names = list(found.leaves)
  places = np.arange(len(names))
  height = 1.2 + min(max(0.2 * len(names), 1.0), 30.0)
  figure = Figure(figsize=(9, height), layout="constrained")
  columns = (
    ("relative_error", "relative error of what was sent", "#c06050"),
    ("cosine", "cosine to the true mean", "#4878a8"),
  )
  axes = figure.subplots(1, 2, sharey=True)
  for ax, (field, label, color) in zip(axes, columns, strict=True):
    values = [getattr(metrics, field) for metrics in found.leaves.values()]
    ax.barh(places, values, color=color, height=0.8)
    whole = float(getattr(found.total, field))
    ax.axvline(whole, color="black", linewidth=1, linestyle="--")
    ax.set_title(f"all leaves: {whole:.4g}", fontsize="medium")
    ax.set_xlabel(label)
    ax.grid(axis="x", alpha=0.3)
  figure.axes[0].set_yticks(places, names, fontsize="small")
  figure.axes[0].set_ylim(len(names) - 0.5, -0.5)
  return figure


def curves(found: Sequence[Inspection], steps: Sequence[int]) -> Figure:
  """Draws errors, norms and zeros of all leaves together over the steps."""
  totals = [x.total for x in found]
  figure = Figure(figsize=(12, 3.8), layout="constrained")
  panels = (
    ("error", ("relative_error", "cosine"), "linear"),
    ("norms", ("gradient_norm", "residual_norm", "owner_residual_norm"), "log"),
    ("share of zeros", ("zeros",), "linear"),
  )
  axes = figure.subplots(1, 3, sharex=True)
  for ax, (title, fields, scale) in zip(axes, panels, strict=True):
    for field in fields:
      values = np.array([getattr(x, field) for x in totals])
      if scale == "log" and not np.any(values > 0):
        continue  # nothing is kept
      ax.plot(steps, values, marker=".", label=field.replace("_", " "))
    ax.set(title=title, yscale=scale, xlabel="step")
    ax.grid(alpha=0.3)
    if len(fields) > 1:
      ax.legend()
  return figure
