"""The options that the trainers of images and of text share."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from examples.lib import networks
from examples.lib.checkpoints import add_arguments
from examples.lib.methods import EXCHANGES, METHODS, WIDTHS
from examples.lib.optimizers import SCHEDULES
from examples.lib.parsing import (
  at_least_0,
  bucket,
  devices,
  fraction,
  natural,
  part,
  positive,
  positive_float,
  seed,
  share,
)


class Defaults(NamedTuple):
  """The defaults of a trainer, of images or of text."""

  codec: str
  compared: tuple[str, ...]  # what --compare without names stands for
  rates: dict[str, float]  # of each optimizer
  nesterov: bool
  clip: float | None
  batch_size: int
  steps: int
  devices: int
  evaluate_every: int
  output: Path


def add_training(
  group: "argparse._ArgumentGroup", models: Sequence[str], defaults: Defaults
) -> None:
  """Adds the network, the optimizer, and how long to train."""
  add = group.add_argument
  add("--model", choices=models, default=models[0], help=f"default: {models[0]}")
  dropping = ", ".join(name for name in models if name in networks.DROPPING)
  add("--dropout", type=share, metavar="RATE", help=f"of {dropping}; default: its own")
  add("--optimizer", choices=("sgd", "adam"), default="sgd", help="default: sgd")
  add("--momentum", type=share, default=0.9, help="of sgd; default: 0.9")
  add(
    "--nesterov",
    action=argparse.BooleanOptionalAction,
    default=defaults.nesterov,
    help="whether momentum of sgd is Nesterov's",
  )
  rates = ", ".join(f"{rate} of {name}" for name, rate in defaults.rates.items())
  add("--learning-rate", type=positive_float, help=f"at first; default: {rates}")
  add(
    "--schedule",
    choices=SCHEDULES,
    default="cosine",
    help="how the rate falls: to zero along a cosine (default) or as the root of the "
    "steps left, by half whenever the training loss between evaluations stops falling, "
    "or not at all",
  )
  add("--weight-decay", type=at_least_0, default=0.0, help="of weights; default: 0")
  add(
    "--clip",
    type=positive_float,
    default=defaults.clip,
    metavar="NORM",
    help=f"norm that gradients are clipped at; default: {defaults.clip or 'none'}",
  )
  add(
    "--ema",
    type=fraction,
    metavar="DECAY",
    help="test the moving average of the parameters; 0.9999 in Wen et al., of 10,000s "
    "of steps",
  )
  add(
    "--batch-size",
    type=positive,
    default=defaults.batch_size,
    help=f"of all workers; default: {defaults.batch_size}",
  )
  add(
    "--steps", type=positive, default=defaults.steps, help=f"default: {defaults.steps}"
  )
  add(
    "--seed", type=seed, default=0, help="of parameters, batches, dropout and rounding"
  )


def add_exchange(parser: argparse.ArgumentParser, defaults: Defaults) -> None:
  """Adds the options of codec and exchange."""
  add = parser.add_argument_group("exchange").add_argument
  parser.set_defaults(scan=False)  # networks of images have no stack of equal layers
  marks = {name: " (default)" for name in (defaults.codec,)}
  add(
    "--codec",
    choices=("qsgd", *METHODS),
    default=defaults.codec,
    metavar="CODEC",
    help=f"qsgd{marks.get('qsgd', '')} with --bits, or one of "
    + ", ".join(name + marks.get(name, "") for name in METHODS)
    + "; f32 is the plain mean, none the same without gradcomp",
  )
  add("--bits", type=int, choices=WIDTHS, default=4, help="of qsgd; default: 4")
  add("--bucket-size", type=bucket, default=512, help="of qsgd; default: 512")
  add("--exchange", choices=EXCHANGES, default="auto", help="default: auto")
  add(
    "--feedback",
    choices=("auto", "error", "none"),
    default="auto",
    help="whether workers keep what they did not send; auto (default): biased codecs",
  )
  add(
    "--local-steps",
    type=positive,
    metavar="H",
    help="take as many steps alone before each exchange, whose outer optimizer is "
    "DiLoCo's, or SparseLoCo's with topk and blocktop",
  )
  add("--density", type=part, default=0.01, help="of redsync; default: 0.01")
  add("--warmup", type=natural, default=0, help="dense steps of redsync; default: 0")


def add_comparison(parser: argparse.ArgumentParser, defaults: Defaults) -> None:
  """Adds the options of a comparison and of its output."""
  add = parser.add_argument_group("comparison").add_argument
  add(
    "--compare",
    nargs="*",
    choices=METHODS,
    metavar="CODEC",
    help="train several from one initialization; without names: "
    + " ".join(defaults.compared),
  )
  add("--seeds", type=positive, default=1, help="repeat from as many; default: 1")
  add(
    "--evaluate-every",
    type=positive,
    default=defaults.evaluate_every,
    help=f"steps between two points of the curves; default: {defaults.evaluate_every}",
  )
  add(
    "--inspect",
    type=positive,
    metavar="K",
    help="show what compression does to each leaf every K steps, with --local-steps "
    "in the last step of a round: a table at the end, and two plots for each codec",
  )
  add(
    "--output",
    type=Path,
    default=defaults.output,
    help="folder of summary.csv, curves.csv and curves.png; default: "
    f"{defaults.output}",
  )


def add_devices(parser: argparse.ArgumentParser, defaults: Defaults) -> None:
  """Adds devices, processes and checkpoints."""
  add = parser.add_argument_group("devices and processes").add_argument
  add(
    "--devices",
    type=devices,
    default=defaults.devices,
    help="CPU devices to emulate in each process, where there are no accelerators; "
    f"default: {defaults.devices}",
  )
  add("--coordinator", metavar="HOST:PORT", help="address of process 0")
  add("--num-processes", type=positive)
  add("--process-id", type=natural)
  add_arguments(parser)


def complete(
  parser: argparse.ArgumentParser, args: argparse.Namespace, defaults: Defaults
) -> argparse.Namespace:
  """Fills in the rate of the chosen optimizer, and refuses options that do not fit."""
  if args.learning_rate is None:
    args.learning_rate = defaults.rates[args.optimizer]
  if args.local_steps and args.local_steps > args.steps:
    parser.error(
      f"--local-steps must be at most the {args.steps} steps, or nothing is ever sent, "
      f"got {args.local_steps}"
    )
  if None not in (args.process_id, args.num_processes):
    if args.process_id >= args.num_processes:
      parser.error(
        f"--process-id must be below the {args.num_processes} processes, got "
        f"{args.process_id}"
      )
  if args.local_steps and args.schedule == "plateau":
    parser.error("--schedule plateau does not go with --local-steps: losses differ")
  if args.dropout is not None and args.model not in networks.DROPPING:
    parser.error(f"--dropout does not go with {args.model}, which has no dropout")
  return args


def join_processes(args: argparse.Namespace) -> None:
  """Sets up the devices and joins the other processes.

  Both must happen before JAX's back-end starts.
  """
  jax.config.update("jax_num_cpu_devices", args.devices)
  named = (args.coordinator, args.num_processes, args.process_id)
  try:
    jax.distributed.initialize(*named)
  except ValueError as error:
    # Nothing was named and JAX detects no cluster: this is the only process.
    if named != (None, None, None) or "coordinator_address" not in str(error):
      raise


def process_part() -> dict[str, int]:
  """Returns which part of each batch this process draws."""
  return {"part": jax.process_index(), "parts": jax.process_count()}


def make_mesh(
  parser: argparse.ArgumentParser, args: argparse.Namespace, axis: str
) -> jax.sharding.Mesh:
  """Makes the mesh of all devices, which must share a batch equally."""
  mesh = jax.make_mesh((jax.device_count(),), (axis,))
  if args.batch_size % mesh.size:
    parser.error(f"--batch-size must be a multiple of the {mesh.size} workers")
  return mesh
