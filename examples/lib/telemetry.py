"""Keeps the inspections of a run, and reports them as a table and plots."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure


class Log:
  """Keeps what ``step`` inspects every so many steps, in the last step of a round."""

  def __init__(self, every: int | None = None, step: Any = None, round_steps: int = 1):
    self.every, self.step, self.round_steps = every, step, round_steps
    self.found: dict[int, Any] = {}

  def takes(self, number: int) -> bool:
    """Returns whether the step, or one before it in its round, is to be inspected."""
    if self.every is None or number % self.round_steps:
      return False
    return (number - 1) // self.every > (number - 1 - self.round_steps) // self.every

  def keep(self, number: int, found: Any) -> None:
    """Keeps the inspection of a step, if it was to be inspected."""
    if self.takes(number):
      self.found[number] = jax.device_get(found)

  def write(self, folder: Path, name: str) -> None:
    """Prints the last inspection as a table, and draws two figures in the folder."""
    if not self.found or jax.process_index():
      return
    number, last = [*self.found.items()][-1]
    print(f"step {number} of {name}:\n{last}")
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"errors": errors(last), "telemetry": curves(self.found)}
    for kind, figure in figures.items():
      figure.suptitle(name)
      figure.savefig(folder / f"{name}-{kind}.png", dpi=150)


def errors(found: Any) -> Figure:
  """Draws the relative error and the cosine of each leaf of a step."""
  names, places = list(found.leaves), range(len(found.leaves))
  height = 1.2 + min(max(0.2 * len(names), 1.0), 30.0)
  figure = Figure(figsize=(9, height), layout="constrained")
  labels = {"relative_error": "of what was sent", "cosine": "to the true mean"}
  axes = figure.subplots(1, 2, sharey=True)
  for ax, (field, label) in zip(axes, labels.items(), strict=True):
    ax.barh(places, [getattr(x, field) for x in found.leaves.values()], height=0.8)
    whole = float(getattr(found.total, field))
    ax.axvline(whole, color="black", linewidth=1, linestyle="--")
    ax.set_title(f"all leaves: {whole:.4g}", fontsize="medium")
    ax.set_xlabel(f"{field.replace('_', ' ')} {label}")
    ax.grid(axis="x", alpha=0.3)
  axes[0].set_yticks(places, names, fontsize="small")
  axes[0].set_ylim(len(names) - 0.5, -0.5)
  return figure


def curves(found: dict[int, Any]) -> Figure:
  """Draws errors, norms and zeros of all leaves together over the steps."""
  figure = Figure(figsize=(12, 3.8), layout="constrained")
  panels = {
    "error": ("relative_error", "cosine"),
    "norms": ("gradient_norm", "residual_norm", "owner_residual_norm"),
    "share of zeros": ("zeros",),
  }
  axes = figure.subplots(1, 3, sharex=True)
  for ax, (title, fields) in zip(axes, panels.items(), strict=True):
    for field in fields:
      values = np.array([getattr(x.total, field) for x in found.values()])
      if title != "norms" or np.any(values > 0):  # nothing may be kept
        ax.plot([*found], values, marker=".", label=field.replace("_", " "))
    ax.set(title=title, yscale="log" if title == "norms" else "linear", xlabel="step")
    ax.grid(alpha=0.3)
    ax.legend()
  return figure
