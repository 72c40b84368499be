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

import jax
from jax.experimental import multihost_utils

from examples.lib import command_line, methods, networks, tables, training
from examples.lib.data import images as data

COMPARED = ("f32", "qsgd-8", "qsgd-4", "qsgd-2")  # --compare without names
RATES = {"sgd": 0.05, "adam": 1e-3}
DEFAULTS = {"codec": "qsgd", "nesterov": False, "batch_size": 64, "steps": 200}


def main(argv: Sequence[str] | None = None) -> None:
  """Trains with the options given, prints the table and writes the files."""
  parser = make_parser()
  args = command_line.complete(parser, parser.parse_args(argv), RATES)
  chosen = methods.choose(parser, args, COMPARED)
  mesh = command_line.make_mesh(parser, args)
  train, test, classes = load_everywhere(args)
  data.fits(parser, args, train)
  shape = train.images.shape[1:]
  model = networks.for_images(args.model, shape, classes, args.dropout)
  task = training.Task(model, test, mesh, known=train.images[:1000])
  part = command_line.process_part()
  draw = functools.partial(data.batches, train, args.batch_size, **part)
  runs = []
  for name, method in chosen.items():
    # The step sends gradients by gradcomp.compress(method, axis_name="data"), before
    # the optimizer, and all seeds share it.
    prepared = methods.prepare_method(method, task, next(draw(seed=0)), args)
    step, sent, start, log = prepared
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
  title = f"{args.model} on {args.dataset}"
  tables.show(runs, args, title=title, workers=mesh.size)


def load_everywhere(args: argparse.Namespace) -> data.ImageSet:
  """Loads the data in every process, after the first process has prepared it."""
  first = jax.process_index() == 0
  if first:
    images = data.load(args.dataset, args.data_dir)
  multihost_utils.sync_global_devices("data is prepared")
  return images if first else data.load(args.dataset, args.data_dir)


def make_parser() -> argparse.ArgumentParser:
  """Makes the parser of the command line."""
  parser = command_line.make_parser(__doc__, (*networks.IMAGES,), COMPARED)
  data.add_arguments(parser)
  parser.set_defaults(**DEFAULTS)
  return parser


if __name__ == "__main__":
  main()
