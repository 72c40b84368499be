"""Makes the panels of a study's report, so narrow that a phone shows their text."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
