"""Trains a language model on several workers and counts the bytes they exchange.

    python examples/language_model.py --codec redsync --density 0.01
    python examples/language_model.py --codec redsync-asq --density 0.001 --warmup 100
    python examples/language_model.py --codec blocktop
    python examples/language_model.py --codec f32
    python examples/language_model.py --model transformer --parallel zero
    python examples/language_model.py --model transformer --parallel fsdp --weights 8
    python examples/language_model.py --steps 6000 --checkpoint saved

With ``--parallel zero`` each worker runs the optimizer on its part of the parameters,
and with ``fsdp`` it keeps no others. Both send numbers in a few bits, by QSGD.

The text is the source code of Python's standard library, byte by byte. Without
accelerators it emulates the workers on the CPU; with them it takes as many of them.
"""

import argparse
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsdp
import jax
import optax
import text
from checkpoints import add_arguments, saved_in
from jax.sharding import PartitionSpec as P
from language_models import Recurrent, Transformer
from progress import Progress
from telemetry import Log
from training import (
  AXIS,
  REPLICATED,
  Model,
  Run,
  Task,
  compile_inspecting,
  compile_step,
  init_state,
  train,
)

import gradcomp
from gradcomp.codecs import QSGD
from gradcomp.parallel import zero

MOMENTUM = 0.9
CODECS = ("f32", "redsync", "redsync-asq", "blocktop")
BITS = (*range(2, 9), 16)
MODELS: dict[str, Model] = {
  "gru": functools.partial(Recurrent, text.CHARACTERS),
  "transformer": Transformer(text.CHARACTERS),
}


def main(argv: Sequence[str] | None = None) -> None:
  """Trains with the options given, and prints the table."""
  parser = make_parser()
  args = parser.parse_args(argv)
  if args.batch_size % args.workers:
    parser.error(f"--batch-size must be a multiple of the {args.workers} workers")
  if args.warmup >= args.steps:
    parser.error(f"--warmup must leave some of the {args.steps} steps")
  if args.optimizer == "adam" and args.codec != "f32":
    parser.error(f"--codec {args.codec} has momentum of its own: choose f32 for Adam")
  jax.config.update("jax_num_cpu_devices", args.workers)
  if jax.device_count() < args.workers:
    parser.error(f"--workers must be at most the {jax.device_count()} devices")
  devices = jax.devices()[: args.workers]
  mesh = jax.make_mesh((args.workers,), (AXIS,), devices=devices)
  found = text.load()
  test = text.in_order(found.test, args.length)
  spec = P(AXIS) if args.parallel == "fsdp" else REPLICATED
  task = Task(MODELS[args.model], test, mesh, spec)
  print(table(run(task, found, args), args))


