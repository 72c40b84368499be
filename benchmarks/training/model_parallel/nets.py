"""Trains nets whose convolutions are data parallel, and whose other layers are cut.

  python -m benchmarks.training.model_parallel.nets [--seeds 5] [--steps 300] [--quick]
    [--output FOLDER]

They are the other two nets of Dettmers (2016), section 3.4: one with locally connected
layers, and one like AlexNet, whose three dense layers take a batch in four sub-batches.
Images are the embedded digits of 8 x 8 pixels, so both nets are smaller than his;
training/model_parallel/convolutions.py says how. Four workers are a vmap on one device.
Each convolves a quarter of the batch. Features, activations and errors travel in one
data type, rounded on their own worker, too, and so do the gradients of convolutions,
without feedback. The tests use the same cut net and the same type.

The page compares each type with f32, seed by seed, from the same initialization and
with the same batches. It says what so few images can show. With --output, writes
model_parallel_nets.json and .md there.
"""

import argparse
import math
import statistics
import time
from typing import Any, NamedTuple

from scipy import stats

from benchmarks.common import cli
from benchmarks.common.tables import table
from benchmarks.training.model_parallel.convolutions import (
  Net,
  locally_connected,
  three_dense,
)
from benchmarks.training.model_parallel.data_types import (
  ARMS,
  accuracies,
  beside,
  friedman,
)
from benchmarks.training.model_parallel.hybrid import of_net
from benchmarks.training.model_parallel.ways import Arm, digits, options


def nets(args: argparse.Namespace) -> dict[str, Net]:
  """Returns the nets by what the page calls them."""
  return {
    "locally connected": locally_connected(args.filters),
    "like AlexNet, 4 sub-batches": three_dense(args.filters, args.hidden),
  }


class Change(NamedTuple):
  """How much larger the test error of a type is than that of f32.

  Attributes:
    points: the mean over the seeds, in points.
    half: half the width of its 95 % interval, for normal differences.
    relative: the mean, in percent of the error of f32.
  """

  points: float
  half: float
  relative: float


def change(own: list[float], plain: list[float]) -> Change:
  """Compares accuracies in percent, seed by seed.

  Example:
    >>> found = change([97.0, 98.0, 97.0], [98.0, 98.0, 98.0])
    >>> [round(x, 2) for x in found]
    [0.67, 1.43, 33.33]
  """
  more = [b - a for a, b in zip(own, plain, strict=True)]
  points, count = statistics.fmean(more), len(more)
  error = 100 - statistics.fmean(plain)
  spread = statistics.stdev(more) / count**0.5
  half = float(stats.t.ppf(0.975, count - 1)) * spread
  return Change(points, half, 100 * points / error if error else math.inf)


def markdown(found: dict[str, Any]) -> str:
  """Writes the tables in Markdown."""
  about = found["options"]
  image = 100 / about["tested"]
  parts = [
    f"Nets on digits of 8 x 8 pixels: {about['filters']} filters, "
    f"{about['hidden']} units of a dense layer, {about['workers']} emulated "
    f"workers, batches of {about['batch']}, {about['steps']} steps of RMSProp at "
    f"{about['rate']} along a cosine; {about['images']} images to train on and "
    f"{about['tested']} to test on. Test accuracies in percent, mean and standard "
    f"deviation over {about['seeds']} seeds, and in brackets less f32 seed by seed. "
    "p is that of Friedman's analysis of variance over the five arms, whose blocks are "
    f"the seeds. All of it took {found['seconds']} s.",
    table(
      ["net", *ARMS, "p"],
      [
        [
          name,
          *beside(arms),
          f"{friedman(arms.values()):.3f}",
        ]
        for name, arms in found["accuracy_percent"].items()
      ],
    ),
    "How much larger the test error is than that of f32: in points, with the 95 % "
    "interval over the seeds, and in percent of it. The paper's own nets differ by "
    "less than 2 percent (local layers) and 0.2 points (AlexNet). One image more or "
    f"less is {image:.2f} points of one seed.",
    table(
      ["net", "type", "points", "relative"],
      [
        [name, kind, f"{x.points:+.2f} ± {x.half:.2f}", f"{x.relative:+.0f} %"]
        for name, arms in found["accuracy_percent"].items()
        for kind in [*arms][1:]
        for x in [change(arms[kind], arms["f32"])]
      ],
    ),
  ]
  return "\n\n".join(parts) + "\n"


def main() -> None:
  args = options(
    __doc__,
    "two steps of small nets, with three of the types",
    filters=cli.Option(16, 8, "of a convolution"),
    hidden=cli.Option(128, 16, "units of dense layers"),
  )
  sets, about = digits(args)
  start = time.perf_counter()
  accuracy = {
    title: {
      name: accuracies(
        f"{title}, {name}", of_net(Arm("model", codec), net, sets, args), args.seeds
      )
      for name, codec in [*ARMS.items()][: 3 if args.quick else None]
    }
    for title, net in nets(args).items()
  }
  found: dict[str, Any] = {
    "options": {"filters": args.filters, "hidden": args.hidden} | about,
    "accuracy_percent": accuracy,
    "seconds": round(time.perf_counter() - start),
  }
  print(markdown(found))
  cli.write(args.output, "model_parallel_nets", found, markdown(found))


if __name__ == "__main__":
  main()
