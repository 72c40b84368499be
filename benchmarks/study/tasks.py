"""Makes the tasks of a study: a network, and what it learns from.

The networks and the data are the examples'. A task is on devices or on one device that
emulates all workers, and draws the same batches in both.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.study.mirrors import SOURCES
from examples import image_classification, language_model
from examples.lib import FOLDER, texts
from examples.lib import images as data
from examples.lib.training import Batch

LENGTH = 32  # of a sequence of characters or words
# Symbols of the text to test on, and logits, so that tests take little time.
_TESTED, _LOGITS = 2**16, 2**28
TEXTS = tuple(language_model.MODELS)
# LeNet with dense layers that are as many times as wide, as Grubic's figure 16 has it.
WIDENED = {f"lenet-x{times}": times * 1024 for times in (1, 2, 4, 8)}
MODELS = image_classification.MODELS | language_model.MODELS
KNOWN = 1000  # inputs by whose statistics a batch norm normalizes in tests


class Source(NamedTuple):
  """Holds what a network learns from."""

  model: Any  # makes the network, as ``training.Task`` wants it
  arrays: Batch  # inputs and labels, or a text twice. Batches are entries of them.
  test: Batch  # inputs and labels
  epoch: int  # the samples of an epoch
  # Yields batches of indices into ``arrays`` without end, from a batch size and a seed.
  draw: Callable[..., Iterator[Batch]]
  recurrent: bool  # whether it reads sequences

  def batches(self, batch_size: int, **options: int) -> Iterator[Batch]:
    """Yields batches without end, as the examples do; ``part`` of ``parts``, too."""
    for indices in self.draw(batch_size, **options):
      yield tuple(x[i] for x, i in zip(self.arrays, indices, strict=True))


@functools.cache
def source(network: str, dataset: str, dropout: float | None = None) -> Source:
  if network in TEXTS:
    return _language(network, dataset, dropout)
  train, test, classes = images(dataset)
  order = np.arange(len(train.labels), dtype=np.int32)
  kind = MODELS[network.partition("-")[0]]
  model = data.network(kind, train.images.shape[1:], classes, dropout)
  if network in WIDENED:
    model = functools.partial(model, width=WIDENED[network])
  draw = functools.partial(data.batches, data.Split(order, order))
  return Source(model, tuple(train), tuple(test), len(order), draw, recurrent=False)


def images(dataset: str, folder: Path = FOLDER) -> data.ImageSet:
  """Loads images by their name, and reduces those of a name like "mnist/14"."""
  name, _, pixels = dataset.partition("/")
  builder = data.prepare(name.replace("-", "_"), folder)
  if name in SOURCES and not builder.info.disable_shuffling:
    raise ValueError(
      f"{builder.data_path} must have the images in the order of their source, as the "
      "records are of, got them shuffled. Remove it: `make data` prepares it anew."
    )
  train, test, classes = data.read(builder)
  if pixels:
    less = lambda x: data.Split(reduced(x.images, int(pixels)), x.labels)
    train, test = less(train), less(test)
  return data.ImageSet(train, test, classes)


def _language(network: str, corpus: str, dropout: float | None) -> Source:
  found = texts.load(corpus)
  order = np.arange(len(found.train), dtype=np.int32)
  tested = min(_TESTED, _LOGITS // found.symbols)
  model = texts.network(MODELS[network], found.symbols, dropout)
  arrays = found.train, found.train.astype(np.int32)
  test = tuple(texts.in_order(found.test[:tested], LENGTH))
  draw = functools.partial(texts.batches, order, length=LENGTH)
  return Source(model, arrays, test, len(order) // LENGTH, draw, recurrent=True)


def reduced(images: np.ndarray, pixels: int) -> np.ndarray:
  """Averages squares of pixels, so that images are ``pixels`` wide and high.

  >>> reduced(np.uint8([[[[1], [2]], [[3], [5]]]]), 1)
  array([[[[3]]]], dtype=uint8)
  """
  count, height, width, channels = images.shape
  if height % pixels or width % pixels:
    raise ValueError(
      f"`pixels` must divide the width and the height of the images, {width} and "
      f"{height}, got {pixels}."
    )
  shape = (count, pixels, height // pixels, pixels, width // pixels, channels)
  return np.rint(images.reshape(shape).mean(axis=(2, 4))).astype(np.uint8)
