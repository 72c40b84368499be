"""Trains with 4 bits for each leaf, and with those that gradcomp.cost.allocate finds.

  python -m benchmarks.training.allocate [--nets transformer lenet resnet]
    [--arms ...] [--steps 100] [--seeds 5] [--data FILE] [--output FOLDER] [--quick]

The nets, the data and the four workers are those of benchmarks.training.adam, and so is
AdamW. ResNet sees images of half the height and width. The bits are allocated once a
net, from the gradients of all workers of another seed: at its start and behind a tenth
of its steps in float32. A seed is the same initialization and the same batches for
every arm:

float32    the plain mean
uniform    QSGD of 4 bits for each leaf
allocated  the same squared error of these gradients, at fewer bytes

A net and an arm are a line of allocate_study.jsonl in --output; lines that are there
already are not run again. The page allocate_study.md compares ends seed by seed.
"""

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp
from benchmarks.common import cli
from benchmarks.training import adam, allocate_page
from benchmarks.training.adam_arms import AXIS, DECAY
from gradcomp.codecs import QSGD, Dense
from gradcomp.cost import Allocation, allocate

NETS = ("transformer", "lenet", "resnet")
ARMS = ("float32", "uniform", "allocated")
UNIFORM = QSGD(bits=4)
PILOT = 1000  # the seed of the gradients that bits are allocated from


class Pilot(NamedTuple):
  """The bits that a pilot run of a net allocates.

  Attributes:
    found: the allocation.
    late_error: squared errors of the gradients at the end of the pilot, those of the
      allocated bits over those of the uniform ones.
  """

  found: Allocation
  late_error: float


def optimizer(codec: Any, rate: Any, key: Any) -> optax.GradientTransformation:
  """Returns AdamW behind the exchange of a codec."""
  exchange = gradcomp.compress(codec, axis_name=AXIS, key=key)
  return optax.chain(exchange, optax.adamw(rate, weight_decay=DECAY))


