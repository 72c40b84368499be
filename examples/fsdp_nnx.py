"""Trains a transformer of flax nnx whose parameters are cut over the workers (FSDP).

    python examples/fsdp_nnx.py --steps 200

It does what fsdp_linen.py does, with modules that are objects. ``nnx.split`` takes
their parameters out, and ``nnx.merge`` puts whole ones into a layer when it is called.
Here each worker has an Nth of the elements of a parameter, of whatever shape that is.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import text
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp.codecs import QSGD, EightBit

BATCH, LENGTH = 32, 32  # sequences of a step, of all workers, and bytes of a sequence
# Buckets are so small that a worker's part of a matrix fills its rows.
WEIGHTS = EightBit(bucket_size=128)
GRADS = QSGD(bits=4, bucket_size=128, rounding="nearest")


class Block(nnx.Module):
  """Attention and two dense layers, each normalised before and added to its input."""

  def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
    self.norm1 = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
    self.attend = nnx.MultiHeadAttention(
      heads, width, use_bias=False, decode=False, rngs=rngs
    )
    self.norm2 = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
    self.widen = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
    self.narrow = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x += self.attend(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
    return x + self.narrow(nnx.gelu(self.widen(self.norm2(x))))


def layers(width: int, length: int, depth: int, *, rngs: nnx.Rngs) -> list[nnx.Module]:
  """Makes a decoder: embeddings of bytes and of positions, blocks, and an output."""
  return [
    nnx.Embed(text.CHARACTERS, width, rngs=rngs),
    nnx.Embed(length, width, rngs=rngs),
    *[Block(width, 4, rngs=rngs) for _ in range(depth)],
    nnx.Linear(width, text.CHARACTERS, use_bias=False, rngs=rngs),
  ]


def gather(like: Any, w: jax.Array, residual: jax.Array) -> jax.Array:
  """Puts a parameter together from flat parts; ``like`` has its shape."""
  small = len(like.shape) < 2  # such parameters travel in float32
  codecs = dict(weights=None if small else WEIGHTS, grads=None if small else GRADS)
  return parallel.gather(w, "data", residual=residual, shape=like.shape, **codecs)


def loss_fn(parts: Any, params: Any, residuals: Any, batch: text.Tokens) -> jax.Array:
  """Computes a worker's share of the mean loss, of which gradients are sums.

  Args:
    parts: of each layer its definition, and the shapes of its parameters.
    params: flat, a worker's own.
    residuals: the worker's.
    batch: the worker's.
  """

  def call(layer: int, x: jax.Array) -> jax.Array:
    graph, shapes = parts[layer]

    # A layer gathers when it is called, and again before its backward pass.
    def whole(params: Any, residuals: Any, x: jax.Array) -> jax.Array:
      return nnx.merge(graph, jax.tree.map(gather, shapes, params, residuals))(x)

    return jax.checkpoint(whole)(params[layer], residuals[layer], x)

  x = call(0, batch.inputs) + call(1, jnp.arange(batch.inputs.shape[1]))
  for layer in range(2, len(parts)):
    x = call(layer, x)
  losses = optax.softmax_cross_entropy_with_integer_labels(x, batch.labels)
  return jnp.mean(losses) / lax.axis_size("data")


def main(argv: Sequence[str] | None = None) -> None:
  """Trains, and prints the loss and the bytes of a step."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--workers", type=int, default=4, help="default: 4")
  parser.add_argument("--steps", type=int, default=200, help="default: 200")
  args = parser.parse_args(argv)
  if BATCH % args.workers:
    parser.error(f"--workers must divide the {BATCH} sequences of a batch")
  jax.config.update("jax_num_cpu_devices", args.workers)
  devices = jax.devices()[: args.workers]
  jax.set_mesh(jax.make_mesh((args.workers,), ("data",), devices=devices))
  batches = text.batches(text.load().train, BATCH, LENGTH, seed=0)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))

  whole = [nnx.split(x) for x in layers(128, LENGTH, 2, rngs=nnx.Rngs(0))]
  parts = [(graph, jax.tree.map(jax.typeof, params)) for graph, params in whole]
  pad = lambda w: jnp.pad(w.reshape(-1), (0, -w.size % args.workers))
  params = jax.tree.map(pad, [params for _, params in whole])

  def worker(params: Any, residuals: Any, batch: text.Tokens) -> Any:
    grad = jax.value_and_grad(loss_fn, (1, 2))
    loss, cotangents = grad(parts, params, residuals, batch)
    return lax.psum(loss, "data"), *cotangents

  def zeros(params: Any) -> Any:
    return jax.tree.map(lambda w: parallel.gather_residual(w, "data"), params)

  def cut(function: Any, outputs: Any) -> Any:
    return jax.shard_map(function, in_specs=P("data"), out_specs=outputs)

  gradients = cut(worker, (P(), P("data"), P("data")))

  @jax.jit
  def step(params: Any, residuals: Any, state: Any, batch: text.Tokens) -> Any:
    loss, grads, residuals = gradients(params, residuals, batch)
    # Here parameters are global arrays, and norms are those of whole ones.
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), residuals, state, loss

  params = jax.device_put(params, P("data"))
  residuals = jax.jit(cut(zeros, P("data")))(params)
  state = jax.jit(optimizer.init)(params)
  place = lambda batch: jax.device_put(batch, P("data"))
  program = step.lower(params, residuals, state, place(next(batches))).compile()
  for number in range(1, args.steps + 1):
    batch = place(next(batches))
    params, residuals, state, loss = program(params, residuals, state, batch)
    if number % max(1, args.steps // 10) == 0:
      print(f"step {number}: loss {loss:.3f}")
  print(gradcomp.wire_report(program))


if __name__ == "__main__":
  main()
