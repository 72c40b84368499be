"""Measures what papers say of gradients themselves: on LeNet in training.

  python -m benchmarks.training.gradients [--workers 16] [--steps 200] [--output FOLDER]

LeNet trains on digits with momentum. Then each weight's gradient of one
worker is measured, as it is and clipped at 2.5 standard deviations (Wen et al., 2017,
equation 9):

  zeros     The share that TernGrad turns to 0: 1 - mean(|g|) / max(|g|).
  moment    max(|g|) * sum(|g|) / sum(g ** 2): how many times as large the square of
            the ternary gradient is. It is what separates the paper's assumption 3 from
            the usual one.
  shorter   How much length is lost by clipping, and by which angle (degrees) the
  turned    gradient turns.
  exponent  Of the largest element, and of the median (Han et al., 2021, figure 2).

A second training sends the largest 0.1 % of each worker's residuals (RedSync, without
dense steps at first). *union* is the share of the elements of all weights that at least
one worker sends in a step, over the last tenth of the steps (Fang et al., 2018, section
2.3). Biases do not count.
"""

import argparse
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp
from benchmarks.common import cli
from benchmarks.common.tables import table
from benchmarks.common.trainer import first_kept, of_workers, own
from examples.lib.data import images as data
from examples.lib.networks import LeNet
from examples.lib.training import AXIS, Task

SIGMAS = 2.5
DENSITY = 0.001
IMAGES = 8  # a worker and step
RATE, MOMENTUM = 0.02, 0.9
Optimizer = optax.GradientTransformation


def of_weight(g: np.ndarray) -> dict[str, float]:
  """Measures a gradient of one weight."""
  g = np.asarray(g, np.float64).ravel()
  limit = SIGMAS * g.std()
  clipped = np.clip(g, -limit, limit)
  lengths = np.linalg.norm(g), np.linalg.norm(clipped)
  found = {
    "shorter": 1 - lengths[1] / lengths[0],
    "turned": math.degrees(math.acos(min(1.0, g @ clipped / math.prod(lengths)))),
    "largest_exponent": int(np.frexp(np.abs(g).max())[1]),
    "median_exponent": int(np.median(np.frexp(g[g != 0])[1])),
  }
  for name, x in (("", g), ("_clipped", clipped)):
    size = np.abs(x)
    found[f"zeros{name}"] = 1 - size.mean() / size.max()
    found[f"moment{name}"] = size.max() * size.sum() / (x @ x)
  return {name: float(value) for name, value in found.items()}


def weights(tree: Any) -> Iterator[tuple[str, Any]]:
  """Yields each leaf of two dimensions or more behind its layer's name."""
  for path, leaf in jax.tree.leaves_with_path(tree):
    if leaf.ndim > 1:
      yield path[0].key, leaf


class Workers(NamedTuple):
  """LeNet, and what so many workers train it on."""

  task: Task
  images: data.Split
  number: int

  def batches(self, steps: int) -> Iterator[Any]:
    """Yields the batches of all workers, ``[workers, IMAGES, ...]``."""
    drawn = data.batches(self.images, IMAGES * self.number, seed=0)
    return (of_workers(next(drawn), self.number) for _ in range(steps))

  def train(
    self, exchange: Optimizer, after: Optimizer, steps: int
  ) -> Iterator[tuple[Any, Any]]:
    """Yields the parameters and all workers' mean, after each step."""
    params = jax.device_get(self.task.init_params(0))
    kept = jax.jit(lambda params: first_kept(exchange, params, self.number))(params)
    axes, state = own(kept), after.init(params)

    @jax.jit
    def step(params: Any, kept: Any, state: Any, batch: Any) -> Any:
      def worker(kept: Any, batch: Any) -> Any:
        grads = jax.grad(self.task.loss_fn)(params, batch)
        return exchange.update(grads, kept, params)

      mean, kept = jax.vmap(
        worker, in_axes=(axes, 0), out_axes=(None, axes), axis_name=AXIS
      )(kept, batch)
      updates, state = after.update(mean, state, params)
      return optax.apply_updates(params, updates), kept, state, mean

    for batch in self.batches(steps):
      params, kept, state, mean = step(params, kept, state, batch)
      yield params, mean


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Trains twice, and measures gradients and what is sent."""
  images = data.load(args.dataset, args.data_dir)
  model = functools.partial(LeNet, images.train.images.shape[1:], images.classes)
  task = Task(model, images.test, jax.make_mesh((1,), (AXIS,)))
  workers = Workers(task, images.train, args.workers)
  dense, momentum = gradcomp.dense(axis_name=AXIS), optax.sgd(RATE, MOMENTUM)
  *_, (params, _) = workers.train(dense, momentum, args.steps)
  own_batch = jax.tree.map(lambda x: x[0], next(workers.batches(1)))
  gradient = jax.device_get(jax.jit(jax.grad(task.loss_fn))(params, own_batch))
  sparse = gradcomp.redsync(
    DENSITY, momentum=MOMENTUM, nesterov=False, axis_name=AXIS, selection="trimmed"
  )
  last = max(1, args.steps // 10)
  sent = total = 0
  for i, (_, mean) in enumerate(workers.train(sparse, optax.sgd(RATE), args.steps)):
    if i >= args.steps - last:
      for _, x in weights(mean):
        sent, total = sent + int(jnp.count_nonzero(x)), total + x.size
  return {
    "workers": args.workers,
    "steps": args.steps,
    "dataset": args.dataset,
    "weights": {name: of_weight(g) for name, g in weights(gradient)},
    "density": DENSITY,
    "union": sent / total,
  }


def markdown(found: dict[str, Any]) -> str:
  """Writes the table of the weights, and what all workers send."""
  header = "weight,zeros,clipped,moment,clipped,shorter,turned,largest,median".split(
    ","
  )
  lines = []
  for name, x in found["weights"].items():
    row = [name, f"{x['zeros']:.1%}", f"{x['zeros_clipped']:.1%}"]
    row += [f"{x['moment']:.2f}", f"{x['moment_clipped']:.2f}", f"{x['shorter']:.1%}"]
    exponents = (f"2^{x[f'{kind}_exponent']:.0f}" for kind in ("largest", "median"))
    lines.append([*row, f"{x['turned']:.1f}°", *exponents])
  return "\n\n".join(
    [
      "# What gradients are like",
      "`python -m benchmarks.training.gradients` writes this file, and says what the "
      f"columns are. LeNet on {found['dataset']}, {found['workers']} workers of "
      f"{IMAGES} images, after {found['steps']} steps.",
      table(header, lines),
      f"RedSync with {found['density']:.1%} a worker: all {found['workers']} workers "
      f"together send {found['union']:.2%} of the elements, of "
      f"{found['workers'] * found['density']:.1%} at most.\n",
    ]
  )


def main() -> None:
  args = cli.options(
    __doc__,
    "two workers and two steps",
    "folder of gradient_facts.json and .md",
    workers=cli.Option(16, 2),
    steps=cli.Option(200, 2, "of each training"),
    dataset=cli.Option("digits", help="as in examples/lib/data/images.py"),
    data_dir=cli.Option(data.FOLDER, help="of the images"),
  )
  found = measure(args)
  print(markdown(found))
  cli.write(args.output, "gradient_facts", found, markdown(found))


if __name__ == "__main__":
  main()
