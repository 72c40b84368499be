"""LeNet, the small convolutional net of Wen et al., 2017."""

from collections.abc import Sequence

import jax
from flax import nnx

from examples.lib.networks.inputs import centered, halved


class LeNet(nnx.Module):
  """Two convolutions and three dense layers, with 0.85 million parameters on digits.

  ``width`` is that of the first dense layer; the second has half of it. ``channels``
  are those of the first convolution; the second has twice as many.
  """

  def __init__(
    self,
    image_shape: Sequence[int],
    classes: int,
    *,
    width: int = 1024,
    channels: int = 32,
    rngs: nnx.Rngs,
  ):
    rows, columns, inputs = image_shape
    self.conv1 = nnx.Conv(inputs, channels, (5, 5), rngs=rngs)
    self.conv2 = nnx.Conv(channels, 2 * channels, (5, 5), rngs=rngs)
    pixels = (rows // 4) * (columns // 4)
    self.dense1 = nnx.Linear(pixels * 2 * channels, width, rngs=rngs)
    self.dense2 = nnx.Linear(width, width // 2, rngs=rngs)
    self.head = nnx.Linear(width // 2, classes, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    x = centered(images)
    x = halved(nnx.relu(self.conv1(x)))
    x = halved(nnx.relu(self.conv2(x)))
    x = nnx.relu(self.dense1(x.reshape(x.shape[0], -1)))
    return self.head(nnx.relu(self.dense2(x)))
