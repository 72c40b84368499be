"""Trains a language model on several workers and counts the bytes they exchange.

    python -m examples.language_model --codec redsync-asq --density 0.001 --warmup 100
    python -m examples.language_model --compare f32 qsgd-4 redsync --seeds 3
    python -m examples.language_model --text brown-words --model lstm --schedule plateau
    python -m examples.language_model --local-steps 30 --codec blocktop --optimizer adam
    python -m examples.language_model --model transformer --scan --codec qsgd
    python -m examples.language_model --model transformer --parallel zero
    python -m examples.language_model --model transformer --parallel fsdp --weights 8

With ``--scan`` the blocks of the transformer are one loop, whose backward pass sends
the gradient of a block while it computes the next. With ``--parallel zero`` each worker
runs the optimizer on its part of the parameters, and with ``fsdp`` it keeps no others.
Both send numbers in a few bits, by QSGD.

The text is the source code of Python's standard library, byte by byte, or the Brown
corpus of `make data`, by bytes or by words. All options but these are those of
image_classification.py, and so are devices, processes and checkpoints.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optax
from jax.sharding import PartitionSpec as P

import gradcomp
from examples.lib import command_line, methods, networks
from examples.lib.comparison import Draw, Prepared, compare, show, train_seeds
from examples.lib.data import brown, text
from examples.lib.optimizers import make_schedule
from examples.lib.parsing import positive
from examples.lib.sharded import fsdp
from examples.lib.telemetry import Log
from examples.lib.training import (
  AXIS,
  REPLICATED,
  Batch,
  Run,
  Task,
  compile_step,
  init_state,
)
from gradcomp.codecs import QSGD
from gradcomp.parallel import zero

DEFAULTS = command_line.Defaults(
  codec="redsync",
  compared=("f32", "qsgd-4", "qsgd-2", "redsync"),
  rates={"sgd": 2.0, "adam": 2e-3},
  nesterov=True,
  clip=1.0,
  batch_size=16,
  steps=600,
  devices=4,
  evaluate_every=60,
  output=Path("results/text"),
)
BITS = (*range(2, 9), 16)
TESTED = 8192  # sequences at most
TEXTS = {
  "python": text.load,
  "brown": brown.characters,
  "brown-words": brown.words,
}


def main(argv: Sequence[str] | None = None) -> None:
  """Trains with the options given, prints the table and writes the files."""
  parser = make_parser()
  args = parser.parse_args(argv)
  if args.parallel != "data":
    check_cut(parser, args)
    args.optimizer = "adam"
  command_line.complete(parser, args, DEFAULTS)
  if args.scan:
    check_scan(parser, args)
  chosen = {}
  if args.parallel == "data":
    chosen = methods.choose(parser, args, DEFAULTS.compared)
  command_line.join_processes(args)
  mesh = command_line.make_mesh(parser, args, AXIS)
  found = TEXTS[args.text]()
  longest = min(len(found.train), len(found.test)) - 1
  if args.length > longest:
    parser.error(f"--length must be at most {longest} for this text, got {args.length}")
  test = text.in_order(found.test, args.length, most=TESTED)
  model = networks.for_text(args.model, found.symbols, args.dropout, stacked=args.scan)
  task = Task(model, test, mesh, P(AXIS) if args.parallel == "fsdp" else REPLICATED)
  part = command_line.process_part()
  draw = functools.partial(
    text.batches, found.train, args.batch_size, args.length, **part
  )
  if args.parallel == "data":
    runs = compare(chosen, task, draw, args)
  else:
    runs = train_cut(task, draw, args)
  title = f"{args.model} on {args.text}"
  show(runs, args, title=title, workers=mesh.size, perplexity=True)


def check_cut(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
  """Refuses options that do not go with a sharded optimizer, which is Adam."""
  plain = parser.parse_args([])
  refused = "compare ema weight_decay warmup codec clip local_steps scan"
  for name in refused.split():
    if getattr(args, name) != getattr(plain, name):
      option = "--" + name.replace("_", "-")
      parser.error(f"{option} does not go with --parallel {args.parallel}")
  if args.schedule == "plateau":
    parser.error(f"--schedule plateau does not go with --parallel {args.parallel}")
  if args.parallel == "fsdp" and (args.dropout or args.model == "lstm"):
    parser.error("--parallel fsdp draws no numbers for dropout")


def check_scan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
  """Refuses options that do not go with an exchange inside of a loop of blocks."""
  if args.model != "transformer":
    parser.error("--scan does not go with a model without blocks: choose transformer")
  for name in ("local_steps", "inspect"):
    if getattr(args, name):
      parser.error(f"--{name.replace('_', '-')} does not go with --scan")


def train_cut(task: Task, draw: Draw, args: argparse.Namespace) -> list[Run]:
  """Trains with an optimizer or parameters that are sharded over the workers."""
  batch = next(draw(seed=0))
  prepare = prepare_fsdp if args.parallel == "fsdp" else prepare_zero
  return train_seeds(args.parallel, prepare(task, batch, args), task, draw, args)


def prepare_zero(task: Task, batch: Batch, args: argparse.Namespace) -> Prepared:
  """Compiles a step in which each worker runs the optimizer on its shard."""
  optimizer = zero(
    optax.adam(make_schedule(args)),
    grads=QSGD(bits=args.grads),
    params=QSGD(bits=args.weights or 4),
    axis_name=AXIS,
    feedback=None if args.feedback == "none" else "error",
  )
  step, wire = compile_step(task, optimizer, batch)

  def start(seed: int, params: Any) -> tuple[Any, Any]:
    del seed
    return init_state(task, optimizer, params), optimizer

  log = Log()
  if args.inspect:
    inspecting, _ = compile_step(task, optimizer, batch, inspect=True)
    log = Log(args.inspect, inspecting)
  return Prepared(step, wire.bytes_sent, wire.dense_bytes, start, log)


def prepare_fsdp(task: Task, batch: Batch, args: argparse.Namespace) -> Prepared:
  """Compiles a step in which each worker keeps a shard of the parameters."""
  cut = fsdp.Fsdp(
    loss_fn=task.loss_fn,
    optimizer=optax.adam(make_schedule(args)),
    # Buckets are so small that a worker's part of a matrix fills its rows.
    weights=QSGD(bits=args.weights or 8, bucket_size=128),
    grads=QSGD(bits=args.grads, bucket_size=128),
    feedback=args.feedback != "none",
  )
  init, step = fsdp.compile_step(task, cut, batch)
  wire = gradcomp.wire_report(step)

  def start(seed: int, params: Any) -> tuple[Any, Any]:
    del seed
    return init(params), cut.exchange

  log = Log()
  if args.inspect:
    _, inspecting = fsdp.compile_step(task, cut, batch, inspect=True)
    log = Log(args.inspect, inspecting)
  return Prepared(step, wire.bytes_sent, wire.dense_bytes, start, log)


def make_parser() -> argparse.ArgumentParser:
  """Makes the parser of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  group = parser.add_argument_group("task")
  group.add_argument(
    "--text",
    choices=tuple(TEXTS),
    default="python",
    help="python (default) is on every machine; `make data` prepares brown",
  )
  group.add_argument(
    "--length",
    type=positive,
    default=32,
    help="symbols in a sequence; default: 32",
  )
  command_line.add_training(group, tuple(networks.TEXTS), DEFAULTS)
  group.add_argument(
    "--scan",
    action="store_true",
    help="exchange the blocks of a transformer in the loop of its backward pass",
  )
  command_line.add_exchange(parser, DEFAULTS)
  add = parser.add_argument_group("cut optimizer or parameters, by Adam").add_argument
  add(
    "--parallel",
    choices=("data", "zero", "fsdp"),
    default="data",
    help="data (default) cuts nothing; zero the optimizer, fsdp the parameters, too",
  )
  add("--grads", type=int, choices=BITS, default=4, help="bits; default: 4")
  add(
    "--weights",
    type=int,
    choices=BITS,
    help="bits of parameters, or of what changes in them; default: 8, with zero 4",
  )
  command_line.add_comparison(parser, DEFAULTS)
  command_line.add_devices(parser, DEFAULTS)
  return parser


if __name__ == "__main__":
  main()
