"""Draws the accuracy of a study: at the end, by workers, and by epoch."""

from collections.abc import Iterator

import numpy as np

from benchmarks.study.analysis import Group, Study, in_groups
from benchmarks.study.figures import style

_CUT = 15  # points of accuracy below the best end, where curves are cut


def ends(group: Group) -> tuple[list[str], style.Rows]:
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


def losses(study: Study) -> Iterator[style.Shown]:
  """Yields the points of accuracy to float32 of each codec, with their intervals."""
  for group in study.groups:
    found = {
      codec: difference
      for codec in group.runs
      if codec != "f32" and (difference := group.difference(codec))
    }
    if not found:
      continue
    figure, axes = style.panel(group.name, style.height(list(found)))
    for i, difference in enumerate(found.values()):
      axes.barh(i, difference.mean, color=style.BLUE, height=0.7)
      axes.errorbar(difference.mean, i, xerr=difference.half, color="0.2", capsize=2)
    lowest = min(x.mean for x in found.values())
    axes.set_xlim(max(-6, min(-0.5, 1.3 * lowest)), 1.5)
    axes.set_yticks(range(len(found)), list(found), fontsize=10)
    axes.invert_yaxis()
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set_xlabel("points of accuracy to float32 (cut at -6 and 1.5)")
    name = style.slug("points", group.name)
    yield style.Shown(name, group.name, figure, *ends(group))


def sweeps(study: Study) -> Iterator[style.Shown]:
  """Yields the points to float32 of groups that differ in their workers alone."""
  for title, groups in by_workers(study).items():
    codecs = dict.fromkeys(x for group in groups for x in group.runs if x != "f32")
    pairs = {
      codec: [(x.setting.workers, y) for x in groups if (y := x.difference(codec))]
      for codec in codecs
    }
    if not any(pairs.values()):
      continue
    figure, axes = style.panel(title)
    for i, (codec, found) in enumerate(pairs.items()):
      if found:
        counts, differences = zip(*found, strict=True)
        y, half = [x.mean for x in differences], [x.half for x in differences]
        line = {"marker": "o", "markersize": 4, "capsize": 2}
        axes.errorbar(counts, y, half, label=codec, color=style.color(i, codec), **line)
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.set_xscale("log", base=2)
    counts = [group.setting.workers for group in groups]
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="workers", ylabel="points to float32")
    style.legend(figure, len(codecs))
    name = style.slug("workers", title)
    yield style.Shown(name, title, figure, *ends_by_workers(groups))


def ends_by_workers(groups: list[Group]) -> tuple[list[str], style.Rows]:
  """Returns the tables of groups that differ in their workers alone as one."""
  rows: style.Rows = []
  for group in groups:
    header, own = ends(group)
    rows += [[str(group.setting.workers), *row] for row in own]
  return ["workers", *header], rows


def by_workers(study: Study) -> dict[str, list[Group]]:
  alike = in_groups(study.groups, lambda group: group.named(""))
  return {title: groups for title, groups in alike.items() if len(groups) > 1}


def curves(study: Study) -> Iterator[style.Shown]:
  """Yields accuracy against epochs, a picture for each family of codecs."""
  for group in study.groups:
    x = group.setting
    for family, codecs in style.families(list(group.runs)):
      figure, axes = style.panel(f"{family}: {group.name}")
      rows: style.Rows = []
      epochs: list[float] = []
      for i, codec in enumerate(codecs):
        found = list(group.curves(codec).values())
        count = min(map(len, found))
        y = np.array([[p["accuracy"] for p in curve[:count]] for curve in found])
        epochs = [point["step"] * x.batch / x.epoch for point in found[0][:count]]
        drawn = style.color(i, codec)
        axes.plot(epochs, y.mean(axis=0), label=codec, color=drawn, linewidth=1.5)
        axes.fill_between(epochs, y.min(axis=0), y.max(axis=0), color=drawn, alpha=0.1)
        rows.append([codec, *(f"{value:.2f}" for value in y.mean(axis=0))])
      best = max(float(row[-1]) for row in rows)
      axes.set_ylim(bottom=max(axes.get_ylim()[0], best - _CUT))
      axes.set(xlabel="epochs", ylabel="test accuracy (%)")
      style.legend(figure, len(codecs))
      axes.grid(alpha=0.3)
      longest = max(len(row) for row in rows) - 1
      points = next(iter(group.curves(codecs[0]).values()))
      header = ["codec", *(f"{p['step'] * x.batch / x.epoch:.2f}" for p in points)]
      rows = [row + [""] * (longest + 1 - len(row)) for row in rows]
      header = (header + [""] * longest)[: longest + 1]
      caption = f"{family}: {group.name}; a band is from the lowest to the highest seed"
      name = style.slug("curve", family, group.name)
      yield style.Shown(name, caption, figure, header, rows)
