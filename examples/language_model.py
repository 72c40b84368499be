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

import functools
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optax
from jax.sharding import PartitionSpec as P

from examples.lib import command_line, methods, networks, parsing, tables, training
from examples.lib.data import brown, text
from examples.lib.sharded import fsdp
from gradcomp import parallel
from gradcomp.codecs import QSGD

COMPARED = ("f32", "qsgd-4", "qsgd-2", "redsync")  # --compare without names
RATES = {"sgd": 2.0, "adam": 2e-3}
DEFAULTS = {"codec": "redsync", "nesterov": True, "clip": 1.0, "batch_size": 16}
DEFAULTS |= {"steps": 600, "evaluate_every": 60, "devices": 4}
DEFAULTS |= {"output": Path("results/text")}
TESTED = 8192  # sequences at most
TEXTS = {"python": text.load, "brown": brown.characters, "brown-words": brown.words}


def main(argv: Sequence[str] | None = None) -> None:
  """Trains with the options given, prints the table and writes the files."""
  parser = make_parser()
  args = parser.parse_args(argv)
  command_line.check_parallel(parser, args)
  command_line.complete(parser, args, RATES)
  chosen = {args.parallel: None}  # of Adam
  if args.parallel == "data":
    chosen = methods.choose(parser, args, COMPARED)
  mesh = command_line.make_mesh(parser, args)
  found = TEXTS[args.text]()
  longest = min(len(found.train), len(found.test)) - 1
  if args.length > longest:
    parser.error(f"--length must be at most {longest} for this text, got {args.length}")
  test = text.in_order(found.test, args.length, most=TESTED)
  model = networks.for_text(args.model, found.symbols, args.dropout, stacked=args.scan)
  spec = P("data") if args.parallel == "fsdp" else P()
  task = training.Task(model, test, mesh, spec)
  sizes, part = (args.batch_size, args.length), command_line.process_part()
  draw = functools.partial(text.batches, found.train, *sizes, **part)
  runs = []
  for name, method in chosen.items():
    batch = next(draw(seed=0))
    if args.parallel == "data":  # by gradcomp.compress(method, axis_name="data")
      step, sent, start, log = methods.prepare_method(method, task, batch, args)
    else:
      step, sent, start, log = SHARDED[name](task, batch, args)
    for seed in range(args.seed, args.seed + args.seeds):
      params, batches = task.init_params(seed), draw(seed=seed)
      state, optimizer = start(seed, params)
      whose = {"optimizer": optimizer, "params": params, "workers": mesh.size}
      with tables.Run(args, name, seed, sent, log, **whose) as run:
        params, state = run.restore((params, state), batches)
        for number in run.steps():
          batch, options = task.place(next(batches)), task.options(seed, number)
          params, state, _ = run.take(step, params, state, batch, **options)
          if run.is_tested:
            tested = task.evaluate(methods.averaged(state, params))
            state = methods.observe(state, run.add_point(*tested))
          run.save((params, state))
      runs.append(run)
    log.write(args.output, name)
  shown = {"title": f"{args.model} on {args.text}", "workers": mesh.size}
  tables.show(runs, args, **shown, perplexity=True)


def prepare_zero(task: Any, batch: Any, args: Namespace) -> methods.Prepared:
  """Compiles a step in which each worker runs the optimizer on its shard."""
  codecs = {"grads": QSGD(bits=args.grads), "params": QSGD(bits=args.weights or 4)}
  kept = None if args.feedback == "none" else "error"
  adam = optax.adam(methods.make_schedule(args))
  optimizer = parallel.zero(adam, **codecs, axis_name="data", feedback=kept)
  return methods.prepare(task, batch, args, lambda seed: optimizer)


def prepare_fsdp(task: Any, batch: Any, args: Namespace) -> methods.Prepared:
  """Compiles a step in which each worker keeps a shard of the parameters."""
  # Buckets are so small that a worker's part of a matrix fills its rows.
  few = lambda bits: QSGD(bits=bits, bucket_size=128)
  options = {"weights": few(args.weights or 8), "grads": few(args.grads)}
  options |= {"loss_fn": task.loss_fn, "feedback": args.feedback != "none"}
  adam = optax.adam(methods.make_schedule(args))
  return fsdp.prepare(task, batch, args.inspect, optimizer=adam, **options)


SHARDED = {"zero": prepare_zero, "fsdp": prepare_fsdp}


def make_parser() -> ArgumentParser:
  """Makes the parser of the command line."""
  parser = command_line.make_parser(__doc__, (*networks.TEXTS,), COMPARED)
  add = parser.add_argument_group("text").add_argument
  said = "python is on every machine; `make data` prepares brown"
  add("--text", choices=tuple(TEXTS), default="python", help=said)
  add("--length", type=parsing.positive, default=32, help="symbols in a sequence")
  command_line.add_parallel(parser)
  parser.set_defaults(**DEFAULTS)
  return parser


if __name__ == "__main__":
  main()
