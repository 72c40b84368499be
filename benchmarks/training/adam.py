"""Trains by AdamW behind compressed gradients, and by optimizers that compress more.

  python -m benchmarks.training.adam [--nets transformer lstm lenet] [--arms ...]
    [--small] [--images 60000] [--steps 3000] [--points 20] [--seeds 5]
    [--data FILE] [--output FOLDER] [--quick]

The transformer and the LSTM learn the next character of the Brown corpus, and LeNet
classifies Fashion-MNIST. Four workers are a ``vmap`` on one device, the seeds another
around it, or a loop for images, and all steps one loop: so an arm is one program. A
seed is the same initialization and the same batches for every arm.

With --small, nets and batches are those of SMALL, which one core trains in minutes, and
images have half the height and width.

An arm and a net are a line of adam_study.jsonl in --output, with the end of each seed.
Lines that are there already are not run again. The page adam_study.md compares
their ends with those of AdamW of the plain mean, seed by seed.

With --data, arrays come from that file of NumPy. It is written where it is missing, for
machines without the data sets.
"""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp
from benchmarks.common import cli
from benchmarks.training import adam_page
from benchmarks.training.adam_arms import ARMS, AXIS, BASELINE
from examples.lib import networks
from examples.lib.calling import functions
from examples.lib.data import FOLDER, text

WORKERS = 4
TESTED = 2**16  # characters to test on
NETS = ("transformer", "lstm", "lenet")
Arrays = dict[str, np.ndarray]


class Size(NamedTuple):
  """Sizes of a net and of its batches.

  Attributes:
    width: of the net, or 0 for its own.
    batch: sequences or images of a worker and step.
    rate: of AdamW, at first.
    length: characters of a sequence, to learn from and to test on.
    tested: characters or images to test on.
    channels: of LeNet's first convolution, or 0 for its own.
  """

  width: int
  batch: int
  rate: float
  length: int = 64
  tested: int = TESTED
  channels: int = 0


FULL = {
  "transformer": Size(128, 16, 2e-3),
  "lstm": Size(256, 16, 2e-3),
  "lenet": Size(0, 32, 1e-3),
  "resnet": Size(0, 16, 1e-3),
}
# The rates of the LSTM and of LeNet are the best of AdamW's of those that were tried by
# two seeds: 5e-3, 1e-2, 2e-2, 3e-2 and 5e-2, and 2e-3, 5e-3 and 1e-2.
SMALL = {
  "transformer": Size(64, 4, 2e-3, length=32, tested=2**15),
  "lstm": Size(64, 4, 2e-2, length=32, tested=2**15),
  "lenet": Size(128, 8, 5e-3, tested=2000, channels=8),
}
QUICK = {name: Size(16, 4, 2e-3) for name in NETS}


class Problem(NamedTuple):
  """A net and its data.

  Attributes:
    init: from a key to parameters.
    loss: from parameters and a batch to its mean loss.
    draw: from a key to the batch of a worker.
    score: from parameters to the mean loss and the accuracy on what is held out.
  """

  init: Callable[[jax.Array], Any]
  loss: Callable[[Any, Any], jax.Array]
  draw: Callable[[jax.Array], Any]
  score: Callable[[Any], tuple[jax.Array, jax.Array]]


def load(data: Path | None) -> Arrays:
  """Reads the arrays of all nets from a file, or from the data sets into it."""
  if data is not None and data.exists():
    return dict(np.load(data))
  from examples.lib.data import brown, images  # which need tensorflow-datasets

  corpus = brown.characters()
  pictures = images.read(images.prepare("fashion_mnist", FOLDER))
  arrays = {"text": corpus.train, "text_test": corpus.test[:TESTED]}
  for name, split in (("", pictures.train), ("_test", pictures.test)):
    arrays[f"images{name}"] = split.images
    arrays[f"labels{name}"] = split.labels.astype(np.int32)
  if data is not None:
    np.savez_compressed(data, **arrays)
  return arrays