def run(task: Task, found: text.Text, args: argparse.Namespace) -> Run:
  """Compiles the step and trains."""
  batches = text.batches(found.train, args.batch_size, args.length, seed=args.seed)
  params = task.init_params(args.seed)
  log = Log()
  if args.parallel == "fsdp":
    steps, first = make_fsdp(task, args), next(batches)
    init, step = fsdp.compile_step(task, steps, first)
    if args.inspect:
      _, inspecting = fsdp.compile_step(task, steps, first, inspect=True)
      log = Log(args.inspect, inspecting)
    state = init(params)
    wire = gradcomp.wire_report(step)
    sent, dense = wire.bytes_sent, wire.dense_bytes
    whose = {"optimizer": steps.exchange, "params": params}
    saved = saved_in(args, workers=args.workers, **whose)
  else:
    optimizer = make_optimizer(args)
    first = next(batches)
    step, _ = compile_step(task, optimizer, first)
    if args.inspect:
      log = Log(args.inspect, compile_inspecting(task, optimizer, first))
    state = init_state(task, optimizer, params)
    # The compiled step has a branch for the warm-up, too; this is what follows it.
    plan = gradcomp.explain(optimizer, params, workers=args.workers)
    sent, dense = plan.bytes_sent, round(plan.bytes_sent / plan.ratio)
    saved = saved_in(args, optimizer=optimizer, params=params, workers=args.workers)
  title = args.codec if args.parallel == "data" else args.parallel
  with Progress(title, args.steps) as progress, saved:
    points, step_ms = train(
      task,
      step,
      params,
      state,
      batches,
      steps=args.steps,
      evaluate_every=max(1, args.steps // 10),
      bytes_a_step=sent,
      progress=progress,
      saved=saved,
      log=log,
    )
  log.write(args.output, title)
  return Run(title, args.seed, sent, dense, step_ms, points)


def make_fsdp(task: Task, args: argparse.Namespace) -> fsdp.Fsdp:
  """Makes what takes steps with parameters that are cut over the workers."""
  return fsdp.Fsdp(
    loss_fn=task.loss_fn,
    optimizer=make_adam(args),
    # Buckets are so small that a worker's part of a matrix fills its rows.
    weights=QSGD(bits=args.weights or 8, bucket_size=128),
    grads=QSGD(bits=args.grads, bucket_size=128),
    feedback=args.feedback == "error",
  )


def make_adam(args: argparse.Namespace) -> optax.GradientTransformation:
  """Makes Adam, whose rate falls along a cosine."""
  return optax.adam(optax.cosine_decay_schedule(args.learning_rate or 2e-3, args.steps))


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
  """Makes the exchange and the optimizer, where all workers have all parameters."""
  if args.parallel == "zero":
    return zero(
      make_adam(args),
      grads=QSGD(bits=args.grads),
      params=QSGD(bits=args.weights or 4),
      axis_name=AXIS,
      feedback=args.feedback if args.feedback == "error" else None,
    )
  if args.optimizer == "adam":
    return optax.chain(gradcomp.dense(axis_name=AXIS), make_adam(args))
  rate = optax.cosine_decay_schedule(args.learning_rate or 2.0, args.steps)
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
    # The exchange has the momentum.
    optax.sgd(rate),
  )


def make_exchange(args: argparse.Namespace) -> optax.GradientTransformation:
  """Makes BlockTop, or RedSync with a dense warm-up; ASQ on all layers but the last."""
  if args.codec == "blocktop":
    momentum = gradcomp.MomentumFeedback(decay=MOMENTUM, nesterov=True)
    return gradcomp.blocktop(feedback=momentum, axis_name=AXIS)

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
  """Labels the output layer, whose values are not quantized.

  It is the head or, where there is none, the embedding.
  """
  name = "'head'" if "head" in params else "'embed'"
  return jax.tree.map_with_path(
    lambda path, _: "output" if name in jax.tree_util.keystr(path) else "rest", params
  )


def table(run: Run, args: argparse.Namespace) -> str:
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
  add("--model", choices=tuple(MODELS), default="gru", help="default: gru")
  add("--workers", type=int, default=4, help="default: 4")
  add("--steps", type=int, default=600, help="default: 600")
  add("--learning-rate", type=float, help="at first; default: 2, of Adam 0.002")
  add("--batch-size", type=int, default=16, help="of all workers; default: 16")
  add("--length", type=int, default=32, help="characters in a sequence; default: 32")
  add("--seed", type=int, default=0, help="of parameters and batches; default: 0")
  add("--inspect", type=int, metavar="K", help="show each leaf's errors every K steps")
  add("--output", type=Path, default=Path("results"), help="folder of its plots")

  add = parser.add_argument_group("replicated parameters").add_argument
  add("--codec", choices=CODECS, default="redsync", help="default: redsync")
  add(
    "--optimizer",
    choices=("sgd", "adam"),
    default="sgd",
    help="of f32; the others have SGD. Default: sgd",
  )
  add("--density", type=float, default=0.01, help="of redsync; default: 0.01")
  add("--warmup", type=int, default=0, help="dense steps of redsync; default: 0")
  add("--max-norm", type=float, default=1.0, help="that SGD clips at; default: 1")

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
  add(
    "--feedback",
    choices=("error", "none"),
    default="error",
    help="error (default) keeps what is lost of gradients",
  )
  add_arguments(parser)
  return parser


if __name__ == "__main__":
  main()
