"""Draws what was measured on links."""

import pathlib
from typing import Any

import numpy as np

from benchmarks.links import tables
from benchmarks.links.results import is_theirs, speed_up

# What the picture of the rates shows: label and colour, the same for a method of both.
LINES = {
  "f16 two_shot": ("f16", "C0"),
  "aps-8 ring": ("APS, 8 bits", "C1"),
  "qsgd-8 two_shot": ("QSGD, 8 bits", "C2"),
  "qsgd-4 two_shot": ("QSGD, 4 bits", "C3"),
  "qsgd-2 two_shot": ("QSGD, 2 bits", "C4"),
  "terngrad two_shot": ("TernGrad", "C5"),
  "onebit-64 two_shot": ("1-bit SGD", "C6"),
  "redsync-0.1% all_gather": ("RedSync, 0.1 %", "C8"),
  "powersgd-4 psum": ("PowerSGD, rank 4", "C9"),
  "ddp fp16": ("DDP, fp16 hook", "C0"),
  "ddp powersgd-1": ("DDP, PowerSGD, rank 1", "C7"),
  "ddp powersgd-4": ("DDP, PowerSGD, rank 4", "C9"),
}


def bars(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Draws a panel for each run: a bar a program, its speed-up and its wire bound."""
  plt = _pyplot()
  columns = min(2, len(runs))
  lines = -(-len(runs) // columns)
  height = 1.2 + 0.24 * max(len(run["steps"]) for run in runs)
  size = (8 * columns, height * lines)
  figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False)
  for axis, run in zip(axes.flat, runs, strict=False):
    names, entries = list(run["steps"]), list(run["steps"].values())
    median, low, high = (
      1e3 * np.array([pick(entry["seconds"]) for entry in entries])
      for pick in (np.median, min, max)
    )
    axis.barh(names, median, color=list(map(_color, names)), alpha=0.85)
    around = np.stack([median - low, high - median])
    axis.errorbar(median, names, xerr=around, fmt="none", ecolor="0.3", capsize=2)
    for i, entry in enumerate(entries):
      text = f"  {speed_up(entry):.1f} x"
      axis.text(high[i], i, text, va="center", fontsize=8)
    if rate := run["bits_per_second"]:
      known = [name for name in names if run["steps"][name]["bytes_wire_report"]]
      bounds = [8e3 * run["steps"][name]["bytes_wire_report"] / rate for name in known]
      axis.plot(bounds, known, "|", color="k", ms=8, mew=2, label="bytes / rate")
      axis.legend(loc="lower right")
    axis.set_xlim(0, 1.15 * high.max())
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlabel(
      "ms a step: median, min to max; x: speed-up over the framework's f32"
    )
    axis.set_title(_title(run))
  for axis in axes.flat[len(runs) :]:
    axis.remove()
  figure.tight_layout()
  figure.savefig(path, dpi=100, metadata={"Software": None})
  plt.close(figure)


def rates(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Draws the speed-ups against the rate: ours in lines, PyTorch's dashed.

  A panel is a gradient and a number of hosts that was measured at several rates.
  """
  plt = _pyplot()
  groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
  for run in (run for run in runs if run["steps"]):
    key = (str(run["leaves"]), run["mib"], run["hosts"])
    groups.setdefault(key, []).append(run)
  panels = [group for _, group in sorted(groups.items()) if len(group) > 1]
  if not panels:
    return
  size = (5.6 * len(panels) + 1.8, 4.8)
  figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True)
  for axis, group in zip(axes[0], panels, strict=True):
    group = sorted(group, key=lambda run: run["bits_per_second"] or float("inf"))
    for name, (label, color) in LINES.items():
      at = [x for x, run in enumerate(group) if name in run["steps"]]
      values = [speed_up(group[x]["steps"][name]) for x in at]
      style = "s--" if is_theirs(name) else "o-"
      axis.plot(at, values, style, ms=4, color=color, label=label)
    axis.axhline(1, color="0.5", lw=1)
    axis.set_yscale("log")
    axis.set_xticks(range(len(group)), [run["rate"] for run in group])
    axis.set_xlabel("rate of a link")
    axis.set_title(_title(group[0], rate=False), fontsize=10)
  axes[0, 0].set_ylabel("times as fast as f32 of the same framework")
  axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
  figure.tight_layout()
  figure.savefig(path, dpi=110, metadata={"Software": None})
  plt.close(figure)


def _title(run: dict[str, Any], rate: bool = True) -> str:
  link = f"{run['rate']}, " if rate else ""
  what = f"{run['mib']} MiB in {tables.leaves(run)}"
  return f"{run['hosts']} hosts, {link}{what}"


def _color(name: str) -> str:
  if is_theirs(name):
    return "C1"
  return "0.6" if name.startswith(("plain", "f32")) else "C0"


def _pyplot() -> Any:
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  return plt
