"""Trains a transformer of flax nnx with sharded parameters (FSDP).

    python -m examples.fsdp_nnx --steps 200

It does what fsdp_linen.py does, by the same loop, with modules that are objects.
``nnx.split`` takes their parameters out, and ``nnx.merge`` puts whole ones into a layer
when it is called. Here each worker has an Nth of a parameter's elements, in any shape.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples import fsdp_linen
from examples.lib import runs, texts

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
  return fsdp_linen.gather(w, residual, like.shape)


def share_of_loss(call: Callable[..., jax.Array], depth: int, batch: Any) -> jax.Array:
  """Computes a worker's share of the mean loss, by ``call(layer, x)``."""
  x = call(0, batch.inputs) + call(1, jnp.arange(batch.inputs.shape[1]))
  for layer in range(2, depth):
    x = call(layer, x)
  return fsdp_linen.share_of_loss(x, batch)


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
  args = runs.set_mesh(make_parser(), argv, fsdp_linen.BATCH, workers="data")
  whole = [nnx.split(x) for x in layers(128, fsdp_linen.LENGTH, 2, rngs=nnx.Rngs(0))]
  parts = [(graph, jax.tree.map(jax.typeof, params)) for graph, params in whole]
  pad = lambda w: jnp.pad(w.reshape(-1), (0, -w.size % args.workers))
  params = jax.device_put(jax.tree.map(pad, [w for _, w in whole]), jax.P("data"))
  of_parts = (functools.partial(fn, parts) for fn in (loss_fn, whole_gradients))
  fsdp_linen.train(args, params, *of_parts)


if __name__ == "__main__":
  main()
