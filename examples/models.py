"""Defines two image classifiers in flax nnx, for images of any size from 8 x 8 on.

Large leaves hold a multiple of 4096 elements where it costs nothing. A row of a 4-bit
payload holds as many, so few bytes are padding. Normalisation is over groups of
channels, because workers would have to exchange the running statistics of a batch norm.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx


class LeNet(nnx.Module):
  """Two convolutions and three dense layers, with 0.85 million parameters on digits."""

  def __init__(self, image_shape: Sequence[int], classes: int, *, rngs: nnx.Rngs):
    height, width, channels = image_shape
    self.conv1 = nnx.Conv(channels, 32, (5, 5), rngs=rngs)
    self.conv2 = nnx.Conv(32, 64, (5, 5), rngs=rngs)
    self.dense1 = nnx.Linear((height // 4) * (width // 4) * 64, 1024, rngs=rngs)
    self.dense2 = nnx.Linear(1024, 512, rngs=rngs)
    self.head = nnx.Linear(512, classes, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    x = centred(images)
    x = halved(nnx.relu(self.conv1(x)))
    x = halved(nnx.relu(self.conv2(x)))
    x = nnx.relu(self.dense1(x.reshape(x.shape[0], -1)))
    return self.head(nnx.relu(self.dense2(x)))


class Block(nnx.Module):
  """Two 3 x 3 convolutions beside a shortcut, normalised before each."""

  def __init__(self, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs):
    self.norm1 = nnx.GroupNorm(inputs, num_groups=8, rngs=rngs)
    self.conv1 = nnx.Conv(
      inputs, outputs, (3, 3), strides=stride, use_bias=False, rngs=rngs
    )
    self.norm2 = nnx.GroupNorm(outputs, num_groups=8, rngs=rngs)
    self.conv2 = nnx.Conv(outputs, outputs, (3, 3), use_bias=False, rngs=rngs)
    self.shortcut = nnx.Conv(
      inputs, outputs, (1, 1), strides=stride, use_bias=False, rngs=rngs
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    y = self.conv1(nnx.relu(self.norm1(x)))
    return self.shortcut(x) + self.conv2(nnx.relu(self.norm2(y)))


class ResNet(nnx.Module):
  """Three blocks of 64, 128 and 256 channels, with 1.2 million parameters."""

  def __init__(self, image_shape: Sequence[int], classes: int, *, rngs: nnx.Rngs):
    self.stem = nnx.Conv(image_shape[-1], 64, (3, 3), use_bias=False, rngs=rngs)
    self.block1 = Block(64, 64, 1, rngs=rngs)
    self.block2 = Block(64, 128, 2, rngs=rngs)
    self.block3 = Block(128, 256, 2, rngs=rngs)
    self.norm = nnx.GroupNorm(256, num_groups=8, rngs=rngs)
    self.head = nnx.Linear(256, classes, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    x = self.stem(centred(images))
    x = self.block3(self.block2(self.block1(x)))
    return self.head(nnx.relu(self.norm(x)).mean(axis=(1, 2)))


def halved(x: jax.Array) -> jax.Array:
  """Takes the largest of each 2 x 2 pixels, without an odd last row or column.

  XLA:CPU takes ten times as long for the gradient of ``nnx.max_pool``.
  """
  height, width = x.shape[1] // 2, x.shape[2] // 2
  cut = x[:, : 2 * height, : 2 * width]
  return cut.reshape(-1, height, 2, width, 2, x.shape[-1]).max(axis=(2, 4))


MODELS = {"lenet": LeNet, "resnet": ResNet}


def centred(images: jax.Array) -> jax.Array:
  """Maps bytes, 0 to 255, to float32 from -1 to 1."""
  return images.astype(jnp.float32) / 127.5 - 1.0
