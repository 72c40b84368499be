"""The options that the trainers of images and of text share."""

import argparse
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from examples.lib import checkpoints, networks, parsing, telemetry
from examples.lib.methods import EXCHANGES, METHODS, SCHEDULES, WIDTHS
from examples.lib.training import AXIS

Names = Sequence[str]


class Help(
  argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
  """Leaves the description as it is, and adds what defaults there are to options."""

  def _get_help_string(self, action: argparse.Action) -> str | None:
    return action.help if action.default is None else super()._get_help_string(action)


def make_parser(doc: str | None, models: Names, compared: Names) -> ArgumentParser:
  """Makes the parser of a trainer of images or of text, whose data is its own."""
  parser = ArgumentParser(description=doc, formatter_class=Help)
  parser.set_defaults(scan=False)  # networks of images have no stack of equal layers
  add_training(parser, models)
  add_exchange(parser)
  add_comparison(parser, (*METHODS,), compared)
  add = add_devices(parser)
  add("--coordinator", metavar="HOST:PORT", help="address of process 0")
  add("--num-processes", type=parsing.positive)
  add("--process-id", type=parsing.natural)
  return parser


def add_training(parser: ArgumentParser, models: Names) -> None:
  """Adds the network, the optimizer, and how long to train."""
  add = parser.add_argument_group("training").add_argument
  add("--model", choices=models, default=models[0], help="network")
  dropping = ", ".join(name for name in models if name in networks.DROPPING)
  said = f"of {dropping}; default: its own"
  add("--dropout", type=parsing.share, metavar="RATE", help=said)
  add("--optimizer", choices=("sgd", "adam"), default="sgd", help="after the exchange")
  add("--momentum", type=parsing.share, default=0.9, help="of sgd")
  said = "whether momentum of sgd is Nesterov's"
  add("--nesterov", action=argparse.BooleanOptionalAction, help=said)
  said = "at first; default: each optimizer's own"
  add("--learning-rate", type=parsing.positive_float, help=said)
  said = (
    "how the rate falls: to zero along a cosine or as the root of the steps left, by "
    "half whenever the training loss between evaluations stops falling, or not at all"
  )
  add("--schedule", choices=SCHEDULES, default="cosine", help=said)
  add("--weight-decay", type=parsing.at_least_0, default=0.0, help="of weights")
  said = "norm that gradients are clipped at; None: at none"
  add("--clip", type=parsing.positive_float, metavar="NORM", help=said)
  said = "test the moving average of the parameters; 0.9999 in Wen et al."
  add("--ema", type=parsing.fraction, metavar="DECAY", help=said)
  add("--batch-size", type=parsing.positive, help="of all workers")
  add("--steps", type=parsing.positive, help="of the training")
  said = "of parameters, batches, dropout and rounding"
  add("--seed", type=parsing.seed, default=0, help=said)


def add_exchange(parser: ArgumentParser) -> None:
  """Adds the options of codec and exchange."""
  add = parser.add_argument_group("exchange").add_argument
  said = f"qsgd with --bits, or one of {', '.join(METHODS)}; f32 is the plain mean, "
  said += "none the same without gradcomp"
  add("--codec", choices=("qsgd", *METHODS), metavar="CODEC", help=said)
  add("--bits", type=int, choices=WIDTHS, default=4, help="of qsgd")
  add("--bucket-size", type=parsing.bucket, default=512, help="of qsgd")
  add("--exchange", choices=EXCHANGES, default="auto", help="how payloads travel")
  said = "whether workers keep what they did not send; auto: with biased codecs"
  add("--feedback", choices=("auto", "error", "none"), default="auto", help=said)
  said = (
    "take as many steps alone before each exchange, whose outer optimizer is DiLoCo's, "
    "or SparseLoCo's with topk and blocktop"
  )
  add("--local-steps", type=parsing.positive, metavar="H", help=said)
  add("--density", type=parsing.part, default=0.01, help="of redsync")
  add("--warmup", type=parsing.natural, default=0, help="dense steps of redsync")
  said = (
    "show what compression does to each leaf every K steps, with --local-steps in the "
    "last step of a round: a table at the end, and two plots for each codec"
  )
  add("--inspect", type=parsing.positive, metavar="K", help=said)


def add_parallel(parser: ArgumentParser) -> None:
  """Adds the options of what is sharded, and of layers in a loop."""
  group = parser.add_argument_group("sharded optimizer or parameters, and layers")
  add, bits = group.add_argument, (*range(2, 9), 16)
  said = "exchange the blocks of a transformer in the loop of its backward pass"
  add("--scan", action="store_true", help=said)
  said = "what is sharded: nothing, the optimizer, or the parameters, too; by Adam"
  add("--parallel", choices=("data", "zero", "fsdp"), default="data", help=said)
  add("--grads", type=int, choices=bits, default=4, help="bits")
  said = "bits of parameters, or of what changes in them; default: 8, with zero 4"
  add("--weights", type=int, choices=bits, help=said)


def add_comparison(parser: ArgumentParser, names: Names, compared: Names) -> None:
  """Adds the options of a comparison and of its output."""
  add = parser.add_argument_group("comparison").add_argument
  said = f"train several from one initialization; without names: {' '.join(compared)}"
  add("--compare", nargs="*", choices=names, metavar="CODEC", help=said)
  add("--seeds", type=parsing.positive, default=1, help="repeat from as many")
  said = "steps between two points of the curves"
  add("--evaluate-every", type=parsing.positive, default=10, help=said)
  said = "folder of summary.csv, curves.csv and curves.png"
  add("--output", type=Path, default=Path("results"), help=said)


def add_devices(parser: ArgumentParser) -> Any:
  """Adds devices and checkpoints, and returns what adds to the group of devices."""
  add = parser.add_argument_group("devices and processes").add_argument
  said = "CPU devices to emulate in each process, where there are no accelerators"
  add("--devices", type=parsing.devices, default=8, help=said)
  checkpoints.add_arguments(parser)
  return add


def complete(parser: ArgumentParser, args: Namespace, rates: Any) -> Namespace:
  """Fills in the rate of the chosen optimizer, and refuses options that do not fit."""
  if args.learning_rate is None:
    args.learning_rate = rates[args.optimizer]
  if (got := args.local_steps or 0) > (most := args.steps):
    said = f"at most the {most} steps, or nothing is ever sent, got {got}"
    parser.error(f"--local-steps must be {said}")
  number, count = args.process_id, args.num_processes
  if None not in (number, count) and number >= count:
    parser.error(f"--process-id must be below the {count} processes, got {number}")
  if args.local_steps and args.schedule == "plateau":
    parser.error("--schedule plateau does not go with --local-steps: losses differ")
  if args.dropout is not None and args.model not in networks.DROPPING:
    parser.error(f"--dropout does not go with {args.model}, which has no dropout")
  return args


def check_parallel(parser: ArgumentParser, args: Namespace) -> None:
  """Refuses options that do not go with what is sharded, or with layers in a loop."""
  if args.parallel != "data":
    plain, other = parser.parse_args([]), f"--parallel {args.parallel}"
    refused = "compare ema weight_decay warmup codec clip local_steps scan".split()
    given = [x for x in refused if getattr(args, x) != getattr(plain, x)]
    if args.schedule == "plateau":
      given.append("schedule plateau")
    args.optimizer = "adam"
    if args.parallel == "fsdp" and (args.dropout or args.model == "lstm"):
      parser.error("--parallel fsdp draws no numbers for dropout")
  elif args.scan:
    given, other = [x for x in ("local_steps", "inspect") if getattr(args, x)], "--scan"
    if args.model != "transformer":
      parser.error("--scan does not go with a model without blocks: choose transformer")
  else:
    return
  for name in given:
    parser.error(f"--{name.replace('_', '-')} does not go with {other}")


def join_processes(args: Namespace) -> None:
  """Sets up the devices and joins processes, before JAX's back-end starts."""
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


def make_mesh(parser: ArgumentParser, args: Namespace) -> jax.sharding.Mesh:
  """Joins processes, and makes the mesh of all devices, which share a batch equally."""
  join_processes(args)
  mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
  if args.batch_size % mesh.size:
    parser.error(f"--batch-size must be a multiple of the {mesh.size} workers")
  return mesh


def small_parser(title: str, **sizes: int) -> ArgumentParser:
  """Makes the parser of a program with few options; a mesh has sizes with defaults."""
  parser = ArgumentParser(description=title, formatter_class=Help)
  for name, default in {**sizes, "steps": 200}.items():
    said = "of the training" if name == "steps" else "of the mesh"
    parser.add_argument(f"--{name}", type=parsing.positive, default=default, help=said)
  telemetry.add_arguments(parser)
  checkpoints.add_arguments(parser)
  return parser


def small_mesh(
  parser: ArgumentParser, argv: Sequence[str] | None, batch: int, **axes: str
) -> Namespace:
  """Reads the options, and sets a mesh with an axis for each of the given ones."""
  args = parser.parse_args(argv)
  sizes = [getattr(args, option) for option in axes]
  if batch % math.prod(sizes):
    given = " times ".join(f"--{option}" for option in axes)
    parser.error(f"{given} must divide the {batch} sequences of a batch")
  jax.config.update("jax_num_cpu_devices", math.prod(sizes))
  devices = jax.devices()[: math.prod(sizes)]
  jax.set_mesh(jax.make_mesh(sizes, tuple(axes.values()), devices=devices))
  return args
