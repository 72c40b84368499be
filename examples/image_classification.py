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

import functools
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.experimental import multihost_utils

import gradcomp
from examples.lib import comparisons, images
from gradcomp import codecs

DEFAULTS = {"codec": "qsgd", "nesterov": False, "batch_size": 64, "steps": 200}
DEFAULTS |= {"rates": {"sgd": 0.05, "adam": 1e-3}}
DEFAULTS |= {"compared": ("f32", "qsgd-8", "qsgd-4", "qsgd-2")}  # --compare alone


class LeNet(nnx.Module):
  """That of Wen et al., 2017, with 0.85 million parameters on digits."""

  def __init__(self, shape: Sequence[int], classes: int, *, width=1024, rngs: nnx.Rngs):
    rows, columns, inputs = shape
    self.conv1 = nnx.Conv(inputs, 32, (5, 5), rngs=rngs)
    self.conv2 = nnx.Conv(32, 64, (5, 5), rngs=rngs)
    self.dense1 = nnx.Linear((rows // 4) * (columns // 4) * 64, width, rngs=rngs)
    self.dense2 = nnx.Linear(width, width // 2, rngs=rngs)
    self.head = nnx.Linear(width // 2, classes, rngs=rngs)

  def __call__(self, pixels: jax.Array) -> jax.Array:
    x = images.centered(pixels)
    x = images.halved(nnx.relu(self.conv1(x)))
    x = images.halved(nnx.relu(self.conv2(x)))
    x = nnx.relu(self.dense1(x.reshape(x.shape[0], -1)))
    return self.head(nnx.relu(self.dense2(x)))


MODELS = {"lenet": LeNet, **images.NETWORKS}
make_parser = functools.partial(
  comparisons.make_parser, __doc__, MODELS, DEFAULTS, images.add_arguments
)


def compressed(codec: codecs.Codec, **options: Any) -> Any:
  """Makes the exchange: it encodes gradients, sends them, and decodes their mean."""
  return gradcomp.compress(codec, axis_name="data", **options)


def main(argv: Sequence[str] | None = None) -> None:
  """Trains with the options given, prints the table and writes the files."""
  parser = make_parser()
  comparison = comparisons.begin(parser, argv)
  args, mesh = comparison.args, comparison.mesh
  if jax.process_index() == 0:
    images.prepare(args.dataset, args.data_dir)
  multihost_utils.sync_global_devices("data is prepared")
  train, test, classes = images.load(args.dataset, args.data_dir)
  images.fits(parser, args, train)
  shape = train.images.shape[1:]
  model = images.network(MODELS[args.model], shape, classes, args.dropout)
  task = comparison.make_task(model, test, known=train.images[:1000])
  draw = functools.partial(images.batches, train, args.batch_size, **comparison.part)
  for name in comparison.methods:
    make = comparison.optimizer(name, compressed)  # SGD or Adam of the mean gradient
    step = gradcomp.make_train_step(task.loss_fn, make(0), axis_name="data", mesh=mesh)
    step, *more = comparison.prepare(name, step, make, next(draw(seed=0)))
    for run, first in comparison.runs(name, step, *more):  # from each seed
      batches = draw(seed=run.seed)
      params, state = run.restore(first, batches)
      for number in run.steps():
        batch, options = task.place(next(batches)), task.options(run.seed, number)
        params, state, _ = run.take(step, params, state, batch, **options)
        if run.is_tested:
          state = run.test(task, params, state)
        run.save((params, state))
  comparison.show(f"{args.model} on {args.dataset}")


if __name__ == "__main__":
  main()
