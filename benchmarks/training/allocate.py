"""Trains with 4 bits for each leaf, and with bits that its gradients ask for.

  python -m benchmarks.training.allocate [--nets transformer lenet resnet]
    [--arms ...] [--steps 300] [--seeds 0 1 2 3 4] [--width 128] [--batch 8]
    [--data FILE] [--output FOLDER] [--quick]

The nets, the data and the four workers are those of benchmarks.training.adam, and so is
AdamW. Images have half the height and width. The bits are allocated once a net, from
the gradients of all workers of another seed: at its start and behind a tenth of its
steps in float32. A seed is the same initialization and the same batches for every arm:

pilot      the allocation alone
float32    the plain mean
uniform    QSGD of 4 bits for each leaf
allocated  the same squared error of these gradients, at fewer bytes

A net, an arm and a seed are a line of allocate_study.jsonl in --output; lines that are
there already are not run again. The page allocate_study.md compares ends seed by seed.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradcomp
from benchmarks.common import cli
from benchmarks.training import adam, allocate_page
from benchmarks.training.adam_arms import AXIS, DECAY
from benchmarks.training.adam_page import Line, append, read
from benchmarks.training.plain_steps import plain_steps
from gradcomp._src.cost.allocate import loss
from gradcomp._src.cost.planner.candidates import name_of
from gradcomp._src.mesh.trees import unboxed
from gradcomp.codecs import QSGD, Dense
from gradcomp.cost import Allocation, allocate

NETS = ("transformer", "lenet", "resnet")
ARMS = ("pilot", "float32", "uniform", "allocated")
Trained = Callable[[int], tuple[float, float]]
Exchange = Callable[..., optax.GradientTransformation]
UNIFORM = QSGD(bits=4)
TESTED = 6500  # images, or characters, to test on
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


def exchange_by(codec: Any) -> Exchange:
  """Returns a function from a key to the exchange by a codec."""
  # Owners that kept residuals would have states of their own.
  two_shot = gradcomp.exchange.TwoShot(feedback=False)
  return functools.partial(gradcomp.compress, codec, axis_name=AXIS, exchange=two_shot)


def optimizer(exchange: Exchange, rate: Any, key: Any) -> optax.GradientTransformation:
  """Returns AdamW behind an exchange."""
  return optax.chain(exchange(key=key), optax.adamw(rate, weight_decay=DECAY))


def pilot(problem: adam.Problem, rate: Any, steps: int) -> Pilot:
  """Trains in float32, and allocates bits from gradients on the way."""
  kept = []
  for number, grads in enumerate(plain_steps(problem, rate, steps, PILOT)):
    if number in (0, steps // 10, steps - 1):
      kept.append(jax.device_get(grads))
  *early, late = map(_each, kept)
  trees = [tree for trees in early for tree in trees]
  found = allocate(trees, uniform=UNIFORM)
  late_error = _lost(found, late, allocated=True) / _lost(found, late)
  print(f"late error {late_error:.3g} of the uniform one\n{found}")
  return Pilot(found, late_error)


def _lost(found: Allocation, trees: Any, *, allocated: bool = False) -> float:
  """Returns the squared error of encoding trees."""
  codecs = {leaf.path: leaf.codec for leaf in found.leaves}
  total = 0.0
  for tree in trees:
    for path, leaf in jax.tree_util.tree_leaves_with_path(unboxed(tree)):
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      total += loss(codecs[name] if allocated else UNIFORM, [leaf], None)
  return total


def _each(grads: Any) -> list[Any]:
  """Returns the gradient of each worker."""
  of = lambda own: jax.tree.map(lambda x: x[own], grads)
  return [of(own) for own in range(adam.WORKERS)]


def train(problem: adam.Problem, exchange: Exchange, rate: Any, args: Any) -> Trained:
  """Returns a function that trains from a seed.

  It returns the test's loss and accuracy.
  """
  workers = jnp.arange(adam.WORKERS)
  over = functools.partial(jax.vmap, axis_name=AXIS, axis_size=adam.WORKERS)

  @jax.jit
  def first(seed: jax.Array) -> Any:
    key, own = jax.random.split(jax.random.key(seed))
    params = problem.init(own)
    tx = optimizer(exchange, rate, jax.random.key_data(key))
    # No state differs between workers: there is no residual of theirs or of owners.
    return key, params, over(lambda _: tx.init(params), out_axes=None)(workers)

  @jax.jit
  def step(key: Any, params: Any, state: Any, number: jax.Array) -> Any:
    tx = optimizer(exchange, rate, jax.random.key_data(key))

    def worker(own: jax.Array) -> Any:
      at = jax.random.fold_in(jax.random.fold_in(key, number), own)
      grads = jax.grad(problem.loss)(params, problem.draw(at))
      return tx.update(grads, state, params)

    updates, state = over(worker, out_axes=None)(workers)
    return optax.apply_updates(params, updates), state

  score = jax.jit(problem.score)

  def trained(seed: int) -> tuple[float, float]:
    key, params, state = first(seed)
    for number in range(args.steps):
      params, state = step(key, params, state, jnp.asarray(number))
    loss, right = score(params)
    return float(loss), float(right)

  return trained


def results(
  problem: adam.Problem, exchange: Exchange, rate: Any, args: Any
) -> Iterator[Line]:
  """Trains from each seed, one after the other, and yields what a line says of it."""
  shapes = jax.eval_shape(problem.init, jax.random.key(0))
  tx = optimizer(exchange, rate, 0)
  sent = gradcomp.explain(tx, shapes, workers=adam.WORKERS).bytes_per_step
  trained = train(problem, exchange, rate, args)
  for seed in args.seeds:
    start = time.perf_counter()
    loss, right = trained(seed)
    yield {
      "seed": seed,
      "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
      "bytes_a_step": float(sent),
      "taken": [args.steps],
      "test_loss": loss,
      "accuracy": right,
      "seconds": round(time.perf_counter() - start, 1),
    }


def exchange_of(
  arm: str, piloted: Callable[[], Pilot]
) -> tuple[Exchange, dict[str, Any]]:
  """Returns the exchange of an arm, and what a line says of its codecs."""
  codec: Any = {"float32": Dense(), "uniform": UNIFORM}.get(arm)
  about: dict[str, Any] = {}
  if codec is None:
    found, late_error = piloted()
    codec = found.policy
    about = {
      "parameters": sum(x.elements for x in found.leaves),
      "payload": found.nbytes,
      "uniform_payload": found.uniform_nbytes,
      "early_error": found.error / found.uniform_error,
      "late_error": late_error,
      "codecs": {x.path: name_of(x.codec) for x in found.leaves},
    }
  return exchange_by(codec), about


def size(net: str, args: Any) -> adam.Size:
  """Returns the sizes of a net."""
  own = adam.FULL[net]._replace(batch=args.batch, tested=TESTED)
  return own._replace(width=args.width) if net == "transformer" else own


def settings(net: str, arm: str, args: Any) -> dict[str, Any]:
  """Returns all that a line depends on."""
  return {
    "net": net,
    "arm": arm,
    "workers": adam.WORKERS,
    "steps": args.steps,
    "width": size(net, args).width,
    "batch": size(net, args).batch,
    "rate": size(net, args).rate,
  }


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  args = cli.options(
    __doc__,
    "three steps of a narrow net, on numbers drawn at random",
    "folder of allocate_study.jsonl and .md",
    nets=cli.Option([*NETS], ["transformer"], choices=NETS),
    arms=cli.Option([*ARMS], choices=ARMS),
    steps=cli.Option(300, 3),
    seeds=cli.Option([0, 1, 2, 3, 4], [0, 1]),
    width=cli.Option(128, 16, "of the transformer"),
    batch=cli.Option(8, 2, "of a worker and step"),
    data=cli.Option(None, help="file of the arrays", kind=Path),
  )
  arrays = adam.random_arrays() if args.quick else adam.load(args.data)
  arrays = adam.smaller(arrays)
  path = args.output and args.output / "allocate_study.jsonl"
  lines = read(path)
  for net in args.nets:
    problem = adam.problem(net, arrays, size(net, args))
    rate = optax.cosine_decay_schedule(size(net, args).rate, args.steps, alpha=0.1)
    piloted = functools.cache(functools.partial(pilot, problem, rate, args.steps))
    for arm in args.arms:
      setting = settings(net, arm, args)
      there = {x["seed"] for x in lines if setting.items() <= x.items()}
      seeds = [PILOT] if arm == "pilot" else args.seeds
      missing = [seed for seed in seeds if seed not in there]
      if not missing:
        continue
      about = {"device": jax.devices()[0].device_kind, "commit": cli.commit()}
      exchange, own = exchange_of(arm, piloted)
      own_args = argparse.Namespace(**vars(args) | {"seeds": missing})
      pilots = [{"seed": PILOT}] if arm == "pilot" else []
      for result in pilots or results(problem, exchange, rate, own_args):
        line = setting | about | own | result
        lines.append(line)
        print(f"{net}, {arm}, seed {line['seed']}: {line.get('test_loss', '')}")
        append(path, line)
  page = allocate_page.markdown(lines)
  print(page)
  if path:
    path.with_suffix(".md").write_text(page)


if __name__ == "__main__":
  main()
