"""A small net in the manner of AlexNet (Krizhevsky et al., 2012).

Its convolutions have batch norm, as AlexNet has in Wen et al., 2017. While it trains, a
worker normalizes by its own images, and no running statistics are kept or exchanged.
Whoever evaluates takes the statistics of some images to train on: see ``Task``.
"""

from collections.abc import Sequence

import jax
from flax import nnx

from examples.lib.networks.inputs import centered


class AlexNet(nnx.Module):
  """Five convolutions with batch norm, and three dense layers with dropout.

  It has 3.0 million parameters on images of MNIST, seven eighths of them in the dense
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
    convs, norms = [], []
    for outputs, size in ((32, 5), (64, 5), (128, 3), (128, 3), (96, 3)):
      conv = nnx.Conv(inputs, outputs, (size, size), use_bias=False, rngs=rngs)
      convs.append(conv)
      # Of old statistics nothing stays: what is kept is those of the last batch.
      norms.append(nnx.BatchNorm(outputs, momentum=0.0, rngs=rngs))
      inputs = outputs
    self.convs, self.norms = nnx.List(convs), nnx.List(norms)
    for _ in range(3):  # poolings, each of which rounds up
      height, width = -(-height // 2), -(-width // 2)
    self.dense1 = nnx.Linear(height * width * inputs, 1024, rngs=rngs)
    self.dense2 = nnx.Linear(1024, 1024, rngs=rngs)
    self.head = nnx.Linear(1024, classes, rngs=rngs)
    self.drop = nnx.Dropout(dropout)

  def __call__(self, images: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
    x = centered(images)
    for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
      x = nnx.relu(norm(conv(x)))
      if i in (0, 1, 4):
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
    x = self.drop(nnx.relu(self.dense1(x.reshape(x.shape[0], -1))), rngs=rngs)
    x = self.drop(nnx.relu(self.dense2(x)), rngs=rngs)
    return self.head(x)
