"""Draws the pictures of a report, so narrow that a phone shows their text.

Accuracy at the end, by workers and by epoch, and times in Grubic's layouts: figures 6
to 16.
"""

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.study.analysis import Group, Study, in_groups
from benchmarks.study.devices import PARTS

_FAMILIES = {
  "QSGD": ("qsgd",),
  "1-bit SGD": ("onebit",),
  "TernGrad": ("terngrad",),
  "8-bit types": ("dynamic", "linear", "mantissa", "static"),
  "APS and casts": ("aps", "cast"),
  "sparse": ("redsync", "topk"),
  "others": ("",),
}
BLUE = "#4c72b0"
_PART_COLORS = {"communication": "#c44e52", "codec": "#dd8452", "compute": BLUE}
_CUT = 15  # points of accuracy below the best end, where curves are cut
_PAIRS = matplotlib.colormaps["tab20"].colors
_COLORS = _PAIRS[::2] + _PAIRS[1::2]  # ten strong ones, and ten pale ones
Rows = list[list[str]]


class Shown(NamedTuple):
  """A picture, and the numbers in it."""

  name: str  # of the picture's file
  caption: str  # what it shows
  figure: Figure  # the picture
  header: list[str]  # of the table
  rows: Rows


def panel(title: str, inches: float = 3.6) -> tuple[Figure, Axes]:
  figure = Figure(figsize=(5.2, inches), layout="constrained")
  axes = figure.subplots()
  figure.suptitle(textwrap.fill(title, 62), fontsize=11, x=0.02, ha="left")
  axes.tick_params(labelsize=10)
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)
  return figure, axes


def slug(*words: object) -> str:
  """Returns words as the name of a file.

  >>> slug("points", "lenet, N = 2")
  'points-lenet-n-2'
  """
  text = "-".join(str(word) for word in words if word != "")
  kept = "".join(c if c.isalnum() else "-" for c in text.lower())
  return "-".join(part for part in kept.split("-") if part)


def height(codecs: Sequence[str]) -> float:
  return max(2.4, 1.2 + 0.26 * len(codecs))


