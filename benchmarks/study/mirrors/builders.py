"""Builds the sets of tensorflow-datasets from files that were fetched.

They have its names, versions and features, so that `tfds.builder` reads them as if it
had prepared them. It would shuffle them; here they are in the order of their source, in
which the study trains.
"""

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import tensorflow_datasets as tfds

Examples = Iterator[tuple[int, dict[str, Any]]]


class _Images:
  """Builds a set from the four IDX files of a folder."""

  MANUAL_DOWNLOAD_INSTRUCTIONS = "`make data` fetches the files."

  def _info(self) -> tfds.core.DatasetInfo:
    info = super()._info()
    info.as_proto.disable_shuffling = True
    return info

  def _split_generators(self, dl_manager: Any) -> dict[str, Examples]:
    folder = dl_manager.manual_dir
    return {
      "train": self._generate_examples(folder, "train"),
      "test": self._generate_examples(folder, "t10k"),
    }

  def _generate_examples(self, folder: Path, part: str) -> Examples:
    images, labels = (
      read_idx(next(folder.glob(f"{part}-{kind}-idx*")))
      for kind in ("images", "labels")
    )
    for i, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
      png = io.BytesIO()  # TensorFlow would encode an array
      PIL.Image.fromarray(image).save(png, "png")
      yield i, {"image": png.getvalue(), "label": label}


class FashionMNIST(
  _Images, tfds.image_classification.FashionMNIST, skip_registration=True
):
  """70,000 images of clothes."""


class MNIST(_Images, tfds.image_classification.MNIST, skip_registration=True):
  """70,000 handwritten digits."""


class Brown(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """500 English texts of 1961, a sentence a line, without the tags of words.

  Every tenth is for testing, from the first on.
  """

  VERSION = tfds.core.Version("1.0.0")
  MANUAL_DOWNLOAD_INSTRUCTIONS = "`make data` fetches the texts."

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=self.__doc__,
      features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Examples]:
    paths = sorted(dl_manager.manual_dir.iterdir())
    return {
      "train": self._generate_examples([x for i, x in enumerate(paths) if i % 10]),
      "test": self._generate_examples(paths[::10]),
    }

  def _generate_examples(self, paths: list[Path]) -> Examples:
    for i, path in enumerate(paths):
      yield i, {"text": sentences(path.read_bytes().decode("latin-1"))}


def read_idx(path: Path) -> np.ndarray:
  """Reads bytes of an IDX file, plain or packed by gzip.

  It begins with two zeros, the type's code and the number of axes, and the lengths of
  these as big-endian 32-bit integers.
  """
  content = path.read_bytes()
  if content.startswith(b"\x1f\x8b"):
    content = gzip.decompress(content)
  shape = np.frombuffer(content, ">u4", content[3], offset=4)
  return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def sentences(text: str) -> str:
  r"""Takes off the slash and the tag behind each word, and empty lines.

  Example:
    >>> sentences("\n\tIt/pps is/bez 1/2/cd ./. \n")
    'It is 1/2 .\n'
  """
  lines = ([x.rpartition("/")[0] for x in line.split()] for line in text.splitlines())
  return "".join(f"{' '.join(words)}\n" for words in lines if words)