def pilot(problem: adam.Problem, rate: Any, steps: int) -> Pilot:
  """Trains in float32, and allocates bits from gradients on the way."""
  tx = optax.adamw(rate, weight_decay=DECAY)
  key, first = jax.random.split(jax.random.key(PILOT))
  params = problem.init(first)
  workers = jnp.arange(adam.WORKERS)

  def gradients(params: Any, number: jax.Array) -> Any:
    def of_worker(own: jax.Array) -> Any:
      at = jax.random.fold_in(jax.random.fold_in(key, number), own)
      return jax.grad(problem.loss)(params, problem.draw(at))

    return jax.vmap(of_worker)(workers)

  @jax.jit
  def step(params: Any, state: Any, number: jax.Array) -> Any:
    grads = gradients(params, number)
    mean = jax.tree.map(lambda x: x.mean(0), grads)
    updates, state = tx.update(mean, state, params)
    return optax.apply_updates(params, updates), state, grads

  kept = {}
  state = tx.init(params)
  for number in range(steps):
    params, state, grads = step(params, state, jnp.asarray(number))
    if number in (0, steps // 10, steps - 1):
      kept[number] = jax.device_get(grads)
  *early, late = map(_each, kept.values())
  found = allocate([tree for trees in early for tree in trees], uniform=UNIFORM)
  return Pilot(found, error(found.policy, late) / error(UNIFORM, late))


def _each(grads: Any) -> list[Any]:
  """Returns the gradient of each worker."""
  of = lambda own: jax.tree.map(lambda x: x[own], grads)
  return [of(own) for own in range(adam.WORKERS)]


def error(codec: Any, trees: Any) -> float:
  """Returns the squared error of encoding trees."""
  tx = gradcomp.compress(codec, feedback=None)
  sent = jax.jit(lambda tree: tx.update(tree, tx.init(tree))[0])
  lost = lambda a, b: np.sum((np.asarray(a, np.float64) - b) ** 2)
  return float(sum(sum(jax.tree.leaves(jax.tree.map(lost, sent(x), x))) for x in trees))


def run(problem: adam.Problem, codec: Any, rate: Any, args: Any) -> dict[str, Any]:
  """Trains from each seed, one after the other."""
  make = functools.partial(optimizer, codec, rate)
  counts = args.points, args.steps // args.points
  train = jax.jit(adam.trainer(problem, make, counts))
  start = time.perf_counter()
  compiled = train.lower(0).compile()
  built = time.perf_counter()
  curves = [jax.device_get(compiled(seed)) for seed in range(args.seeds)]
  names = ("train_loss", "test_loss", "accuracy")
  by_name = zip(names, zip(*curves, strict=True), strict=True)
  shapes = jax.eval_shape(problem.init, jax.random.key(0))
  plan = gradcomp.explain(make(0), shapes, workers=adam.WORKERS)
  return {
    "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
    "bytes_a_step": float(plan.bytes_per_step),
    **{name: np.asarray(x).tolist() for name, x in by_name},
    "compile_seconds": round(built - start, 1),
    "seconds": round(time.perf_counter() - built, 1),
  }


def smaller(arrays: adam.Arrays) -> adam.Arrays:
  """Returns arrays whose images have half the height and width."""

  def halved(images: np.ndarray) -> np.ndarray:
    count, height, width, channels = images.shape
    parts = images.reshape(count, height // 2, 2, width // 2, 2, channels)
    return parts.mean((2, 4)).astype(images.dtype)

  pictures = ("images", "images_test")
  return arrays | {name: halved(arrays[name]) for name in pictures}


def settings(net: str, arm: str, args: Any) -> dict[str, Any]:
  """Returns all that a line depends on."""
  return {
    "net": net,
    "arm": arm,
    "workers": adam.WORKERS,
    "steps": args.steps,
    "seeds": args.seeds,
    "width": args.width if net == "transformer" else 0,
    "batch": adam.BATCH[net],
    "rate": adam.RATES[net],
  }


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  args = cli.options(
    __doc__,
    "ten steps of narrow nets, on numbers drawn at random",
    "folder of allocate_study.jsonl and .md",
    nets=cli.Option([*NETS], ["transformer"], choices=NETS),
    arms=cli.Option([*ARMS], choices=ARMS),
    steps=cli.Option(100, 10),
    points=cli.Option(4, 2, "of a curve"),
    seeds=cli.Option(5, 2),
    width=cli.Option(128, 16, "of the transformer"),
    data=cli.Option(None, help="file of the arrays", kind=Path),
  )
  arrays = adam.random_arrays() if args.quick else adam.load(args.data)
  path = args.output and args.output / "allocate_study.jsonl"
  lines = allocate_page.read(path)
  for net in args.nets:
    wanted = {arm: settings(net, arm, args) for arm in args.arms}
    for line in lines:
      wanted = {k: v for k, v in wanted.items() if not v.items() <= line.items()}
    if not wanted:
      continue
    own = smaller(arrays) if net == "resnet" else arrays
    problem = adam.problem(net, own, args.width)
    rate = optax.cosine_decay_schedule(adam.RATES[net], args.steps, alpha=0.1)
    found = pilot(problem, rate, args.steps)
    print(f"{net}: late error {found.late_error:.3g} of the uniform one\n{found.found}")
    codecs = dict(zip(ARMS, (Dense(), UNIFORM, found.found.policy), strict=True))
    for arm, setting in wanted.items():
      about = {"device": jax.devices()[0].device_kind, "commit": cli.commit()}
      if arm == "allocated":
        about |= {
          "late_error": found.late_error,
          "codecs": {x.path: repr(x.codec) for x in found.found.leaves},
        }
      line = setting | about | run(problem, codecs[arm], rate, args)
      lines.append(line)
      ended = np.mean([curve[-1] for curve in line["test_loss"]])
      print(f"{net}, {arm}: loss {ended:.4f}, {line['seconds']:.0f} s")
      if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
          file.write(json.dumps(line) + "\n")
  page = allocate_page.markdown(lines)
  print(page)
  if path:
    path.with_suffix(".md").write_text(page)


if __name__ == "__main__":
  main()
