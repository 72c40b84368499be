"""A small residual net.

Normalization is over groups of channels, so that images do not depend on each other and
no statistics have to be kept.
"""

from collections.abc import Sequence

import jax
from flax import nnx

from examples.lib.networks.inputs import centered


class Block(nnx.Module):
  """Two 3 x 3 convolutions beside a shortcut, normalized before each."""

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
    x = self.stem(centered(images))
    x = self.block3(self.block2(self.block1(x)))
    return self.head(nnx.relu(self.norm(x)).mean(axis=(1, 2)))
