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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gradcomp
from examples.lib import comparisons, fsdp, texts
from gradcomp import codecs, parallel

DEFAULTS = {"codec": "redsync", "nesterov": True, "clip": 1.0, "batch_size": 16}
DEFAULTS |= {"steps": 600, "evaluate_every": 60, "devices": 4}
DEFAULTS |= {"output": Path("results/text"), "rates": {"sgd": 2.0, "adam": 2e-3}}
DEFAULTS |= {"compared": ("f32", "qsgd-4", "qsgd-2", "redsync")}  # --compare alone
TESTED = 8192  # sequences at most


class GRU(nnx.Module):
  """A gated recurrent unit. It has 0.35 million parameters with ASCII characters."""

  def __init__(self, symbols: int, *, rngs: nnx.Rngs):
    width, hidden, turning = 128, 256, texts.TURNING
    self.embed = nnx.Embed(symbols, width, rngs=rngs)
    self.inputs = nnx.Linear(width, 3 * hidden, rngs=rngs)
    self.recurrent = nnx.Linear(hidden, 3 * hidden, kernel_init=turning, rngs=rngs)
    self.head = nnx.Linear(hidden, symbols, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    # All that does not wait for the state is one product for the whole sequence.
    given = self.inputs(self.embed(tokens.astype(jnp.int32)))
    kernel, bias = self.recurrent.kernel[...], self.recurrent.bias[...]

    def step(state: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
      reset, update, new = jnp.split(now, 3, axis=-1)
      r, u, n = jnp.split(state @ kernel + bias, 3, axis=-1)
      keep = nnx.sigmoid(update + u)
      fresh = nnx.tanh(new + nnx.sigmoid(reset + r) * n)
      state = keep * state + (1 - keep) * fresh
      return state, state

    return self.head(texts.scanned(step, texts.zeros(given, kernel.shape[0]), given))


MODELS = {"gru": GRU, **texts.NETWORKS}
OWN = texts.add_arguments, comparisons.add_parallel
make_parser = functools.partial(
  comparisons.make_parser, __doc__, MODELS, DEFAULTS, *OWN
)


def compressed(codec: codecs.Codec, **options: Any) -> Any:
  """Makes the exchange: it encodes gradients, sends them, and decodes their mean."""
  return gradcomp.compress(codec, axis_name="data", **options)


def scanned(codec: codecs.Codec, **options: Any) -> Any:
  """Makes the same for blocks that exchange in the loop of the backward pass."""
  blocks = parallel.compress_in_scan(codec, axis_name="data", **options)
  parts = {"blocks": blocks, "rest": compressed(codec, **options)}
  return optax.partition(parts, texts.in_blocks)


def main(argv: Sequence[str] | None = None) -> None:
  """Trains with the options given, prints the table and writes the files."""
  parser = make_parser()
  comparison = comparisons.begin(parser, argv)
  args = comparison.args
  text = texts.load(args.text)
  texts.fits(parser, args, text)
  model = texts.network(MODELS[args.model], text.symbols, args.dropout, args.scan)
  test = texts.in_order(text.test, args.length, most=TESTED)
  task = comparison.make_task(model, test)
  over = {"axis_name": "data", "mesh": comparison.mesh}
  make_step = functools.partial(gradcomp.make_train_step, task.loss_fn, **over)
  sizes = (args.batch_size, args.length)
  draw = functools.partial(texts.batches, text.train, *sizes, **comparison.part)
  for name in comparison.methods:
    if args.parallel == "data":
      make = comparison.optimizer(name, scanned if args.scan else compressed)
    else:
      make = make_zero(comparison) if args.parallel == "zero" else make_fsdp(comparison)
    step = make(0).step if args.parallel == "fsdp" else make_step(make(0))
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
  comparison.show(f"{args.model} on {args.text}", perplexity=True)


def make_zero(comparison: comparisons.Comparison) -> Callable[[int], Any]:
  """Returns what makes Adam of which each worker runs the part of its shard."""
  args, few = comparison.args, lambda bits: codecs.QSGD(bits=bits)
  sent = {"grads": few(args.grads), "params": few(args.weights or 4)}
  sent["feedback"] = None if args.feedback == "none" else "error"
  return lambda seed: parallel.zero(comparison.adam(), **sent, axis_name="data")


def make_fsdp(comparison: comparisons.Comparison) -> Callable[[int], Any]:
  """Returns what makes Adam of which each worker keeps a shard of the parameters."""
  # Buckets are so small that a worker's part of a matrix fills its rows.
  args, few = comparison.args, lambda bits: codecs.QSGD(bits=bits, bucket_size=128)
  sent = {"weights": few(args.weights or 8), "grads": few(args.grads)}
  sent |= {"feedback": args.feedback != "none", "optimizer": comparison.adam()}
  made = fsdp.on_mesh(comparison.task, **sent)
  return lambda seed: made


if __name__ == "__main__":
  main()
