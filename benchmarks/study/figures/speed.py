"""Draws the times of a study in Grubic's layouts: figures 6 to 16."""

from collections.abc import Iterator

import numpy as np

from benchmarks.study.analysis import Study, in_groups
from benchmarks.study.devices import PARTS
from benchmarks.study.figures import style

_PART_COLORS = {"communication": "#c44e52", "codec": "#dd8452", "compute": style.BLUE}


def speeds(study: Study) -> Iterator[style.Shown]:
  for cell in study.cells:
    codecs = list(cell.times)
    figure, axes = style.panel(cell.name, style.height(codecs))
    values = [cell.speed(codec) for codec in codecs]
    axes.barh(range(len(codecs)), values, color=style.BLUE, height=0.7)
    axes.set_yticks(range(len(codecs)), codecs, fontsize=10)
    axes.invert_yaxis()
    axes.set_xlabel("samples a second")
    rows: style.Rows = []
    for codec, value in zip(codecs, values, strict=True):
      gain = f"{cell.gain(codec):.2f}" if "f32" in codecs else ""
      counted = cell.times[codec].get("interface_bytes")
      sent = f"{cell.times[codec]['bytes_a_step']:,.0f}"
      shown = f"{counted:,.0f}" if counted else ""
      rows.append([codec, f"{value:.1f}", gain, sent, shown])
    header = ["codec", "samples/s", "x f32", "bytes a step", "counted"]
    yield style.Shown(style.slug("speed", cell.name), cell.name, figure, header, rows)


def bars(study: Study) -> Iterator[style.Shown]:
  """Yields the parts of a step as stacked bars, with communication at the bottom."""
  for cell in study.cells:
    codecs = list(cell.times)
    figure, axes = style.panel(cell.name, 4.2)
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
    yield style.Shown(style.slug("parts", cell.name), cell.name, figure, header, rows)


def scalings(study: Study) -> Iterator[style.Shown]:
  """Yields how many times as fast N workers are as float32 on the fewest."""
  alike = lambda cell: cell.setting._replace(workers=0, hosts=0, batch=0)
  for cells in in_groups(study.cells, alike).values():
    first = cells[0]
    if len(cells) < 2 or "f32" not in first.times:
      continue
    title = f"{first.setting.network}, {first.link}, batch {first.setting.rule}"
    figure, axes = style.panel(title)
    counts = [cell.setting.workers for cell in cells]
    rows: style.Rows = []
    for i, codec in enumerate(dict.fromkeys(x for cell in cells for x in cell.times)):
      has = [cell for cell in cells if codec in cell.times]
      y = [cell.speed(codec) / first.speed("f32") for cell in has]
      x, drawn = [cell.setting.workers for cell in has], style.color(i, codec)
      axes.plot(x, y, marker="o", markersize=4, label=codec, color=drawn)
      by_count = dict(zip(x, y, strict=True))
      rows.append([codec, *(f"{by_count.get(n, np.nan):.2f}" for n in counts)])
    ideal = [n / counts[0] for n in counts]
    axes.plot(counts, ideal, color="0.6", linestyle=":", label="ideal")
    axes.set(xlabel="workers", ylabel=f"times f32 on {counts[0]}")
    axes.set_xticks(counts)
    style.legend(figure, len(rows) + 1)
    header = ["codec", *(f"N = {n}" for n in counts)]
    yield style.Shown(style.slug("scaling", title), title, figure, header, rows)


def prices(study: Study, price: float) -> Iterator[style.Shown]:
  """Yields accuracy against the dollars of a training."""
  for cell in study.cells:
    group = study.matching(cell)
    if group is None:
      continue
    rows: style.Rows = []
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
    figure, axes = style.panel(cell.name)
    for i, (x, y, codec) in enumerate(sorted(spots)):
      axes.plot(x, y, "o", color="0.1" if codec == "f32" else style.BLUE)
      above = (4, -12, 14)[i % 3]  # points, so that names of neighbors stay apart
      axes.annotate(codec, (x, y), (4, above), textcoords="offset points", fontsize=9)
    axes.set(xlabel="dollars of the training", ylabel="test accuracy (%)")
    axes.margins(0.18)
    header = ["codec", "accuracy", "$", "steps to f32 - 0.2", "s", "$ to it"]
    yield style.Shown(style.slug("dollars", cell.name), caption, figure, header, rows)


def intensities(study: Study) -> Iterator[style.Shown]:
  """Yields the speed-up against the megabytes a GFLOP of the networks."""
  found = (x for x in study.cells if x.setting.workers > 1 and "f32" in x.times)
  alike = in_groups(found, lambda cell: (cell.link, cell.setting.workers))
  for (link, workers), cells in alike.items():
    title = f"N = {workers}, {link}"
    figure, axes = style.panel(title)
    cells = sorted(cells, key=lambda cell: cell.intensity)
    codecs = dict.fromkeys(name for cell in cells for name in cell.times)
    rows: style.Rows = []
    for i, codec in enumerate(name for name in codecs if name != "f32"):
      has = [cell for cell in cells if codec in cell.times]
      x = [cell.intensity for cell in has]
      y = [cell.gain(codec) for cell in has]
      drawn = style.color(i, codec)
      axes.plot(x, y, marker="o", markersize=4, label=codec, color=drawn)
      for cell, gain in zip(has, y, strict=True):
        name = cell.setting.network
        rows.append([name, f"{cell.intensity:.1f}", codec, f"{gain:.2f}"])
    axes.axhline(1, color="0.6", linestyle=":")
    axes.set(xlabel="MB/GFLOP", ylabel="times as fast as f32", xscale="log")
    places = [cell.intensity for cell in cells]
    axes.set_xticks(places, [f"{place:.0f}" for place in places])
    axes.minorticks_off()
    style.legend(figure, len(codecs) - 1)
    header = ["network", "MB/GFLOP", "codec", "x f32"]
    yield style.Shown(style.slug("intensity", title), title, figure, header, rows)