def problem(net: str, arrays: Arrays, size: Size) -> Problem:
  """Makes a net, and what draws its batches from arrays on the device."""
  given = {"width": size.width, "channels": size.channels}
  own = {name: value for name, value in given.items() if value}
  if net in networks.IMAGES:
    known = jnp.asarray(arrays["images"]), jnp.asarray(arrays["labels"])
    test = tuple(arrays[f"{name}_test"][: size.tested] for name in ("images", "labels"))
    model = functools.partial(networks.IMAGES[net], test[0].shape[1:], 10, **own)

    def draw(key: jax.Array) -> Any:
      chosen = jax.random.randint(key, (size.batch,), 0, len(known[1]))
      return known[0][chosen], known[1][chosen]
  else:
    letters, length = jnp.asarray(arrays["text"]), size.length
    test = text.in_order(arrays["text_test"][: size.tested], length)
    make = functools.partial(networks.TEXTS[net], text.CHARACTERS, dropout=0.0, **own)
    model = make() if net == "transformer" else make

    def draw(key: jax.Array) -> Any:
      first = jax.random.randint(key, (size.batch,), 0, len(letters) - length)
      windows = letters[first[:, None] + jnp.arange(length + 1)]
      return windows[:, :-1], windows[:, 1:].astype(jnp.int32)

  network = functions(model, test[0][:1])
  crossed = optax.softmax_cross_entropy_with_integer_labels
  held = jax.tree.map(_in_parts, tuple(test))

  def loss(params: Any, batch: Any) -> jax.Array:
    return crossed(network.train(params, batch[0], None), batch[1]).mean()

  def score(params: Any) -> tuple[jax.Array, jax.Array]:
    def of_part(part: Any) -> tuple[jax.Array, jax.Array]:
      logits = network.test(params, None, part[0])
      right = logits.argmax(-1) == part[1]
      return crossed(logits, part[1]).mean(), right.mean()

    losses, right = jax.lax.map(of_part, held)
    return losses.mean(), right.mean()

  return Problem(network.init, loss, draw, score)


def _in_parts(x: np.ndarray) -> jax.Array:
  """Cuts what is held out into parts of 100, without the last few."""
  parts = len(x) // 100
  return jnp.asarray(x[: 100 * parts].reshape(parts, 100, *x.shape[1:]))


def trainer(
  found: Problem, make: Callable[[Any], optax.GradientTransformation], counts: Any
) -> Callable[[jax.Array], Any]:
  """Returns what trains from a seed: the curves of losses and accuracy.

  Args:
    found: the net.
    make: from the key of an exchange to an optimizer of per-worker gradients.
    counts: of the points of a curve, and of the steps from one to the next.
  """

  def train(seed: jax.Array) -> Any:
    key, first = jax.random.split(jax.random.key(seed))
    params = found.init(first)
    tx = make(jax.random.key_data(key))
    of_each = functools.partial(
      jax.vmap, lambda _: tx.init(params), axis_name=AXIS, axis_size=WORKERS
    )
    numbers = jnp.arange(WORKERS)
    specs = gradcomp.state_specs(jax.eval_shape(of_each(), numbers), axis_name=AXIS)
    axes = jax.tree.map(lambda spec: 0 if any(spec) else None, specs)
    state = of_each(out_axes=axes)(numbers)

    def step(carry: Any, number: jax.Array) -> Any:
      params, state = carry

      def worker(state: Any, own: jax.Array) -> Any:
        at = jax.random.fold_in(jax.random.fold_in(key, number), own)
        here = gradcomp.local.local_params(params, state)  # which move between steps
        loss, grads = jax.value_and_grad(found.loss)(here, found.draw(at))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, AXIS)

      map_over = functools.partial(jax.vmap, axis_name=AXIS, axis_size=WORKERS)
      out = (None, axes, None)
      params, state, loss = map_over(worker, (axes, 0), out)(state, numbers)
      return (params, state), loss

    points, every = counts

    def point(carry: Any, number: jax.Array) -> Any:
      steps = number * every + jnp.arange(every)
      carry, losses = jax.lax.scan(step, carry, steps)
      return carry, (losses.mean(), *found.score(carry[0]))

    return jax.lax.scan(point, (params, state), jnp.arange(points))[1]

  return train


