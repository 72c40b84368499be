"""The options of a trainer whose layers are sharded."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

import jax

from examples.lib import command_line, parsing
from examples.lib.data import images
from examples.lib.methods import TYPES
from examples.lib.sharded import cut_layers

# All codecs but the sparse ones, and those that need error feedback or a memory.
NAMES = ("f32", "bf16", *(name.replace("_", "-") for name in TYPES))
NAMES += ("qsgd-8", "qsgd-4", "qsgd-2", "terngrad", "aps-5-2", "aps-4-3")


def make_parser(doc: str | None, compared: Sequence[str]) -> ArgumentParser:
  """Makes the parser of a program whose layers are sharded."""
  made = ArgumentParser(description=doc, formatter_class=command_line.Help)
  images.add_arguments(made)
  add = made.add_argument_group("training").add_argument
  add("--hidden", type=parsing.positive, default=1024, help="units of a layer")
  units = tuple(cut_layers.UNITS)
  add("--unit", choices=units, default="relu", help="that follows a layer")
  said = "of a convolution; 0 for no such"
  add("--channels", type=parsing.natural, default=0, help=said)
  add("--learning-rate", type=parsing.positive_float, default=0.003, help="at first")
  add("--batch-size", type=parsing.positive, default=128, help="of all workers")
  add("--steps", type=parsing.positive, default=200, help="of the training")
  said = "of parameters, batches and dropout"
  add("--seed", type=parsing.seed, default=0, help=said)
  add = made.add_argument_group("exchange").add_argument
  codec = {"choices": NAMES, "default": "dynamic-tree", "metavar": "CODEC"}
  add("--codec", **codec, help=f"one of {', '.join(NAMES)}")
  said = "whether a worker takes its own part as it is or rounded, too"
  add("--own", choices=("exact", "coded"), default="exact", help=said)
  said = "sub-batches of a batch"
  add("--passes", type=parsing.positive, default=1, help=said)
  command_line.add_comparison(made, NAMES, compared)
  command_line.add_devices(made)
  return made


def make_mesh(parser: ArgumentParser, args: Namespace, axis: str) -> jax.sharding.Mesh:
  """Makes the mesh of all devices, over which layers and batches are cut."""
  jax.config.update("jax_num_cpu_devices", args.devices)
  mesh = jax.make_mesh((jax.device_count(),), (axis,))
  if args.batch_size % (mesh.size * args.passes):
    of = f"{mesh.size} workers x {args.passes} passes"
    parser.error(f"--batch-size must be a multiple of {of}")
  if args.hidden % mesh.size:
    parser.error(f"--hidden must be a multiple of the {mesh.size} workers")
  return mesh
