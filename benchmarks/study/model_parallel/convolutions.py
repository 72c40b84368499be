"""Nets whose convolutions every worker has, and whose other layers are cut.

They are those of Dettmers (2016), section 3.4, made smaller for images of 8 x 8 or so,
as the docstrings say. Convolutions are products of patches: gradients of a convolution
by vmap would be grouped convolutions, which are slow on a CPU.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.study.model_parallel.ways import WORKERS
from examples.lib import cut_layers

Gather = Callable[[jax.Array, int], jax.Array]


class Net(NamedTuple):
  """A net in two parts."""

  init_front: Callable[[jax.Array], Any]  # draws the convolutions from a key
  # Computes what stands before the layers that are cut, from these and from images
  # ``[b, side, side, 1]``.
  features: Callable[[Any, jax.Array], jax.Array]
  # Draws the layers that are cut, whole, from a key and the number of classes. Their
  # last axis is that of the outputs.
  init_layers: Callable[[jax.Array, int], Any]
  # Computes the outputs of the last of them, ``apply(layers, x, gather, drop)``.
  # ``gather`` takes the outputs of a layer and its number, and ``drop`` the outputs of
  # one that dropout follows.
  apply: Callable[[Any, jax.Array, Gather, Callable[..., jax.Array]], jax.Array]
  last: int  # the number of the last layer
  passes: int  # the sub-batches of a batch
  # How often a batch updates the layers that are cut, after as many sub-batches each.
  updates: int = 1


def patches(x: jax.Array, size: int) -> jax.Array:
  """Returns around each place its square of inputs, ``[b, h, w, size * size * c]``."""
  reach = size // 2
  padded = jnp.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)))
  height, width = x.shape[1:3]
  shifted = [
    padded[:, i : i + height, j : j + width] for i in range(size) for j in range(size)
  ]
  return jnp.concatenate(shifted, axis=-1)


def drawn(key: jax.Array, *shapes: tuple[int, ...]) -> list[dict[str, jax.Array]]:
  """Draws layers: weights ``[..., inputs, outputs]`` of variance 2 / inputs; biases."""
  keys = jax.random.split(key, len(shapes))
  return [
    {
      "w": jax.random.normal(own, shape) * (2 / shape[-2]) ** 0.5,
      "b": jnp.zeros((*shape[:-2], shape[-1])),
    }
    for own, shape in zip(keys, shapes, strict=True)
  ]


def convolved(layer: dict[str, jax.Array], x: jax.Array, size: int) -> jax.Array:
  """Convolves with the same weights in all places, and cuts off what is negative."""
  return jax.nn.relu(patches(x, size) @ layer["w"] + layer["b"])


def local(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  """Does the same with weights of each place, ``[h, w, 9 c, outputs]``."""
  y = jnp.einsum("bhwi,hwio->bhwo", patches(x, 3), layer["w"])
  return jax.nn.relu(y + layer["b"])


def pooled(x: jax.Array, size: int, stride: int) -> jax.Array:
  """Returns the largest numbers of windows, which may reach over the edge."""
  window, strides = (1, size, size, 1), (1, stride, stride, 1)
  return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "SAME")


def normalized(x: jax.Array) -> jax.Array:
  """Divides by the activity of nine channels (Krizhevsky's response normalization)."""
  squares = jax.lax.reduce_window(
    jnp.square(x), 0.0, jax.lax.add, (1, 1, 1, 9), (1, 1, 1, 1), "SAME"
  )
  return x * (1 + 1e-3 / 9 * squares) ** -0.75


def locally_connected(filters: int, side: int = 8) -> Net:
  """Returns the net with two locally connected layers.

  It has a convolution of 5 x 5, a pool of 3 x 3 with the stride 2, a normalization, a
  convolution of 3 x 3, a pool, a normalization, two locally connected layers of 3 x 3,
  the second with half as many filters, and a softmax. Images have ``side * side``
  pixels. The second pool has the stride 1: the local layers have 4 x 4 places for 8 x 8
  pixels and 7 x 7 for 14 x 14, where the paper's have 6 x 6 for 24 x 24.
  """
  places = -(-side // 2)

  def init_front(key: jax.Array) -> Any:
    return tuple(drawn(key, (25, filters), (9 * filters, filters)))

  def features(front: Any, images: jax.Array) -> jax.Array:
    x = normalized(pooled(convolved(front[0], images, 5), 3, 2))
    return normalized(pooled(convolved(front[1], x, 3), 3, 1))

  def init_layers(key: jax.Array, classes: int) -> Any:
    each, outputs = (places, places, 9 * filters), cut_layers.padded(classes, WORKERS)
    last = places**2 * (filters // 2), outputs
    return drawn(key, (*each, filters), (*each, filters // 2), last)

  def apply(layers: Any, x: jax.Array, gather: Gather, drop: Any) -> jax.Array:
    del drop
    x = gather(local(layers[0], x), 0)
    x = gather(local(layers[1], x), 1)
    return gather(x.reshape(x.shape[0], -1) @ layers[2]["w"] + layers[2]["b"], 2)

  return Net(init_front, features, init_layers, apply, last=2, passes=1)


def three_dense(filters: int, hidden: int, side: int = 8, updates: int = 1) -> Net:
  """Returns a net like AlexNet: convolutions, and three dense layers that are cut.

  Dropout of a half follows the first two. A batch is taken in four sub-batches, and
  updates the dense layers once, or after each (section 2.4). There are two convolutions
  of 3 x 3, each with a pool of 3 x 3 with the stride 2 and a normalization, where
  AlexNet has five convolutions and three pools.
  """
  places = -(-side // 4)  # as two pools that round up leave

  def init_front(key: jax.Array) -> Any:
    return tuple(drawn(key, (9, filters), (9 * filters, 2 * filters)))

  def features(front: Any, images: jax.Array) -> jax.Array:
    x = images
    for layer in front:
      x = normalized(pooled(convolved(layer, x, 3), 3, 2))
    return x.reshape(x.shape[0], -1)

  def init_layers(key: jax.Array, classes: int) -> Any:
    outputs = cut_layers.padded(classes, WORKERS)
    sizes = places**2 * 2 * filters, hidden, hidden, outputs
    return drawn(key, *itertools.pairwise(sizes))

  def apply(layers: Any, x: jax.Array, gather: Gather, drop: Any) -> jax.Array:
    for number, layer in enumerate(layers[:2]):
      x = gather(drop(jax.nn.relu(x @ layer["w"] + layer["b"]), number), number)
    return gather(x @ layers[2]["w"] + layers[2]["b"], 2)

  return Net(init_front, features, init_layers, apply, 2, passes=4, updates=updates)
