"""Trains a language model on several workers and counts the bytes they exchange.

    python examples/language_model.py --codec redsync --density 0.01
    python examples/language_model.py --codec redsync-asq --density 0.001 --warmup 100
    python examples/language_model.py --codec f32

The text is the source code of Python's standard library, byte by byte. Without
accelerators it emulates the workers on the CPU; with them it takes as many of them.
"""

import argparse
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import optax
import text
from language_models import Recurrent
from progress import Progress
from training import AXIS, Run, Task, compile_step, init_state, train

import gradcomp

MOMENTUM = 0.9
CODECS = ("f32", "redsync", "redsync-asq")


def main(argv: Sequence[str] | None = None) -> None:
  """Trains with the options given, and prints the table."""
  parser = make_parser()
  args = parser.parse_args(argv)
  if args.batch_size % args.workers:
    parser.error(f"--batch-size must be a multiple of the {args.workers} workers")
  if args.warmup >= args.steps:
    parser.error(f"--warmup must leave some of the {args.steps} steps")
  jax.config.update("jax_num_cpu_devices", args.workers)
  if jax.device_count() < args.workers:
    parser.error(f"--workers must be at most the {jax.device_count()} devices")
  devices = jax.devices()[: args.workers]
  mesh = jax.make_mesh((args.workers,), (AXIS,), devices=devices)
  found = text.load()
  model = functools.partial(Recurrent, text.CHARACTERS)
  task = Task(model, text.in_order(found.test, args.length), mesh)
  print(table(run(task, found, args), task, args))


def run(task: Task, found: text.Text, args: argparse.Namespace) -> Run:
  """Compiles the step and trains."""
  optimizer = make_optimizer(args)
  batches = text.batches(found.train, args.batch_size, args.length, seed=args.seed)
  step, _ = compile_step(task, optimizer, next(batches))
  params = task.init_params(args.seed)
  # The compiled step has a branch for the warm-up, too; this is what comes after it.
  plan = gradcomp.explain(optimizer, params, workers=args.workers)
  with Progress(args.codec, args.steps) as progress:
    points, step_ms = train(
      task,
      step,
      params,
      init_state(task, optimizer, params),
      batches,
      steps=args.steps,
      evaluate_every=max(1, args.steps // 10),
      bytes_a_step=plan.bytes_sent,
      progress=progress,
    )
  dense = round(plan.bytes_sent / plan.ratio)
  return Run(args.codec, args.seed, plan.bytes_sent, dense, step_ms, points)


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
  """Chains the exchange and plain SGD, with momentum in one of the two."""
  rate = optax.cosine_decay_schedule(args.learning_rate, args.steps)
  if args.codec == "f32":
    return optax.chain(
      gradcomp.dense(axis_name=AXIS),
      optax.clip_by_global_norm(args.max_norm),
      optax.sgd(rate, momentum=MOMENTUM, nesterov=True),
    )
  return optax.chain(
    # Each worker clips its own gradient, of all leaves together.
    gradcomp.clip_by_local_norm(args.max_norm, axis_name=AXIS),
    make_exchange(args),
    optax.sgd(rate),
  )


def make_exchange(args: argparse.Namespace) -> optax.GradientTransformation:
  """Makes RedSync with a dense warm-up, and with ASQ on all layers but the last."""

  def warmed(**options: Any) -> optax.GradientTransformation:
    redsync = functools.partial(gradcomp.redsync, axis_name=AXIS, momentum=MOMENTUM)
    sparse = redsync(args.density, **options)
    if not args.warmup:
      return sparse
    return gradcomp.switch([args.warmup], [redsync(1.0), sparse])

  if args.codec == "redsync":
    return warmed()
  parts = {"rest": warmed(quantize="asq"), "output": warmed()}
  return optax.partition(parts, output_layer)


def output_layer(params: Any) -> Any:
  """Labels the output layer, whose values are not quantized."""
  return jax.tree.map_with_path(
    lambda path, _: "output" if "head" in jax.tree_util.keystr(path) else "rest", params
  )


def table(run: Run, task: Task, args: argparse.Namespace) -> str:
  """Formats the last point of a run, and the bytes of a step after the warm-up."""
  last = run.points[-1]
  lines = [
    ("test perplexity", f"{math.exp(min(last.test_loss, 50)):.3f}"),
    ("test accuracy", f"{last.test_accuracy:.2%} of the next characters"),
    ("bytes a step", f"{run.bytes_a_step:,} sent by each of {args.workers} workers"),
    ("a plain mean's", f"{run.f32_bytes_a_step:,}"),
    ("step", f"{run.step_ms:.1f} ms, median"),
  ]
  return "\n".join(f"{name:16} {value}" for name, value in lines)


def make_parser() -> argparse.ArgumentParser:
  """Makes the parser of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = functools.partial(parser.add_argument)
  add("--codec", choices=CODECS, default="redsync", help="default: redsync")
  add("--density", type=float, default=0.01, help="of redsync; default: 0.01")
  add("--warmup", type=int, default=0, help="dense steps of redsync; default: 0")
  add("--workers", type=int, default=4, help="default: 4")
  add("--steps", type=int, default=600, help="default: 600")
  add("--learning-rate", type=float, default=2.0, help="at the start; default: 2")
  add("--max-norm", type=float, default=1.0, help="that clips gradients; default: 1")
  add("--batch-size", type=int, default=16, help="of all workers; default: 16")
  add("--length", type=int, default=32, help="characters in a sequence; default: 32")
  add("--seed", type=int, default=0, help="of parameters and batches; default: 0")
  return parser


if __name__ == "__main__":
  main()
