"""Trains a net with dense layers sharded over workers, which send activations.

    python -m examples.model_parallel --codec linear
    python -m examples.model_parallel --compare f32 linear qsgd-4 --seeds 3
    python -m examples.model_parallel --channels 32 --passes 4 --checkpoint saved

The net is Dettmers' (2016): two hidden layers with dropout, trained by RMSProp. Each
layer is sharded by its outputs. Workers gather activations after the unit, and scatter
the errors of their inputs, both in the codec. With ``--channels``, a convolution stands
in front. It is whole on every worker, each convolves its own samples, and its gradients
are averaged in float32. Without accelerators it emulates eight devices on the CPU.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

import jax

import gradcomp
from examples.lib import parsing, report
from examples.lib.checkpoints import add_arguments, saved_in
from examples.lib.comparison import footnote
from examples.lib.data import images as data
from examples.lib.methods import METHODS
from examples.lib.parsing import natural, positive, positive_float
from examples.lib.progress import Progress
from examples.lib.sharded import cut_layers
from examples.lib.sharded.cut_task import AXIS, Task
from examples.lib.training import Run, train

# All codecs but the sparse ones, and those that need error feedback or a memory.
NAMES = (
  "f32",
  "bf16",
  "dynamic-tree",
  "dynamic-map",
  "static-tree",
  "linear",
  "mantissa",
  "qsgd-8",
  "qsgd-4",
  "qsgd-2",
  "terngrad",
  "aps-5-2",
  "aps-4-3",
)
COMPARED = ("f32", "dynamic-tree", "static-tree", "linear", "mantissa")


def main(argv: Sequence[str] | None = None) -> None:
  """Trains with the options given, prints the table and writes the files."""
  parser = make_parser()
  args = parser.parse_args(argv)
  jax.config.update("jax_num_cpu_devices", args.devices)
  mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
  if args.batch_size % (mesh.size * args.passes):
    parser.error(
      f"--batch-size must be a multiple of {mesh.size} workers x {args.passes} passes"
    )
  if args.hidden % mesh.size:
    parser.error(f"--hidden must be a multiple of the {mesh.size} workers")
  images = data.load(args.dataset, args.data_dir)
  if args.batch_size > len(images.train.labels):
    parser.error(
      f"--batch-size must be at most the {len(images.train.labels)} images, got "
      f"{args.batch_size}"
    )
  names = [args.codec] if args.compare is None else args.compare or COMPARED
  runs = []
  for name in names:
    runs += run_codec(name, Task(images, METHODS[name], args, mesh), images, args)
  print(report.table(runs))
  print(footnote(mesh.size).replace("mean", "exchange"))
  title = f"dense layers sharded over {mesh.size} workers, {args.dataset}"
  print("wrote", *report.write(runs, args.output, title=title))


def run_codec(
  name: str, task: Task, images: data.ImageSet, args: argparse.Namespace
) -> list[Run]:
  """Compiles the step once for all seeds, and trains from each.

  The optimizer of the convolution has gradcomp's transformation, so a record of it is
  saved beside the state. Sharded leaves keep nothing of gradcomp's: a run of another
  codec has a folder of its own, Orbax refuses arrays of other shapes, and any number of
  workers that the layers can be sharded over takes up the whole arrays.
  """
  batches = functools.partial(data.batches, images.train, args.batch_size)
  batch = task.place(next(batches(seed=0)))
  step = task.step.lower(*task.start(0), batch).compile()
  wire = gradcomp.wire_report(step)
  runs = []
  for seed in range(args.seed, args.seed + args.seeds):
    title = f"{name} seed {seed}"
    with (
      Progress(title, args.steps) as progress,
      saved_in(args, f"{name}-{seed}", **task.recorded()) as saved,
    ):
      points, step_ms = train(
        task,
        step,
        *task.start(seed),
        batches(seed=seed),
        steps=args.steps,
        evaluate_every=args.evaluate_every,
        bytes_a_step=wire.bytes_sent,
        progress=progress,
        saved=saved,
      )
    runs.append(Run(name, seed, wire.bytes_sent, wire.dense_bytes, step_ms, points))
  return runs


def make_parser() -> argparse.ArgumentParser:
  """Makes the parser of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument_group("task").add_argument
  add(
    "--dataset",
    choices=("digits", "mnist5k", "mnist", "fashion_mnist", "cifar10"),
    default="digits",
    help="digits (default) and mnist5k are embedded, the others download once",
  )
  add("--data-dir", type=Path, default=data.FOLDER, help=data.HELP)
  add(
    "--hidden",
    type=positive,
    default=1024,
    help="units of a layer; default: 1024",
  )
  add("--unit", choices=tuple(cut_layers.UNITS), default="relu", help="default: relu")
  add(
    "--channels",
    type=natural,
    default=0,
    help="of a convolution; default: 0, no such",
  )
  add(
    "--learning-rate",
    type=positive_float,
    default=0.003,
    help="at first; default: 0.003",
  )
  add(
    "--batch-size",
    type=positive,
    default=128,
    help="of all workers; default: 128",
  )
  add("--steps", type=positive, default=200, help="default: 200")
  add("--seed", type=parsing.seed, default=0, help="of parameters, batches and dropout")

  add = parser.add_argument_group("exchange").add_argument
  add(
    "--codec",
    choices=NAMES,
    default="dynamic-tree",
    metavar="CODEC",
    help=f"one of {', '.join(NAMES)}; default: dynamic-tree",
  )
  add(
    "--own",
    choices=("exact", "coded"),
    default="exact",
    help="whether a worker takes its own part as it is (default) or rounded, too",
  )
  add(
    "--passes",
    type=positive,
    default=1,
    help="sub-batches of a batch; default: 1",
  )

  add = parser.add_argument_group("comparison").add_argument
  add(
    "--compare",
    nargs="*",
    choices=NAMES,
    metavar="CODEC",
    help=f"train several from one initialization; without names: {' '.join(COMPARED)}",
  )
  add("--seeds", type=positive, default=1, help="as many seeds; default: 1")
  add(
    "--evaluate-every",
    type=positive,
    default=10,
    help="steps between two points of the curves; default: 10",
  )
  add(
    "--output",
    type=Path,
    default=Path("results"),
    help="folder of summary.csv, curves.csv and curves.png; default: results",
  )

  parser.add_argument(
    "--devices",
    type=parsing.devices,
    default=8,
    help="CPU devices to emulate, where there are no accelerators; default: 8",
  )
  add_arguments(parser)
  return parser


if __name__ == "__main__":
  main()
