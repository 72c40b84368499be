"""Draws the README's picture, docs/results/speed.png, from the times of links.

  python -m benchmarks.links.front_picture [--output FILE]

Each bar is the time that a codec takes to exchange a 64 MiB gradient between 4 hosts on
links of 1 Gbit/s, in the exchange that ``exchange="auto"`` takes there. Nothing is
measured here: ``python -m benchmarks.links.speed`` does that.
"""

import json
import pathlib
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common import cli
from benchmarks.links import results

# The labels of the bars, and the names of the steps in the file.
BARS = {
  "float32, plain mean": "plain f32 mean",
  "bfloat16": "bf16 two_shot",
  "QSGD, 8 bits": "qsgd-8 two_shot",
  "QSGD, 4 bits": "qsgd-4 two_shot",
  "QSGD, 2 bits": "qsgd-2 two_shot",
}
_GRAY, _BLUE = "#9a9a9a", "#2f6db3"


def milliseconds() -> dict[str, float]:
  """Reads the median time of each bar's step."""
  found = json.loads((cli.RESULTS / "links" / "link_speed.json").read_text())
  run = results.find(found["runs"], hosts=4, rate="1gbit", leaves=1)
  return {x: 1e3 * run["steps"][y]["median_seconds"] for x, y in BARS.items()}


def draw(times: dict[str, float], path: pathlib.Path) -> None:
  """Draws a bar for each time, with its speed-up over the first."""
  values = list(times.values())
  figure = Figure(figsize=(5.8, 3.0))
  axis = figure.subplots()
  form: Any = {"textcoords": "offset points", "va": "center_baseline", "fontsize": 12}
  colors = [_GRAY, _GRAY, *[_BLUE] * (len(values) - 2)]
  axis.barh(list(times), values, color=colors, height=0.7)
  for row, value in enumerate(values):
    speed_up = f"{values[0] / value:.1f} x f32" if row else ""
    for text, left, weight in ((f"{value:.0f} ms", 7, 400), (speed_up, 66, 700)):
      axis.annotate(text, (value, row), xytext=(left, 0), weight=weight, **form)
  axis.invert_yaxis()
  axis.set_xlim(0, 1.2 * values[0])
  axis.xaxis.set_visible(False)
  axis.tick_params(axis="y", length=0, labelsize=12)
  axis.spines[["top", "right", "bottom"]].set_visible(False)
  axis.spines["left"].set_color("0.7")
  title = "Averaging a 64 MiB gradient over 4 hosts on links of 1 Gbit/s"
  figure.text(0.02, 0.93, title, fontsize=11, weight=700)
  what = "Median time from the gradient to its mean: encode, exchange, decode"
  figure.text(0.02, 0.855, what, fontsize=10, color="0.35")
  figure.tight_layout(rect=(0, 0, 1, 0.85))
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, format="png", dpi=150, metadata={"Software": None})


def main() -> None:
  default = cli.ROOT / "docs" / "results" / "speed.png"
  options = cli.parser(__doc__, "the same picture", default).parse_args()
  times = milliseconds()
  if output := options.output or (None if options.quick else default):
    draw(times, output)


if __name__ == "__main__":
  main()
