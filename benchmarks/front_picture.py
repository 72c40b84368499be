"""Draws the README's picture, docs/results/speed.png, from results/link_speed.json.

  python benchmarks/front_picture.py [--output FILE]

Each bar is the time that a codec takes to exchange a 64 MiB gradient between 4 hosts on
links of 1 Gbit/s, in the exchange that ``exchange="auto"`` takes there. Nothing is
measured here: ``python benchmarks/link_speed.py`` does that.
"""

import argparse
import json
import pathlib

import link_results
import running

_HERE = pathlib.Path(__file__).parent
_HOSTS, _RATE = 4, "1gbit"
# The labels of the bars, and the names of the steps in the file.
BARS = {
  "float32, plain mean": "plain f32 mean",
  "bfloat16": "bf16 two_shot",
  "QSGD, 8 bits": "qsgd-8 two_shot",
  "QSGD, 4 bits": "qsgd-4 two_shot",
  "QSGD, 2 bits": "qsgd-2 two_shot",
}
_GREY, _BLUE = "#9a9a9a", "#2f6db3"


def milliseconds() -> dict[str, float]:
  """Reads the median time of each bar's step."""
  found = json.loads((_HERE / "results" / "link_speed.json").read_text())
  run = link_results.find(found["runs"], _HOSTS, _RATE, leaves=1)
  return {
    label: 1e3 * run["steps"][step]["median_seconds"] for label, step in BARS.items()
  }


def draw(times: dict[str, float], path: pathlib.Path) -> None:
  """Draws a bar for each time, with its speed-up over the first."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  labels, values = list(times), list(times.values())
  figure, axis = plt.subplots(figsize=(7.6, 3.0))
  colors = [_GREY, _GREY, *[_BLUE] * (len(values) - 2)]
  axis.barh(labels, values, color=colors, height=0.7)
  for row, value in enumerate(values):
    speed_up = f"{values[0] / value:.1f} x f32" if row else ""
    for text, left, weight in ((f"{value:.0f} ms", 7, 400), (speed_up, 61, 700)):
      axis.annotate(
        text,
        (value, row),
        xytext=(left, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=11,
        weight=weight,
      )
  axis.invert_yaxis()
  axis.set_xlim(0, 1.12 * values[0])
  axis.xaxis.set_visible(False)
  axis.tick_params(axis="y", length=0, labelsize=11)
  for side in ("top", "right", "bottom"):
    axis.spines[side].set_visible(False)
  axis.spines["left"].set_color("0.7")
  title = "Averaging a 64 MiB gradient over 4 hosts on links of 1 Gbit/s"
  figure.text(0.02, 0.93, title, fontsize=12, weight=700)
  what = "Median time from the gradient to its mean: encode, exchange, decode"
  figure.text(0.02, 0.855, what, fontsize=10, color="0.35")
  figure.tight_layout(rect=(0, 0, 1, 0.85))
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, format="png", dpi=150, metadata={"Software": None})
  plt.close(figure)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  running.add_quick(parser, "the same picture")
  default = _HERE.parent / "docs" / "results" / "speed.png"
  shown = default.relative_to(_HERE.parent)
  parser.add_argument("--output", type=pathlib.Path, help=f"default: {shown}")
  options = parser.parse_args()
  times = milliseconds()
  if output := options.output or (None if options.quick else default):
    draw(times, output)


if __name__ == "__main__":
  main()
