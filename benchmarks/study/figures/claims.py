"""Draws a claim: the interval of each setting beside the limit where it holds."""

import hashlib
import io
import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

from benchmarks.study.figures.results import legend, panel
from benchmarks.study.judges.verdicts import APART, Bar

SHOWS = "Shows"  # the text in a file that has its digest
Drawn = Sequence[tuple[str, Bar]]
# The colors and the marks of rows. Each says the same: not all see all colors.
_MARKS = {
  "holds": ("#2e7d32", "o", "#2e7d32"),
  "does not": ("#c62828", "X", "#c62828"),
  "cannot tell": ("#666666", "o", "#ffffff"),
  APART: ("#8f8f8f", "|", "#8f8f8f"),
}
_SHADE = "#e3f0e3"
_DOTTED = {"color": "0.2", "linewidth": 1, "linestyle": ":"}
_COLUMNS = 60  # characters of a label in a line
_LINE = 0.185  # inches
_BAR = 0.2  # inches of a row below its label
_GAP = 0.05  # inches above a label
_FAR = 10  # times as far from its limit as the nearest row: there an axis is cut
_WORTH = 3  # times as much room for rows that are near, from where an axis is cut
_WIDE = 4  # times the least ratio from where ratios have logarithms


def draw(drawn: Drawn) -> Figure:
  """Draws a row for each bar, with its label above it.

  Intervals that end outside have an arrow, and means that lie there their numbers.
  """
  labels = [textwrap.wrap(bar.label, _COLUMNS) for _, bar in drawn]
  heights = [_GAP + _LINE * len(lines) + _BAR for lines in labels]
  figure, axes = panel("", sum(heights) + 0.8)
  low, high, logarithms = _range(drawn)
  if logarithms:
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(places := _ticks(low, high), [f"{x:g}" for x in places])
  axes.set_xlim(low, high)
  axes.set_ylim(sum(heights) + _GAP, 0)
  axes.set_yticks([])
  axes.spines["left"].set_visible(False)
  top = 0.0
  look = {"fontsize": 10.5, "va": "top", "linespacing": 1.1}
  look["transform"] = axes.get_yaxis_transform()
  for (word, bar), lines, height in zip(drawn, labels, heights, strict=True):
    _row(axes, word, bar, (top + height - _BAR, top + height))
    axes.text(0.0, top + _GAP, "\n".join(lines), **look)
    top += height
  axes.set_xlabel(textwrap.fill(drawn[0][1].limit.unit, _COLUMNS), fontsize=10)
  legend(figure, _name(axes, drawn))
  return figure


def png(drawn: Drawn) -> bytes:
  """Returns the picture of ``draw`` as a file of few colors, and so of few bytes.

  The colors are the same in all pictures: those that most pixels have would leave out
  those of the marks. The file says by its ``digest`` what it shows.
  """
  file, small = io.BytesIO(), io.BytesIO()
  draw(drawn).savefig(file, format="png", dpi=110)
  image = Image.open(file).convert("RGB")
  palette = Image.new("P", (1, 1))
  palette.putpalette(_palette())
  image = image.quantize(palette=palette, dither=Image.Dither.NONE)
  info = PngImagePlugin.PngInfo()
  info.add_text(SHOWS, digest(drawn))
  image.save(small, format="png", optimize=True, pnginfo=info)
  return small.getvalue()


