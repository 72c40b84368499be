"""Trains a transformer on text with local steps: what compression costs in loss.

  python -m benchmarks.training.local [--every 15 30 100] [--seeds 3] [--methods ...]
    [--steps 1500] [--output FOLDER] [--quick]

Eight workers train the transformer of the examples by AdamW on the source code of
Python's standard library, byte by byte, from the same initializations and with the same
batches for every method. Steps are rounded down to whole rounds. The workers are a vmap
on one device.

  DiLoCo               float32, Nesterov's momentum outside; the baseline of the same H
  DiLoCo SGD           the same with plain SGD outside
  SparseLoCo           BlockTop, a byte for 64 elements; plain SGD outside; an element
                       is the mean of those workers that sent it
  SparseLoCo mean      the same, divided by the number of all workers
  SparseLoCo of 16     SparseLoCo with one of 16 elements, for long rounds
  SparseLoCo two_shot  one of 64, where owners choose once more among the sums
  Streaming            floats of 3 bits of exponent and none of mantissa, gathered; 4
                       fragments, a delay of a fifteenth of a round, half mixed
  MuLoCo               Muon inside, and 2 bits: the nearest of 4 levels that lose
                       least of Gaussian buckets, gathered
  MuLoCo two_shot      the same with owners, who round once more
  MuLoCo at random     2 bits of the usual QSGD: a sign, and 0 or 1 at random
  MuLoCo BlockTop      Muon inside, and outside what SparseLoCo does with one of 256
                       elements
  ... BlockTop of 512  the same with one of 512
  MuLoCo dense         Muon inside, and float32

The outer rates are those of the papers, but for two_shot. Its sums have few senders,
and are divided by the number of all workers: a rate of 4 is better there than 1. With
--output, writes local_study.json there after every run, and local_study.md. It leaves
out the runs that the file has already.
"""

import functools
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradcomp
from benchmarks.common import cli
from benchmarks.common.tables import spread, table
from benchmarks.common.trainer import Emulated, Plan
from examples.lib.data import text
from examples.lib.networks import Transformer
from gradcomp.codecs import QSGD, BlockTop, Dense, FloatCast

AXIS = "data"
WORKERS = 8
LENGTH = 64
BATCH = 4  # sequences a worker and step
RATES = {"adam": 2e-3, "muon": 5e-3}
BASELINE = "DiLoCo"
Optimizer = optax.GradientTransformation


def by_local_steps(
  every: int, inner: Any, outer: Any, codec: Any, **options: Any
) -> Any:
  """Makes local steps of an inner optimizer, exchanged in a codec for an outer one."""
  return gradcomp.local.local_steps(
    inner,
    outer,
    axis_name=AXIS,
    every=every,
    codec=codec,
    **options,
  )


