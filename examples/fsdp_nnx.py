"""Trains a transformer of flax nnx with sharded parameters (FSDP).

    python -m examples.fsdp_nnx --steps 200

It does what fsdp_linen.py does, with modules that are objects.
``nnx.split`` takes their parameters out, and ``nnx.merge`` puts whole ones into a layer
when it is called. Here each worker has an Nth of a parameter's elements, in any shape.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp
from examples.lib import runs, texts
from gradcomp import codecs, parallel

BATCH, LENGTH = 32, 32  # sequences of a step, of all workers, and bytes of a sequence
# Buckets are so small that a worker's part of a matrix fills its rows.
WEIGHTS = codecs.EightBit(bucket_size=128)
GRADS = codecs.QSGD(bits=4, bucket_size=128, rounding="nearest")
make_parser = functools.partial(runs.make_parser, __doc__, workers=4)


class Block(nnx.Module):
  """Attention and two dense layers, each normalized before and added to its input."""

  def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
    self.norm1 = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
    options = {"use_bias": False, "rngs": rngs}
    self.attend = nnx.MultiHeadAttention(heads, width, decode=False, **options)
    self.norm2 = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
    self.widen = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
    self.narrow = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x += self.attend(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
    return x + self.narrow(nnx.gelu(self.widen(self.norm2(x))))


def layers(width: int, length: int, depth: int, *, rngs: nnx.Rngs) -> list[nnx.Module]:
  """Makes a decoder: embeddings of bytes and of positions, blocks, and an output."""
  return [
    nnx.Embed(texts.CHARACTERS, width, rngs=rngs),
    nnx.Embed(length, width, rngs=rngs),
    *[Block(width, 4, rngs=rngs) for _ in range(depth)],
    nnx.Linear(width, texts.CHARACTERS, use_bias=False, rngs=rngs),
  ]


def gather(like: Any, w: jax.Array, residual: jax.Array) -> jax.Array:
  """Gathers a parameter from flat parts; ``like`` has its shape."""
  small = len(like.shape) < 2  # such parameters travel in float32
  sent = {"params": None if small else WEIGHTS, "grads": None if small else GRADS}
  given = {"residual": residual, "shape": like.shape, **sent}
  return parallel.gather(w, axis_name="data", **given)


def share_of_loss(call: Callable[..., jax.Array], depth: int, batch: Any) -> jax.Array:
  """Computes a worker's share of the mean loss, by ``call(layer, x)``."""
  x = call(0, batch.inputs) + call(1, jnp.arange(batch.inputs.shape[1]))
  for layer in range(2, depth):
    x = call(layer, x)
  losses = optax.softmax_cross_entropy_with_integer_labels(x, batch.labels)
  return jnp.mean(losses) / lax.axis_size("data")


# ``parts`` has of each layer its definition, and the shapes of its parameters.
def loss_fn(parts: Any, params: Any, residuals: Any, batch: texts.Tokens) -> jax.Array:
  """Computes a worker's share of the loss from its flat parts of the parameters."""

  def call(layer: int, x: jax.Array) -> jax.Array:
    graph, shapes = parts[layer]

    # A layer gathers when it is called, and again before its backward pass.
    def whole(params: Any, residuals: Any, x: jax.Array) -> jax.Array:
      return nnx.merge(graph, jax.tree.map(gather, shapes, params, residuals))(x)

    return jax.checkpoint(whole)(params[layer], residuals[layer], x)

  return share_of_loss(call, len(parts), batch)


def whole_gradients(parts: Any, params: Any, residuals: Any, batch: Any) -> Any:
  """Returns the gradient of whole parameters, and the residuals, to be inspected."""
  every = list(zip(parts, params, residuals, strict=True))
  whole = [jax.tree.map(gather, like, w, e) for (_, like), w, e in every]

  def loss_fn(whole: Any) -> jax.Array:
    made = [nnx.merge(graph, w) for (graph, _), w in zip(parts, whole, strict=True)]
    return share_of_loss(lambda layer, x: made[layer](x), len(made), batch)

  fit = lambda like, e: e[: like.size].reshape(like.shape)
  return jax.grad(loss_fn)(whole), [jax.tree.map(fit, x, e) for (_, x), _, e in every]


def main(argv: Sequence[str] | None = None) -> None:
  """Trains, and prints the loss and the bytes of a step."""
  args = runs.set_mesh(make_parser(), argv, BATCH, workers="data")
  batches = texts.batches(texts.load().train, BATCH, LENGTH, seed=0)
  whole = [nnx.split(x) for x in layers(128, LENGTH, 2, rngs=nnx.Rngs(0))]
  parts = [(graph, jax.tree.map(jax.typeof, params)) for graph, params in whole]
  pad = lambda w: jnp.pad(w.reshape(-1), (0, -w.size % args.workers))
  params = jax.device_put(jax.tree.map(pad, [w for _, w in whole]), P("data"))

  def worker(params: Any, residuals: Any, batch: texts.Tokens) -> Any:
    grad = jax.value_and_grad(loss_fn, (1, 2))
    loss, cotangents = grad(parts, params, residuals, batch)
    return lax.psum(loss, "data"), *cotangents

  cut = functools.partial(jax.shard_map, in_specs=P("data"))
  gradients = cut(worker, out_specs=(P(), P("data"), P("data")))
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))

  @jax.jit
  def step(params: Any, residuals: Any, state: Any, batch: texts.Tokens) -> Any:
    loss, grads, residuals = gradients(params, residuals, batch)
    # Here parameters are global arrays, and norms are those of whole ones.
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), residuals, state, loss

  residual = functools.partial(parallel.gather_residual, axis_name="data")
  zeros = cut(lambda params: jax.tree.map(residual, params), out_specs=P("data"))
  kept = params, jax.jit(zeros)(params), jax.jit(optimizer.init)(params)
  place = lambda batch: jax.device_put(batch, P("data"))
  program = step.lower(*kept, place(next(batches))).compile()
  exchange = runs.exchange_of(GRADS)
  look = lambda *given: runs.inspected(exchange, *whole_gradients(parts, *given))
  look = jax.jit(cut(look, out_specs=P()))
  whose = {"optimizer": exchange, "params": params, "workers": args.workers}
  with runs.Run(args, "fsdp", **whose) as run:
    kept = run.restore(kept, batches)
    for number in run.steps():
      batch = place(next(batches))
      if run.log.takes(number):
        run.log.keep(number, look(*kept[:2], batch))
      *kept, loss = program(*kept, batch)
      run.save(tuple(kept), loss)
  print(gradcomp.wire_report(program))


if __name__ == "__main__":
  main()
