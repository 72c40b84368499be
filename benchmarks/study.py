"""Trains with every codec, at its paper's settings and where the papers warn.

  python benchmarks/study.py [--seeds 5] [--tables paper failures 64-sgd] [--quick]
    [--output FOLDER]

Trains the example's LeNet on the embedded digits with a rate that falls along a cosine,
from the same initialisations and with the same batches for every codec. No codec has a
rate of its own. With --output, writes codec_study.json and codec_study.md there.

  paper        8 workers, momentum 0.9 and 200 steps, which is the example's own
               setting, with the codecs as in their papers. The accuracy may be half a
               point below that of f32, and one point for TernGrad.
  low-rank     The same with PowerSGD: its means of rank 2 and 4 may lose half a point.
  longer       The same in 400 steps for 1-bit SGD, which the paper says takes longer.
  failures     8 workers, Adam and 100 steps, where the papers' warnings show. The
               images to train on and to test on change places: 360 images are harder to
               learn from, and 1,437 test images are a finer measure. This setting was
               chosen because it shows the failures, after trials of seven others with
               two seeds. Three of them had Adam, and both failures. Four had momentum
               and rates from 0.05 to 0.15: two showed QSGD's failure, and none showed
               TernGrad's beyond the spread of the seeds.
  64-momentum  TernGrad's figure 3: 64 workers with an image each.
  64-sgd       The same without momentum.
"""

import argparse
import functools
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import running
from tables import spread

