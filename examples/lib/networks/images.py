"""Networks for images, of flax nnx."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import Rngs

Shape = Sequence[int]


def centered(images: jax.Array) -> jax.Array:
  """Maps bytes, 0 to 255, to float32 from -1 to 1."""
  return images.astype(jnp.float32) / 127.5 - 1.0


def halved(x: jax.Array) -> jax.Array:
  """Takes the largest of each 2 x 2 pixels, without an odd last row or column."""
  # XLA:CPU takes ten times as long for the gradient of nnx.max_pool.
  height, width = x.shape[1] // 2, x.shape[2] // 2
  cut = x[:, : 2 * height, : 2 * width]
  return cut.reshape(-1, height, 2, width, 2, x.shape[-1]).max(axis=(2, 4))


class Cropped(nnx.Module):
  """A network that sees three quarters of the width and the height of images.

  While it trains, these parts lie anywhere, and half of the images are mirrored. In
  tests they are the middle of each image. Wen et al., 2017, section 4.1, have this for
  CIFAR-10, with 24 of 32 pixels; they also change the brightness and the contrast.
  """

  def __init__(
    self, network: Any, shape: Shape, *given: Any, drops: bool, **options: Any
  ):
    height, width, channels = shape
    self.rows, self.columns = 3 * height // 4, 3 * width // 4
    self.network = network((self.rows, self.columns, channels), *given, **options)
    self.drops = drops
    self.deterministic = False

  def __call__(self, images: jax.Array, *, rngs: Rngs | None = None) -> jax.Array:
    count, *sides, channels = images.shape
    spare = jnp.array(sides) - jnp.array([self.rows, self.columns])
    starts, mirrored = jnp.tile(spare // 2, (count, 1)), jnp.zeros(count, bool)
    if not self.deterministic:
      starts = jax.random.randint(rngs.dropout(), (count, 2), 0, spare + 1)
      mirrored = jax.random.bernoulli(rngs.dropout(), shape=(count,))
    sizes = (self.rows, self.columns, channels)
    cut = lambda image, start: jax.lax.dynamic_slice(image, (*start, 0), sizes)
    parts = jax.vmap(cut)(images, starts)
    parts = jnp.where(mirrored[:, None, None, None], parts[:, :, ::-1], parts)
    return self.network(parts, **({"rngs": rngs} if self.drops else {}))


class LeNet(nnx.Module):
  """That of Wen et al., 2017, with 0.85 million parameters on digits."""

  def __init__(
    self,
    shape: Shape,
    classes: int,
    *,
    width: int = 1024,
    channels: int = 32,
    rngs: Rngs,
  ):
    rows, columns, inputs = shape
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


class Block(nnx.Module):
  """Two 3 x 3 convolutions beside a shortcut, normalized before each."""

  def __init__(self, inputs: int, outputs: int, stride: int, *, rngs: Rngs):
    self.norm1 = nnx.GroupNorm(inputs, num_groups=8, rngs=rngs)
    options = {"strides": stride, "use_bias": False, "rngs": rngs}
    self.conv1 = nnx.Conv(inputs, outputs, (3, 3), **options)
    self.norm2 = nnx.GroupNorm(outputs, num_groups=8, rngs=rngs)
    self.conv2 = nnx.Conv(outputs, outputs, (3, 3), use_bias=False, rngs=rngs)
    self.shortcut = nnx.Conv(inputs, outputs, (1, 1), **options)

  def __call__(self, x: jax.Array) -> jax.Array:
    y = self.conv1(nnx.relu(self.norm1(x)))
    return self.shortcut(x) + self.conv2(nnx.relu(self.norm2(y)))


class ResNet(nnx.Module):
  """Three blocks, normalized over groups of channels, with 1.2 million parameters."""

  def __init__(self, shape: Shape, classes: int, *, rngs: Rngs):
    self.stem = nnx.Conv(shape[-1], 64, (3, 3), use_bias=False, rngs=rngs)
    self.block1 = Block(64, 64, 1, rngs=rngs)
    self.block2 = Block(64, 128, 2, rngs=rngs)
    self.block3 = Block(128, 256, 2, rngs=rngs)
    self.norm = nnx.GroupNorm(256, num_groups=8, rngs=rngs)
    self.head = nnx.Linear(256, classes, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    x = self.stem(centered(images))
    x = self.block3(self.block2(self.block1(x)))
    return self.head(nnx.relu(self.norm(x)).mean(axis=(1, 2)))


class MLP(nnx.Module):
  """Dettmers' (2016, section 3.4), who drops 0.2 of the pixels and 0.3 of the units."""

  def __init__(
    self,
    shape: Shape,
    classes: int,
    *,
    hidden: int = 1024,
    dropout: float = 0.3,
    rngs: Rngs,
  ):
    height, width, channels = shape
    self.dense1 = nnx.Linear(height * width * channels, hidden, rngs=rngs)
    self.dense2 = nnx.Linear(hidden, hidden, rngs=rngs)
    self.head = nnx.Linear(hidden, classes, rngs=rngs)
    self.drop_pixels = nnx.Dropout(dropout * 2 / 3)
    self.drop = nnx.Dropout(dropout)

  def __call__(self, images: jax.Array, *, rngs: Rngs | None = None) -> jax.Array:
    x = centered(images)
    x = self.drop_pixels(x.reshape(x.shape[0], -1), rngs=rngs)
    x = self.drop(nnx.relu(self.dense1(x)), rngs=rngs)
    x = self.drop(nnx.relu(self.dense2(x)), rngs=rngs)
    return self.head(x)


# A relu halves the mean square of what passes, which this makes up for. Eight layers
# that are not normalized would else leave 1/256 of it.
KEEPING = nnx.initializers.he_normal()


class VGG(nnx.Module):
  """Simonyan and Zisserman's (2015), small: six convolutions, three dense layers."""

  def __init__(self, shape: Shape, classes: int, *, dropout: float = 0.5, rngs: Rngs):
    height, width, inputs = shape
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

  def __call__(self, images: jax.Array, *, rngs: Rngs | None = None) -> jax.Array:
    x = centered(images)
    for i, conv in enumerate(self.convs):
      x = nnx.relu(conv(x))
      if i % 2:
        x = halved(x)
    x = self.drop(nnx.relu(self.dense1(x.reshape(x.shape[0], -1))), rngs=rngs)
    x = self.drop(nnx.relu(self.dense2(x)), rngs=rngs)
    return self.head(x)


class AlexNet(nnx.Module):
  """Krizhevsky's (2012), small, with batch norm over a worker's own images."""

  def __init__(self, shape: Shape, classes: int, *, dropout: float = 0.5, rngs: Rngs):
    height, width, inputs = shape
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

  def __call__(self, images: jax.Array, *, rngs: Rngs | None = None) -> jax.Array:
    x = centered(images)
    for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
      x = nnx.relu(norm(conv(x)))
      if i in (0, 1, 4):
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
    x = self.drop(nnx.relu(self.dense1(x.reshape(x.shape[0], -1))), rngs=rngs)
    x = self.drop(nnx.relu(self.dense2(x)), rngs=rngs)
    return self.head(x)