def make_methods(every: int, steps: int) -> dict[str, Callable[[], Optimizer]]:
  """Returns what makes each method's optimizer."""
  rate = lambda name: optax.cosine_decay_schedule(RATES[name], steps, alpha=0.1)
  adam = optax.adamw(rate("adam"))
  muon = optax.contrib.muon(rate("muon"))
  nesterov = optax.sgd(0.7, 0.9, nesterov=True)
  local = functools.partial(by_local_steps, every)
  forgetting = gradcomp.ErrorFeedback(residual_decay=0.95)
  sparse = functools.partial(local, feedback=forgetting)
  senders = functools.partial(sparse, outer=optax.sgd(1.0), merge="senders")
  e3m0 = FloatCast(exponent_bits=3, mantissa_bits=0)
  parts = {"fragments": 4, "delay": max(1, every // 15), "mixing": 0.5}
  two_bits = QSGD(
    bits=2, bucket_size=128, norm="rms", levels="uniform", rounding="nearest"
  )
  return {
    BASELINE: lambda: local(adam, nesterov, codec=Dense()),
    "DiLoCo SGD": lambda: local(adam, optax.sgd(1.0), codec=Dense()),
    "SparseLoCo": lambda: senders(adam, codec=BlockTop()),
    "SparseLoCo mean": lambda: sparse(adam, optax.sgd(1.0), codec=BlockTop()),
    "SparseLoCo of 16": lambda: senders(adam, codec=BlockTop(block_size=16)),
    "SparseLoCo two_shot": lambda: sparse(
      adam, optax.sgd(4.0), codec=BlockTop(), exchange="two_shot"
    ),
    "Streaming": lambda: local(
      adam, nesterov, codec=e3m0, exchange="all_gather", **parts
    ),
    "MuLoCo": lambda: local(muon, nesterov, codec=two_bits, exchange="all_gather"),
    "MuLoCo two_shot": lambda: local(muon, nesterov, codec=two_bits),
    "MuLoCo at random": lambda: local(
      muon, nesterov, codec=QSGD(bits=2, bucket_size=128)
    ),
    "MuLoCo BlockTop": lambda: senders(muon, codec=BlockTop(block_size=256)),
    "MuLoCo BlockTop of 512": lambda: senders(muon, codec=BlockTop(block_size=512)),
    "MuLoCo dense": lambda: local(muon, nesterov, codec=Dense()),
  }


METHODS = tuple(make_methods(1, 1))


def compiled(
  tx: Optimizer, every: int, found: text.Text, width: int
) -> Callable[[int, int], dict[str, Any]]:
  """Returns what trains a method from a seed for so many rounds: the losses."""
  model = Transformer(text.CHARACTERS, width=width)
  inputs, labels = text.in_order(found.test, LENGTH)

  def loss_fn(params: Any, batch: Any) -> jax.Array:
    logits = model.apply({"params": params}, batch[0])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
    return losses.mean()

  def step(params: Any, state: Any, batch: Any) -> Any:
    own = gradcomp.local.local_params(params, state)
    loss, grads = jax.value_and_grad(loss_fn)(own, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss, {}

  # The count of steps has no axis of workers: under vmap a branch on numbers that may
  # differ is both branches, and so an exchange in each step.
  workers = Emulated(Plan(lambda params: (params, tx.init(params)), step), WORKERS)
  example = jnp.zeros((1, LENGTH), jnp.uint8)
  init = jax.jit(lambda key: model.init(key, example)["params"])
  score = jax.jit(loss_fn)

  def evaluate(params: Any) -> float:
    total = 0.0
    for i in range(0, len(labels), 256):
      part = inputs[i : i + 256], labels[i : i + 256]
      total += float(score(params, part)) * len(part[0])
    return total / len(labels)

  def train(seed: int, rounds: int) -> dict[str, Any]:
    batches = text.batches(found.train, WORKERS * BATCH, LENGTH, seed=seed)
    means, seconds = [], 0.0
    for part in workers.parts(init(jax.random.key(seed)), batches, rounds, every):
      means.append(float(part.losses.mean()))
      seconds += part.seconds
    # All workers have the same: this is the first one's copy.
    params = jax.tree.map(lambda x: x[0], part.carry[0])
    return {
      "test_loss": evaluate(params),
      "train_losses": means,
      "seconds": seconds,
      "compilations": workers.compilations,
    }

  return train


def byte_counts(tx: Optimizer, width: int) -> dict[str, float]:
  """Returns the bytes that a worker sends a step, and a float32 mean's."""
  model = Transformer(text.CHARACTERS, width=width)
  example = jax.ShapeDtypeStruct((1, LENGTH), jnp.uint8)
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = jax.eval_shape(model.init, key, example)["params"]
  dense = optax.chain(gradcomp.dense(axis_name=AXIS, exchange="psum"))
  return {
    "bytes_a_step": gradcomp.explain(tx, params, workers=WORKERS).bytes_per_step,
    "f32_bytes": gradcomp.explain(dense, params, workers=WORKERS).bytes_sent,
  }


def markdown(results: dict[str, Any]) -> str:
  """Writes a table for each H."""
  settings = results["settings"]
  paragraphs = [
    "# What local steps cost in loss",
    "`python -m benchmarks.training.local` writes this file, and says what the methods "
    f"are. {WORKERS} workers, {settings['steps']} steps, {BATCH} sequences of {LENGTH} "
    f"bytes a worker and step, a transformer of width {settings['width']}. The loss is "
    "that of the held-out text, mean and standard deviation of the seeds; *more* is "
    f"the mean's distance from {BASELINE}'s; *fewer* compares bytes with float32 in "
    "every step.",
  ]
  for every, methods in sorted(results["every"].items(), key=lambda x: int(x[0])):
    means = {
      name: statistics.fmean(run["test_loss"] for run in found["runs"].values())
      for name, found in methods.items()
      if found["runs"]
    }
    lines = []
    for name, mean in means.items():
      found = methods[name]
      own = [run["test_loss"] for run in found["runs"].values()]
      more = f"{mean / means[BASELINE] - 1:+.2%}" if BASELINE in means else ""
      fewer = f"{found['f32_bytes'] / found['bytes_a_step']:,.0f}"
      seeds = str(len(own))
      lines.append([name, spread(own, digits=4), more, fewer, seeds])
    header = ["method", "loss", "more", "fewer", "seeds"]
    paragraphs += [f"## H = {every}", table(header, lines)]
  return "\n\n".join(paragraphs) + "\n"


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  args = cli.options(
    __doc__,
    "one H of 4 and 8 steps of a narrow transformer",
    "folder of local_study.json and .md",
    every=cli.Option([15, 30, 100], [4], "steps of a round"),
    seeds=cli.Option(3, 1),
    methods=cli.Option([*METHODS], [BASELINE, "SparseLoCo two_shot"], choices=METHODS),
    steps=cli.Option(1500, 8),
    width=cli.Option(128, 16, "of the transformer"),
  )
  settings = {"steps": args.steps, "width": args.width, "workers": WORKERS}
  results: dict[str, Any] = {"settings": settings, "every": {}}
  if args.output and (path := args.output / "local_study.json").exists():
    earlier = json.loads(path.read_text())
    if earlier["settings"] == settings:
      results = earlier
  found = text.load()
  for every in args.every:
    rounds = args.steps // every
    held = results["every"].setdefault(str(every), {})
    for name, make in make_methods(every, rounds * every).items():
      if name not in args.methods:
        continue
      entry = held.setdefault(name, {"runs": {}} | byte_counts(make(), args.width))
      seeds = [x for x in range(args.seeds) if str(x) not in entry["runs"]]
      train = compiled(make(), every, found, args.width)
      for seed in seeds:
        run = train(seed, rounds)
        entry["runs"][str(seed)] = run
        told = f"loss {run['test_loss']:.4f}, {run['seconds']:.0f} s"
        print(f"H {every}, {name}, seed {seed}: {told}")
        cli.write(args.output, "local_study", results, markdown(results))
  print(markdown(results))


if __name__ == "__main__":
  main()