from gradcomp._src.exchange.layout import plan
from gradcomp.codecs import (
  QSGD,
  Codec,
  Dense,
  EightBit,
  LeafCodec,
  OneBit,
  PowerSGD,
  Ternary,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import data  # noqa: E402
import image_classification as example  # noqa: E402
from comparison import train_method  # noqa: E402
from methods import TYPES  # noqa: E402
from training import AXIS, Run, Task  # noqa: E402

# Each with the points of accuracy that it may lose; None for no promise.
Codecs = dict[str, tuple[LeafCodec, float | None]]


class Table(NamedTuple):
  """A comparison: options of the example, and the codecs beside the plain mean."""

  title: str
  options: str
  workers: int
  codecs: Codecs
  swapped: bool = False  # whether the images to train on and to test on change places


ONE_BIT: Codecs = {"1-bit SGD, buckets of 64": (OneBit(), 0.5)}
PAPER: Codecs = {
  "QSGD, 8 bits": (QSGD(bits=8), 0.5),
  "QSGD, 4 bits": (QSGD(bits=4), 0.5),
  "QSGD, 2 bits, buckets of 128": (QSGD(bits=2, bucket_size=128), 0.5),
  **{
    f"QSGD, {bits} bits, non-uniform": (QSGD(bits=bits, levels="nonuniform"), 0.5)
    for bits in (4, 3, 2)
  },
  **ONE_BIT,
  "1-bit SGD, buckets of 512": (OneBit(bucket_size=512), None),
  "1-bit SGD, columns": (OneBit(per_column=True), 0.5),
  "TernGrad": (Ternary(), 1.0),
  "TernGrad, base 3": (Ternary(packing="base3"), 1.0),
  **{f"8 bits, {name}": (EightBit(dtype=name), 0.5) for name in TYPES},
}
FAILURES: Codecs = {
  "QSGD, 4 bits": (QSGD(bits=4), None),
  "QSGD, 4 bits, one scale a tensor": (QSGD(bits=4, bucket_size=None), None),
  "QSGD, 2 bits, buckets of 128": (QSGD(bits=2, bucket_size=128), None),
  "QSGD, 2 bits, one scale a tensor": (QSGD(bits=2, bucket_size=None), None),
  "TernGrad": (Ternary(), None),
  "TernGrad, not clipped": (Ternary(clip_sigmas=None), None),
}
TERNARY: Codecs = {"TernGrad": (Ternary(), 1.0)}
LOW_RANK: Codecs = {
  **{f"PowerSGD, rank {rank}": (PowerSGD(rank=rank), 0.5) for rank in (2, 4)},
  "PowerSGD, rank 4, 8 bits": (PowerSGD(rank=4, bits=8), None),
}
ONE_IMAGE = "64 workers with an image each, 60 steps"
TABLES = {
  "paper": Table("8 workers, momentum, 200 steps", "", 8, PAPER),
  "low-rank": Table("8 workers, momentum, 200 steps", "", 8, LOW_RANK),
  "longer": Table("8 workers, momentum, 400 steps", "--steps 400", 8, ONE_BIT),
  "failures": Table(
    "8 workers, Adam, 100 steps, 360 images to train on",
    "--optimizer adam --learning-rate 1e-3 --steps 100",
    8,
    FAILURES,
    swapped=True,
  ),
  "64-momentum": Table(f"{ONE_IMAGE}, momentum", "--steps 60", 64, TERNARY),
  "64-sgd": Table(
    f"{ONE_IMAGE}, no momentum",
    "--momentum 0 --learning-rate 0.2 --steps 60",
    64,
    TERNARY,
  ),
}
QUICK = ("failures",)  # what a quick run takes
OPTIONS = ("model", "optimizer", "momentum", "learning_rate", "batch_size", "steps")
COLUMNS = (
  "codec",
  "test accuracy",
  "points to f32",
  "allowed",
  "bytes a step",
  "ratio",
)


def study(table: Table, images: data.ImageSet, args: argparse.Namespace) -> Any:
  """Trains with all codecs of a table, after the plain mean."""
  devices = jax.devices()[: table.workers]
  mesh = jax.make_mesh((table.workers,), (AXIS,), devices=devices)
  train, test = images[1::-1] if table.swapped else images[:2]
  task = example.make_task(data.ImageSet(train, test, images.classes), args, mesh)
  draw = functools.partial(data.batches, train, args.batch_size)
  baseline = train_method("f32", Dense(), task, draw, args)
  rows = [row(baseline, baseline, None)]
  for name, (codec, limit) in table.codecs.items():
    runs = train_method(name, codec, task, draw, args)
    rows.append(row(runs, baseline, limit))
    print(" | ".join(cells(rows[-1])), flush=True)
  return {
    "title": table.title,
    "options": {name: getattr(args, name) for name in OPTIONS},
    "seeds": args.seeds,
    "workers": table.workers,
    "swapped": table.swapped,
    **sizes(task, QSGD()),
    "rows": rows,
  }


def sizes(task: Task, codec: Codec, min_leaf_size: int | None = None) -> dict[str, int]:
  """Counts the elements of the model, and those that a codec compresses."""
  shapes = jax.eval_shape(lambda: task.init_params(0))
  layout = plan(jax.tree.leaves(shapes), codec, min_leaf_size=min_leaf_size)
  leaves = zip(layout.like, layout.slots, strict=True)
  compressed = [x.size for x, slot in leaves if layout.codecs[slot.group] == codec]
  return {"elements": layout.elements, "compressed": sum(compressed)}


def row(runs: list[Run], baseline: list[Run], limit: float | None) -> dict[str, Any]:
  """Sums up the runs of a codec, one for each seed."""
  accuracy, exact = (
    [100 * run.points[-1].test_accuracy for run in group] for group in (runs, baseline)
  )
  return {
    "codec": runs[0].codec,
    "accuracy_percent": accuracy,
    "points_to_f32": [a - b for a, b in zip(accuracy, exact, strict=True)],
    "points_allowed": limit,
    "test_loss": [run.points[-1].test_loss for run in runs],
    "bytes_a_step": runs[0].bytes_a_step,
    "ratio": runs[0].bytes_a_step / runs[0].f32_bytes_a_step,
    "step_ms": statistics.median(run.step_ms for run in runs),
  }


def cells(row: dict[str, Any]) -> list[str]:
  """Returns the cells of a line of the table."""
  limit = row["points_allowed"]
  return [
    row["codec"],
    spread(row["accuracy_percent"]) + " %",
    "" if row["codec"] == "f32" else spread(row["points_to_f32"], "+"),
    "" if limit is None else f"-{limit}",
    f"{row['bytes_a_step']:,}",
    f"{row['ratio']:.3f}",
  ]


def quick(table: Table) -> Table:
  """Returns a table with one codec, and a title that nobody takes for a result."""
  (first, *_) = table.codecs.items()
  title = f"A quick run, no result: {table.title}"
  return table._replace(title=title, workers=2, codecs=dict([first]))


def markdown(results: list[dict[str, Any]]) -> str:
  """Writes all tables in Markdown."""
  parts = []
  for result in results:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, result["rows"])]
    parts += [
      f"{result['title']}; mean and standard deviation over {result['seeds']} seeds, "
      f"differences seed by seed; {result['compressed']:,} of {result['elements']:,} "
      "elements compressed, the others in float32.",
      "\n".join(f"| {' | '.join(line)} |" for line in lines),
    ]
  return "\n\n".join(parts) + "\n"


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--tables", nargs="+", choices=TABLES)
  parser.add_argument("--seeds", type=int, default=5)
  running.add_quick(parser, "two steps of two workers with one codec a table")
  parser.add_argument("--data-dir", type=Path, default=data.FOLDER, help=data.HELP)
  parser.add_argument("--output", type=Path, help="folder of the two files")
  options = parser.parse_args()
  tables = [TABLES[name] for name in options.tables or TABLES]
  if options.quick:
    tables = [quick(TABLES[name]) for name in options.tables or QUICK]
    options.seeds = 1
  jax.config.update("jax_num_cpu_devices", max(table.workers for table in tables))
  images = data.load("digits", options.data_dir)
  results = []
  for table in tables:
    args = example.parse(table.options.split())
    args.seeds = options.seeds
    args.steps = 2 if options.quick else args.steps
    args.evaluate_every = args.steps
    print(table.title)
    results.append(study(table, images, args))
    if options.output:
      running.write(options.output, "codec_study", results, markdown(results))
  print(markdown(results))


if __name__ == "__main__":
  main()