def families(codecs: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
  """Yields the codecs of each family, with float32 in front."""
  left = [codec for codec in codecs if codec != "f32"]
  for name, starts in _FAMILIES.items():
    found = [codec for codec in left if codec.startswith(starts)]
    left = [codec for codec in left if codec not in found]
    if found:
      yield name, [*(["f32"] if "f32" in codecs else []), *found]


def legend(figure: Figure, count: int) -> None:
  """Names many lines below a picture, which grows by what that takes."""
  figure.set_figheight(figure.get_figheight() + 0.2 * -(-count // 3))
  small = {"fontsize": 9, "frameon": False, "columnspacing": 1.0, "handlelength": 1.2}
  figure.legend(**small, loc="outside lower center", ncols=3)


def color(i: int, codec: str) -> object:
  """Returns the color of the i-th line; float32's is black."""
  return "0.1" if codec == "f32" else _COLORS[i % len(_COLORS)]


def ends(group: Group) -> tuple[list[str], Rows]:
  """Returns the table of what the codecs of a group end at, and what they send."""
  header = ["codec", "accuracy", "points", "seeds", "steps to f32 - 0.2", "bytes / f32"]
  rows = []
  for codec in group.runs:
    found = group.ends(codec).tolist()
    difference = None if codec == "f32" else group.difference(codec)
    late = group.steps_to(codec)
    cells = [codec, f"{np.mean(found):.2f}", str(difference or ""), str(len(found))]
    cells.append("never" if late is None else f"{late:.0f}")
    rows.append([*cells, f"{group.ratio(codec):.4f}"])
  return header, rows


def losses(study: Study) -> Iterator[Shown]:
  """Yields the points of accuracy to float32 of each codec, with their intervals."""
  for group in study.groups:
    found = {
      codec: difference
      for codec in group.runs
      if codec != "f32" and (difference := group.difference(codec))
    }
    if not found:
      continue
    figure, axes = panel(group.name, height(list(found)))
    for i, difference in enumerate(found.values()):
      axes.barh(i, difference.mean, color=BLUE, height=0.7)
      axes.errorbar(difference.mean, i, xerr=difference.half, color="0.2", capsize=2)
    lowest = min(x.mean for x in found.values())
    axes.set_xlim(max(-6, min(-0.5, 1.3 * lowest)), 1.5)
    axes.set_yticks(range(len(found)), list(found), fontsize=10)
    axes.invert_yaxis()
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set_xlabel("points of accuracy to float32 (cut at -6 and 1.5)")
    name = slug("points", group.name)
    yield Shown(name, group.name, figure, *ends(group))


def sweeps(study: Study) -> Iterator[Shown]:
  """Yields the points to float32 of groups that differ in their workers alone."""
  for title, groups in by_workers(study).items():
    codecs = dict.fromkeys(x for group in groups for x in group.runs if x != "f32")
    pairs = {
      codec: [(x.setting.workers, y) for x in groups if (y := x.difference(codec))]
      for codec in codecs
    }
    if not any(pairs.values()):
      continue
    figure, axes = panel(title)
    for i, (codec, found) in enumerate(pairs.items()):
      if found:
        counts, differences = zip(*found, strict=True)
        y, half = [x.mean for x in differences], [x.half for x in differences]
        line = {"marker": "o", "markersize": 4, "capsize": 2}
        axes.errorbar(counts, y, half, label=codec, color=color(i, codec), **line)
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.set_xscale("log", base=2)
    counts = [group.setting.workers for group in groups]
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="workers", ylabel="points to float32")
    legend(figure, len(codecs))
    name = slug("workers", title)
    yield Shown(name, title, figure, *ends_by_workers(groups))


def ends_by_workers(groups: list[Group]) -> tuple[list[str], Rows]:
  """Returns the tables of groups that differ in their workers alone as one."""
  rows: Rows = []
  for group in groups:
    header, own = ends(group)
    rows += [[str(group.setting.workers), *row] for row in own]
  return ["workers", *header], rows


def by_workers(study: Study) -> dict[str, list[Group]]:
  alike = in_groups(study.groups, lambda group: group.named(""))
  return {title: groups for title, groups in alike.items() if len(groups) > 1}


def curves(study: Study) -> Iterator[Shown]:
  """Yields accuracy against epochs, a picture for each family of codecs."""
  for group in study.groups:
    x = group.setting
    for family, codecs in families(list(group.runs)):
      figure, axes = panel(f"{family}: {group.name}")
      rows: Rows = []
      for i, codec in enumerate(codecs):
        found = list(group.curves(codec).values())
        count = min(map(len, found))
        y = np.array([[p["accuracy"] for p in curve[:count]] for curve in found])
        epochs = [point["step"] * x.batch / x.epoch for point in found[0][:count]]
        drawn = color(i, codec)
        axes.plot(epochs, y.mean(axis=0), label=codec, color=drawn, linewidth=1.5)
        axes.fill_between(epochs, y.min(axis=0), y.max(axis=0), color=drawn, alpha=0.1)
        rows.append([codec, *(f"{value:.2f}" for value in y.mean(axis=0))])
      best = max(float(row[-1]) for row in rows)
      axes.set_ylim(bottom=max(axes.get_ylim()[0], best - _CUT))
      axes.set(xlabel="epochs", ylabel="test accuracy (%)")
      legend(figure, len(codecs))
      axes.grid(alpha=0.3)
      width = max(map(len, rows))
      filled = lambda row, width=width: (row + [""] * width)[:width]
      points = next(iter(group.curves(codecs[0]).values()))
      header = ["codec", *(f"{p['step'] * x.batch / x.epoch:.2f}" for p in points)]
      caption = f"{family}: {group.name}; a band is from the lowest to the highest seed"
      name = slug("curve", family, group.name)
      yield Shown(name, caption, figure, filled(header), [*map(filled, rows)])


def speeds(study: Study) -> Iterator[Shown]:
  for cell in study.cells:
    codecs = list(cell.times)
    figure, axes = panel(cell.name, height(codecs))
    values = [cell.speed(codec) for codec in codecs]
    axes.barh(range(len(codecs)), values, color=BLUE, height=0.7)
    axes.set_yticks(range(len(codecs)), codecs, fontsize=10)
    axes.invert_yaxis()
    axes.set_xlabel("samples a second")
    rows: Rows = []
    for codec, value in zip(codecs, values, strict=True):
      gain = f"{cell.gain(codec):.2f}" if "f32" in codecs else ""
      counted = cell.times[codec].get("interface_bytes")
      sent = f"{cell.times[codec]['bytes_a_step']:,.0f}"
      shown = f"{counted:,.0f}" if counted else ""
      rows.append([codec, f"{value:.1f}", gain, sent, shown])
    header = ["codec", "samples/s", "x f32", "bytes a step", "counted"]
    yield Shown(slug("speed", cell.name), cell.name, figure, header, rows)


def bars(study: Study) -> Iterator[Shown]:
  """Yields the parts of a step as stacked bars, with communication at the bottom."""
  for cell in study.cells:
    codecs = list(cell.times)
    figure, axes = panel(cell.name, 4.2)
    bottom = np.zeros(len(codecs))
    for part in reversed(PARTS):
      value = [1e3 * max(0.0, cell.times[codec][part]) for codec in codecs]
      axes.bar(codecs, value, bottom=bottom, label=part, color=_PART_COLORS[part])
      bottom += value
    axes.set_ylabel("ms a step")
    axes.tick_params(axis="x", labelrotation=90)
    axes.set_ylim(0, 1.25 * bottom.max())
    axes.legend(fontsize=9, frameon=False, ncols=3, loc="upper center")
    rows = [
      [codec, *(f"{1e3 * cell.times[codec][name]:.2f}" for name in ("step", *PARTS))]
      for codec in codecs
    ]
    header = ["codec", "ms a step", *PARTS]
    yield Shown(slug("parts", cell.name), cell.name, figure, header, rows)


def scalings(study: Study) -> Iterator[Shown]:
  """Yields how many times as fast N workers are as float32 on the fewest."""
  alike = lambda cell: cell.setting._replace(workers=0, hosts=0, batch=0)
  for cells in in_groups(study.cells, alike).values():
    first = cells[0]
    if len(cells) < 2 or "f32" not in first.times:
      continue
    title = f"{first.setting.network}, {first.link}, batch {first.setting.rule}"
    figure, axes = panel(title)
    counts = [cell.setting.workers for cell in cells]
    rows: Rows = []
    for i, codec in enumerate(dict.fromkeys(x for cell in cells for x in cell.times)):
      has = [cell for cell in cells if codec in cell.times]
      y = [cell.speed(codec) / first.speed("f32") for cell in has]
      x, drawn = [cell.setting.workers for cell in has], color(i, codec)
      axes.plot(x, y, marker="o", markersize=4, label=codec, color=drawn)
      by_count = dict(zip(x, y, strict=True))
      rows.append([codec, *(f"{by_count.get(n, np.nan):.2f}" for n in counts)])
    ideal = [n / counts[0] for n in counts]
    axes.plot(counts, ideal, color="0.6", linestyle=":", label="ideal")
    axes.set(xlabel="workers", ylabel=f"times f32 on {counts[0]}")
    axes.set_xticks(counts)
    legend(figure, len(rows) + 1)
    header = ["codec", *(f"N = {n}" for n in counts)]
    yield Shown(slug("scaling", title), title, figure, header, rows)


def prices(study: Study, price: float) -> Iterator[Shown]:
  """Yields accuracy against the dollars of a training."""
  for cell in study.cells:
    group = study.matching(cell)
    if group is None:
      continue
    rows: Rows = []
    spots = []
    cost = lambda seconds, cell=cell: seconds / 3600 * cell.setting.workers * price
    for codec in filter(group.runs.__contains__, cell.times):
      seconds = group.setting.batch / cell.speed(codec)  # of one step
      accuracy = group.ends(codec).mean()
      spots.append((cost(group.setting.steps * seconds), accuracy, codec))
      rows.append([codec, f"{accuracy:.2f}", f"{spots[-1][0]:.3g}", "never", "", ""])
      if (late := group.steps_to(codec)) is not None:
        spent = late * seconds
        rows[-1][3:] = f"{late:.0f}", f"{spent:.1f}", f"{cost(spent):.3g}"
    if not spots:
      continue
    caption = f"{cell.name}; trained as {group.name}"
    figure, axes = panel(cell.name)
    for i, (x, y, codec) in enumerate(sorted(spots)):
      axes.plot(x, y, "o", color="0.1" if codec == "f32" else BLUE)
      above = (4, -12, 14)[i % 3]  # points, so that names of neighbors stay apart
      axes.annotate(codec, (x, y), (4, above), textcoords="offset points", fontsize=9)
    axes.set(xlabel="dollars of the training", ylabel="test accuracy (%)")
    axes.margins(0.18)
    header = ["codec", "accuracy", "$", "steps to f32 - 0.2", "s", "$ to it"]
    yield Shown(slug("dollars", cell.name), caption, figure, header, rows)


def intensities(study: Study) -> Iterator[Shown]:
  """Yields the speed-up against the megabytes a GFLOP of the networks."""
  found = (x for x in study.cells if x.setting.workers > 1 and "f32" in x.times)
  alike = in_groups(found, lambda cell: (cell.link, cell.setting.workers))
  for (link, workers), cells in alike.items():
    title = f"N = {workers}, {link}"
    figure, axes = panel(title)
    cells = sorted(cells, key=lambda cell: cell.intensity)
    codecs = dict.fromkeys(name for cell in cells for name in cell.times)
    rows: Rows = []
    for i, codec in enumerate(name for name in codecs if name != "f32"):
      has = [cell for cell in cells if codec in cell.times]
      x = [cell.intensity for cell in has]
      y = [cell.gain(codec) for cell in has]
      drawn = color(i, codec)
      axes.plot(x, y, marker="o", markersize=4, label=codec, color=drawn)
      for cell, gain in zip(has, y, strict=True):
        name = cell.setting.network
        rows.append([name, f"{cell.intensity:.1f}", codec, f"{gain:.2f}"])
    axes.axhline(1, color="0.6", linestyle=":")
    axes.set(xlabel="MB/GFLOP", ylabel="times as fast as f32", xscale="log")
    places = [cell.intensity for cell in cells]
    axes.set_xticks(places, [f"{place:.0f}" for place in places])
    axes.minorticks_off()
    legend(figure, len(codecs) - 1)
    header = ["network", "MB/GFLOP", "codec", "x f32"]
    yield Shown(slug("intensity", title), title, figure, header, rows)
