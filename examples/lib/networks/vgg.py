"""A small net in the manner of VGG (Simonyan and Zisserman, 2015)."""

from collections.abc import Sequence

import jax
from flax import nnx

from examples.lib.networks.inputs import centered, halved

# A relu halves the mean square of what passes, which this makes up for. Eight layers
# that are not normalized would else leave 1/256 of it.
KEEPING = nnx.initializers.he_normal()


class VGG(nnx.Module):
  """Three pairs of 3 x 3 convolutions, and three dense layers with dropout.

  It has 1.1 million parameters on images of MNIST, three quarters of them in the dense
  layers.
  """

  def __init__(
    self,
    image_shape: Sequence[int],
    classes: int,
    *,
    dropout: float = 0.5,
    rngs: nnx.Rngs,
  ):
    height, width, inputs = image_shape
    convs = []
    for outputs in (32, 64, 128):
      for _ in range(2):
        convs.append(nnx.Conv(inputs, outputs, (3, 3), kernel_init=KEEPING, rngs=rngs))
        inputs = outputs
    self.convs = nnx.List(convs)
    flat = (height // 8) * (width // 8) * inputs
    self.dense1 = nnx.Linear(flat, 512, kernel_init=KEEPING, rngs=rngs)
    self.dense2 = nnx.Linear(512, 512, kernel_init=KEEPING, rngs=rngs)
    self.head = nnx.Linear(512, classes, rngs=rngs)
    self.drop = nnx.Dropout(dropout)

  def __call__(self, images: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
    x = centered(images)
    for i, conv in enumerate(self.convs):
      x = nnx.relu(conv(x))
      if i % 2:
        x = halved(x)
    x = self.drop(nnx.relu(self.dense1(x.reshape(x.shape[0], -1))), rngs=rngs)
    x = self.drop(nnx.relu(self.dense2(x)), rngs=rngs)
    return self.head(x)