def run(net: str, arm: str, arrays: Arrays, args: Any) -> dict[str, Any]:
  """Trains an arm on a net from all seeds."""
  found = problem(net, arrays, sizes(args)[net])
  rate = optax.cosine_decay_schedule(sizes(args)[net].rate, args.steps, alpha=0.1)
  points = min(args.points, args.steps)
  every = args.steps // points
  make = functools.partial(ARMS[arm].optimizer, rate, args.steps)
  train_one = trainer(found, make, (points, every))
  # Convolutions with kernels of several seeds are slow, above all on CPUs.
  one_by_one = functools.partial(jax.lax.map, train_one)
  train = jax.jit(one_by_one if net in networks.IMAGES else jax.vmap(train_one))
  seeds = jnp.arange(args.seeds)
  start = time.perf_counter()
  compiled = train.lower(seeds).compile()
  built = time.perf_counter()
  curves = jax.device_get(compiled(seeds))
  done = time.perf_counter()
  shapes = jax.eval_shape(found.init, jax.random.key(0))
  plan = gradcomp.explain(make(0), shapes, workers=WORKERS)
  losses, right = (np.asarray(x, float) for x in curves[1:])
  return settings(net, arm, args) | {
    "device": jax.devices()[0].device_kind,
    "commit": cli.commit(),
    "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
    "bytes_a_step": float(plan.bytes_per_step),  # behind a dense start
    "start": ARMS[arm].start,
    "test_loss": losses[:, -1].round(9).tolist(),
    "accuracy": right[:, -1].round(9).tolist(),
    "last_quarter": round(adam_page.last_quarter(losses), 9),
    "compile_seconds": round(built - start, 1),
    "seconds": round(done - built, 1),
  }


def settings(net: str, arm: str, args: Any) -> dict[str, Any]:
  """Returns all that a line depends on."""
  learned = {"images": args.images} if net in networks.IMAGES else {}
  return learned | {
    "net": net,
    "arm": arm,
    "workers": WORKERS,
    "steps": args.steps,
    "seeds": args.seeds,
    "width": sizes(args)[net].width,
    "batch": sizes(args)[net].batch,
    "rate": sizes(args)[net].rate,
  }


def sizes(args: Any) -> dict[str, Size]:
  """Returns the sizes that the command line asks for."""
  return QUICK if args.quick else SMALL if args.small else FULL


def smaller(arrays: Arrays) -> Arrays:
  """Returns arrays whose images have half the height and width."""

  def halved(images: np.ndarray) -> np.ndarray:
    count, height, width, channels = images.shape
    parts = images.reshape(count, height // 2, 2, width // 2, 2, channels)
    return parts.mean((2, 4)).astype(images.dtype)

  pictures = ("images", "images_test")
  return arrays | {name: halved(arrays[name]) for name in pictures}


def fewer(arrays: Arrays, images: int) -> Arrays:
  """Returns arrays with the first images to learn from."""
  return arrays | {name: arrays[name][:images] for name in ("images", "labels")}


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  args = cli.options(
    __doc__,
    "two arms and two steps of narrow nets, on numbers drawn at random",
    "folder of adam_study.jsonl and .md",
    nets=cli.Option([*NETS], choices=NETS),
    arms=cli.Option([*ARMS], [BASELINE, "onebit"], choices=ARMS),
    steps=cli.Option(3000, 2),
    points=cli.Option(20, 2, "of a curve"),
    seeds=cli.Option(5, 2),
    images=cli.Option(60_000, 200, "to learn from"),
    small=cli.Option(False, help="narrow nets and small batches"),
    data=cli.Option(None, help="file of the arrays", kind=Path),
  )
  arrays = random_arrays() if args.quick else load(args.data)
  arrays = smaller(arrays) if args.small else arrays
  arrays = fewer(arrays, args.images)
  path = args.output and args.output / "adam_study.jsonl"
  lines = adam_page.read(path)
  for net in args.nets:
    for arm in args.arms:
      wanted = settings(net, arm, args)
      if any(wanted.items() <= line.items() for line in lines):
        continue
      line = run(net, arm, arrays, args)
      lines.append(line)
      ended = f"loss {np.mean(line['test_loss']):.4f}, {line['seconds']:.0f} s"
      print(f"{net}, {arm}: {ended}, {line['compile_seconds']:.0f} s to compile")
      adam_page.append(path, line)
  page = adam_page.markdown(lines)
  print(page)
  if path:
    path.with_suffix(".md").write_text(page)


def random_arrays() -> Arrays:
  """Draws arrays for a quick run."""
  random = np.random.default_rng(0)
  sizes = {"": 400, "_test": 100}
  arrays: Arrays = {}
  for name, size in sizes.items():
    arrays[f"text{name}"] = random.integers(0, 128, 65 * size, np.uint8)
    arrays[f"images{name}"] = random.integers(0, 256, (size, 8, 8, 1), np.uint8)
    arrays[f"labels{name}"] = random.integers(0, 10, size, np.int32)
  return arrays


if __name__ == "__main__":
  main()
