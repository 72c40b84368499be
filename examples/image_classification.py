"""Trains an image classifier on several workers and counts the bytes they exchange.

    python -m examples.image_classification --codec qsgd --bits 4
    python -m examples.image_classification --compare f32 qsgd-8 onebit-64 --seeds 3
    python -m examples.image_classification --dataset fashion_mnist --model vgg
    python -m examples.image_classification --steps 2000 --checkpoint saved

Without accelerators it emulates eight devices on the CPU; with them it uses all of
them. Under several processes, every process runs the same line with ``--coordinator``,
``--num-processes`` and ``--process-id``, or without them where JAX detects the cluster
(SLURM, Open MPI, Kubernetes, cloud TPU). With ``--checkpoint``, the same line once more
goes on where the last one was stopped, and ends with the same numbers.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from examples.lib import command_line, methods, networks
from examples.lib.comparison import compare, show
from examples.lib.data import images as data
from examples.lib.training import AXIS, Task

DEFAULTS = command_line.Defaults(
  codec="qsgd",
  compared=("f32", "qsgd-8", "qsgd-4", "qsgd-2"),
  rates={"sgd": 0.05, "adam": 1e-3},
  nesterov=False,
  clip=None,
  batch_size=64,
  steps=200,
  devices=8,
  evaluate_every=10,
  output=Path("results"),
)


def main(argv: Sequence[str] | None = None) -> None:
  """Trains with the options given, prints the table and writes the files."""
  parser = make_parser()
  args = parse(argv, parser)
  chosen = methods.choose(parser, args, DEFAULTS.compared)
  command_line.join_processes(args)
  mesh = command_line.make_mesh(parser, args, AXIS)
  images = load_everywhere(args)
  if args.batch_size > len(images.train.labels):
    parser.error(
      f"--batch-size must be at most the {len(images.train.labels)} images, got "
      f"{args.batch_size}"
    )
  task = make_task(images, args, mesh)
  draw = functools.partial(
    data.batches, images.train, args.batch_size, **command_line.process_part()
  )
  runs = compare(chosen, task, draw, args)
  show(runs, args, title=f"{args.model} on {args.dataset}", workers=mesh.size)


def make_task(
  images: data.ImageSet, args: argparse.Namespace, mesh: jax.sharding.Mesh
) -> Task:
  """Makes the task of the network that the options name."""
  train = images.train.images
  model = networks.for_images(args.model, train.shape[1:], images.classes, args.dropout)
  return Task(model, images.test, mesh, known=train[:1000])


def load_everywhere(args: argparse.Namespace) -> data.ImageSet:
  """Loads the data in every process, after the first process has prepared it."""
  first = jax.process_index() == 0
  if first:
    images = data.load(args.dataset, args.data_dir)
  multihost_utils.sync_global_devices("data is prepared")
  return images if first else data.load(args.dataset, args.data_dir)


def parse(
  argv: Sequence[str] | None, parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
  """Reads the options."""
  parser = parser or make_parser()
  return command_line.complete(parser, parser.parse_args(argv), DEFAULTS)


def make_parser() -> argparse.ArgumentParser:
  """Makes the parser of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  group = parser.add_argument_group("task")
  group.add_argument(
    "--dataset",
    choices=("digits", "mnist5k", "mnist", "fashion_mnist", "cifar10"),
    default="digits",
    help="digits (default) and mnist5k are embedded, `make data` prepares mnist and "
    "fashion_mnist, and cifar10 downloads once",
  )
  group.add_argument("--data-dir", type=Path, default=data.FOLDER, help=data.HELP)
  command_line.add_training(group, tuple(networks.IMAGES), DEFAULTS)
  command_line.add_exchange(parser, DEFAULTS)
  command_line.add_comparison(parser, DEFAULTS)
  command_line.add_devices(parser, DEFAULTS)
  return parser


if __name__ == "__main__":
  main()
