"""Makes gradients with the shapes of real models, without the models."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def resnet50(leaves: int | None = None) -> list[jax.Array]:
  """Draws random gradients of ResNet-50's 161 leaves, or of its first ``leaves``."""
  shapes = resnet50_shapes()[:leaves]
  return [jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes)]


def resnet50_shapes() -> list[tuple[int, ...]]:
  """Returns the shapes of ResNet-50's 161 leaves, which have 25,557,032 elements."""
  shapes: list[tuple[int, ...]] = [(7, 7, 3, 64), (64,), (64,)]
  channels = 64
  for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
    for block in range(blocks):
      out = 4 * width
      shapes += [(1, 1, channels, width), (width,), (width,)]
      shapes += [(3, 3, width, width), (width,), (width,)]
      shapes += [(1, 1, width, out), (out,), (out,)]
      if block == 0:
        shapes += [(1, 1, channels, out), (out,), (out,)]
      channels = out
  return [*shapes, (channels, 1000), (1000,)]


def transformer(layers: int = 12, width: int = 512) -> list[jax.Array]:
  """Makes leaves like those of a decoder with ``layers`` layers, which no scan joins.

  A layer has query, key, value and output, two layers of a network four times as wide,
  and two normalisations; twelve layers have 196 leaves.
  """
  square, line = (width, width), (width,)
  layer = [square, line] * 4 + [(width, 4 * width), (4 * width,), (4 * width, width)]
  shapes = [(8192, width), *[*layer, *[line] * 5] * layers, line, line, (width, 8192)]
  return [jnp.full(shape, 0.01) for shape in shapes]


def squares(leaves: list[jax.Array], batch: jax.Array) -> jax.Array:
  """Returns a loss that depends on every leaf, and takes no time to compile."""
  return sum(jnp.mean(leaf**2) for leaf in leaves) * jnp.mean(batch)


def deep_mlp(layers: int, width: int = 128) -> tuple[Any, Callable[..., Any], Any]:
  """Makes parameters, loss and batch of a network with two leaves a layer."""
  params = [
    {"kernel": jnp.full((width, width), 0.01), "bias": jnp.zeros(width)}
    for _ in range(layers)
  ]

  def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    x = batch
    for layer in params:
      x = x + jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(x**2)

  return params, loss_fn, jnp.ones((8, width))
