"""The net of dense layers of Dettmers, 2016, section 3.4."""

from collections.abc import Sequence

import jax
from flax import nnx

from examples.lib.networks.inputs import centered


class MLP(nnx.Module):
  """Two hidden layers with dropout, and 1.9 million parameters on images of MNIST.

  The paper drops 0.2 of the pixels and 0.3 of the units. ``dropout`` is the latter; of
  the pixels two thirds of it are dropped.
  """

  def __init__(
    self,
    image_shape: Sequence[int],
    classes: int,
    *,
    hidden: int = 1024,
    dropout: float = 0.3,
    rngs: nnx.Rngs,
  ):
    height, width, channels = image_shape
    self.dense1 = nnx.Linear(height * width * channels, hidden, rngs=rngs)
    self.dense2 = nnx.Linear(hidden, hidden, rngs=rngs)
    self.head = nnx.Linear(hidden, classes, rngs=rngs)
    self.drop_pixels = nnx.Dropout(dropout * 2 / 3)
    self.drop = nnx.Dropout(dropout)

  def __call__(self, images: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
    x = centered(images)
    x = self.drop_pixels(x.reshape(x.shape[0], -1), rngs=rngs)
    x = self.drop(nnx.relu(self.dense1(x)), rngs=rngs)
    x = self.drop(nnx.relu(self.dense2(x)), rngs=rngs)
    return self.head(x)
