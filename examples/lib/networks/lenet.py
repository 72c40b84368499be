"""LeNet, the small convolutional net of Wen et al., 2017."""

from collections.abc import Sequence

import jax
from flax import nnx

from examples.lib.networks.inputs import centered, halved


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
    x = centered(images)
    x = halved(nnx.relu(self.conv1(x)))
    x = halved(nnx.relu(self.conv2(x)))
    x = nnx.relu(self.dense1(x.reshape(x.shape[0], -1)))
    return self.head(nnx.relu(self.dense2(x)))
