"""Trains methods one after the other from the same seeds, and reports them."""

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

import gradcomp
from examples.lib import report
from examples.lib.checkpoints import saved_in
from examples.lib.methods import Method, Redsync
from examples.lib.optimizers import make_optimizer
from examples.lib.progress import Progress
from examples.lib.telemetry import Log
from examples.lib.training import (
  Batch,
  Run,
  Task,
  compile_step,
  init_state,
  train,
)

Draw = Callable[..., Iterator[Batch]]  # seed= -> the batches of this process


class Prepared(NamedTuple):
  """A compiled step, with its bytes, its first state and its log."""

  step: Callable[..., Any]
  bytes_sent: int  # by each worker in a step
  dense_bytes: int  # that a plain float32 mean would send
  # From a seed and parameters to the state and the optimizer, for whose state a
  # checkpoint is; None where gradcomp keeps no record of it.
  start: Callable[[int, Any], tuple[Any, Any]]
  log: Log


def compare(
  methods: Mapping[str, Method], task: Task, draw: Draw, args: argparse.Namespace
) -> list[Run]:
  """Trains with all methods."""
  runs = []
  for name, method in methods.items():
    runs += train_method(name, method, task, draw, args)
  return runs


def train_method(
  name: str, method: Method, task: Task, draw: Draw, args: argparse.Namespace
) -> list[Run]:
  """Compiles the step once for all seeds, and trains from each."""
  prepared = prepare(method, task, next(draw(seed=0)), args)
  return train_seeds(name, prepared, task, draw, args)


def prepare(
  method: Method, task: Task, batch: Batch, args: argparse.Namespace
) -> Prepared:
  """Compiles the step of a method that replicates all parameters."""
  optimizer = make_optimizer(method, args, seed=0)
  step, wire = compile_step(task, optimizer, batch)
  sent, dense = wire.bytes_sent, wire.dense_bytes
  params = jax.eval_shape(lambda: task.init_params(0))
  if isinstance(method, Redsync) and args.warmup:
    # The compiled step has a branch for the warm-up, too; this is what follows it.
    plan = gradcomp.explain(optimizer, params, workers=task.mesh.size)
    sent, dense = plan.bytes_sent, round(plan.bytes_sent / plan.ratio)
  if args.local_steps:
    sent = round(sent / args.local_steps)
    if jax.process_index() == 0:
      print(gradcomp.explain(optimizer, params, workers=task.mesh.size))

  def start(seed: int, params: Any) -> tuple[Any, Any]:
    optimizer = make_optimizer(method, args, seed=seed)
    state = init_state(task, optimizer, params)
    return state, None if method is None else optimizer

  log = Log()
  if args.inspect:
    inspecting, _ = compile_step(task, optimizer, batch, inspect=True)
    log = Log(args.inspect, inspecting, round_steps=args.local_steps or 1)
  return Prepared(step, sent, dense, start, log)


def train_seeds(
  name: str, prepared: Prepared, task: Task, draw: Draw, args: argparse.Namespace
) -> list[Run]:
  """Trains from each seed."""
  runs = []
  first_process = jax.process_index() == 0
  for seed in range(args.seed, args.seed + args.seeds):
    params = task.init_params(seed)
    state, optimizer = prepared.start(seed, params)
    saved = saved_in(
      args,
      f"{name}-{seed}",
      optimizer=optimizer,
      params=params,
      workers=task.mesh.size,
    )
    title = f"{name} seed {seed}"
    with Progress(title, args.steps, shown=first_process) as progress, saved:
      points, step_ms = train(
        task,
        prepared.step,
        params,
        state,
        draw(seed=seed),
        steps=args.steps,
        evaluate_every=args.evaluate_every,
        bytes_a_step=prepared.bytes_sent,
        progress=progress,
        options=functools.partial(task.options, seed),
        saved=saved,
        log=prepared.log if seed == args.seed else None,
      )
    sizes = prepared.bytes_sent, prepared.dense_bytes
    runs.append(Run(name, seed, *sizes, step_ms, points))
  if first_process:
    prepared.log.write(args.output, name)
  return runs


def show(
  runs: list[Run],
  args: argparse.Namespace,
  *,
  title: str,
  workers: int,
  perplexity: bool = False,
) -> None:
  """Prints the table and writes the files, in the first process."""
  if jax.process_index() == 0:
    print(report.table(runs, perplexity=perplexity))
    print(footnote(workers))
    print("wrote", *report.write(runs, args.output, title=title))


def footnote(workers: int) -> str:
  """Explains the columns of the table."""
  text = (
    f"Workers: {workers}. Bytes: what each sends, read from the compiled step's HLO.\n"
    "Ratio: to a plain f32 mean. Time: the median step, compilation excluded."
  )
  if jax.default_backend() == "cpu":
    text += (
      "\nThe workers are emulated on this machine's cores, and no bytes cross a link: "
      "the\ntimes say nothing about one."
    )
  return text