def digest(drawn: Drawn) -> str:
  """Returns a name of the bars of a picture, made of four digits of each number."""
  lines = [
    f"{word} {bar.label} {bar.low:.4g} {bar.mean:.4g} {bar.high:.4g} {bar.limit}"
    for word, bar in drawn
  ]
  return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _row(axes: Axes, word: str, bar: Bar, rows: tuple[float, float]) -> None:
  """Draws the shade, the limit and the interval of a bar, and arrows to what is out."""
  low, high = sorted(axes.get_xlim())
  limit = bar.limit
  line, *_ = _MARKS[word]
  shade = (limit.value, high) if limit.above else (low, limit.value)
  axes.fill_betweenx(rows, *shade, color=_SHADE, linewidth=0)
  axes.plot([limit.value] * 2, rows, color="0.2", linewidth=1.2)
  if _has_effect(bar, low, high):
    axes.plot([limit.half] * 2, rows, **_DOTTED)
  y = sum(rows) / 2
  ends = [min(max(x, low), high) for x in (bar.low, bar.high)]
  axes.plot(ends, [y, y], color=line, linewidth=2, solid_capstyle="butt")
  for end, out, arrow in ((low, bar.low < low, "<"), (high, bar.high > high, ">")):
    if out:
      axes.plot(end, y, arrow, color=line, markersize=7, clip_on=False)
  if low <= bar.mean <= high:
    axes.plot(bar.mean, y, markersize=7, clip_on=False, **_look(word))
  else:
    end, away, side = (low, 12, "left") if bar.mean < low else (high, -12, "right")
    look = {"fontsize": 9, "color": line, "va": "center", "ha": side}
    look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 2}
    place = (end, y), (away, 0)
    axes.annotate(f"{bar.mean:.3g}", *place, textcoords="offset points", **look)


def _name(axes: Axes, drawn: Drawn) -> int:
  """Names the marks, the shade and the lines of a picture, and returns how many."""
  words = {word for word, _ in drawn}
  found = [word for word in _MARKS if word in words]
  for word in found:
    axes.plot([], [], label=word, **_look(word))
  axes.fill_between([], [], color=_SHADE, label="where it holds")
  if effect := any(_has_effect(bar, *axes.get_xlim()) for _, bar in drawn):
    axes.plot([], [], label="half of the effect", **_DOTTED)
  return len(found) + 1 + effect


def _look(word: str) -> dict[str, Any]:
  """Returns how a mark is drawn."""
  names = "color", "marker", "markerfacecolor"
  return dict(zip(names, _MARKS[word], strict=True)) | {"markeredgewidth": 1.6}


def _has_effect(bar: Bar, low: float, high: float) -> bool:
  """Returns whether a bar has half of an effect that is shown."""
  half = bar.limit.half
  return half is not None and low < half < high


def _range(drawn: Drawn) -> tuple[float, float, bool]:
  """Returns the ends of the axis, and whether it has logarithms.

  It has the limits, and the intervals of rows that count, but for what is far outside:
  a net that fails loses eighty points, where others lose tenths.
  """
  every = [bar for _, bar in drawn]
  counted = [bar for word, bar in drawn if word != APART] or every
  limits = [x.limit.value for x in every]
  ends = [*limits, *(x for bar in counted for x in (bar.low, bar.high))]
  low, high = min(ends), max(ends)
  if low > 0 and high > _WIDE * low:
    return low / 1.15, high * 1.15, True
  apart = lambda bar: max(abs(x - bar.limit.value) for x in (bar.low, bar.high))
  near = min(map(apart, counted))
  cut = max(low, min(limits) - _FAR * near), min(high, max(limits) + _FAR * near)
  if high - low > _WORTH * (cut[1] - cut[0]):
    low, high = cut
  # Room beside a limit, where the claim holds.
  room = 0.08 * (high - low or abs(high) or 1.0)
  return low - room, high + room, False


def _ticks(low: float, high: float) -> list[float]:
  """Returns round numbers of an axis with logarithms."""
  least, most = math.floor(math.log10(low)), math.ceil(math.log10(high))
  every = [x * 10.0**n for n in range(least, most + 1) for x in (1, 2, 5)]
  return [x for x in every if low <= x <= high]


def _palette() -> list[int]:
  """Returns the colors of a picture, and those between each and what it lies on."""
  grounds = [to_rgb(x) for x in ("white", _SHADE)]
  inks = map(to_rgb, ("black", "0.2", *(line for line, *_ in _MARKS.values())))
  shares = 0.0, 0.3, 0.65, 1.0
  return [
    round(255 * (share * a + (1 - share) * b))
    for ground, ink, share in itertools.product(grounds, inks, shares)
    for a, b in zip(ink, ground, strict=True)
  ]
