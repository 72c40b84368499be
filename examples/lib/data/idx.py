"""Reads image sets that are four IDX files in a folder, as MNIST's are.

    python -m examples.image_classification --idx datasets/fashion-mnist

A file is two bytes of zero, the code of the elements' type, the number of axes, their
lengths as big-endian 32-bit integers, and the elements. It may be packed by gzip. The
words ``train``, or ``test`` or ``t10k``, and ``images`` or ``labels`` in the names of
the files say which is which. So sets that follow MNIST in its format (Fashion-MNIST,
KMNIST, a split of EMNIST) are read as they are. Nothing is prepared or kept: a set of
70,000 images is read within a second.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from examples.lib.data.images import ImageSet, Split

TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def load(folder: str | Path) -> ImageSet:
  """Reads a folder with images and labels to train and to test on.

  Args:
    folder: four IDX files, and perhaps others. Images have bytes as elements, and
      labels have integers. Gray images have an axis for each of number, height and
      width, and images in color have the channels as a fourth.

  Raises:
    FileNotFoundError: if one of the four files is not there.
    ValueError: if a file is no such IDX file, two files have the same part in the set,
      or images and labels do not fit each other.
  """
  folder = Path(folder)
  files = sorted(x for x in folder.iterdir() if x.is_file()) if folder.is_dir() else []
  train, test = (
    Split(
      _images(_file(folder, files, words, "images")),
      _labels(_file(folder, files, words, "labels")),
    )
    for words in (("train",), ("t10k", "test"))
  )
  for name, split in {"train": train, "test": test}.items():
    if len(split.images) != len(split.labels):
      raise ValueError(
        f"the {name} files of {folder} must have a label for each image, got "
        f"{len(split.images)} images and {len(split.labels)} labels."
      )
  if train.images.shape[1:] != test.images.shape[1:]:
    raise ValueError(
      f"images to train and to test on must have one shape, got "
      f"{train.images.shape[1:]} and {test.images.shape[1:]} in {folder}."
    )
  print(f"images: {folder}")
  return ImageSet(train, test, 1 + int(max(train.labels.max(), test.labels.max())))


def _file(folder: Path, files: list[Path], words: tuple[str, ...], kind: str) -> Path:
  """Finds the one file that has one of the words and ``kind`` in its name."""
  found = [x for x in files if kind in x.name and any(w in x.name for w in words)]
  sought = f"{' or '.join(words)} and {kind}"
  if not found:
    raise FileNotFoundError(
      f"{folder} must hold an IDX file whose name has {sought}, got "
      f"{', '.join(x.name for x in files) or 'no files'}. `make data` fetches sets."
    )
  if len(found) > 1:
    raise ValueError(
      f"{folder} must hold one IDX file whose name has {sought}, got "
      f"{', '.join(x.name for x in found)}."
    )
  return found[0]


def _images(path: Path) -> np.ndarray:
  images = read(path)
  if images.dtype != np.uint8 or images.ndim not in (3, 4) or not images.size:
    raise ValueError(
      f"images must be bytes with three or four axes and not empty, got {images.dtype} "
      f"of {images.shape} in {path}."
    )
  return images if images.ndim == 4 else images[..., None]


def _labels(path: Path) -> np.ndarray:
  labels = read(path)
  if labels.dtype.kind not in "ui" or labels.ndim != 1 or np.any(labels < 0):
    raise ValueError(
      "labels must be integers from 0 on with one axis, got "
      f"{labels.dtype} of {labels.shape} in {path}."
    )
  return labels.astype(np.int32)


def read(path: str | Path) -> np.ndarray:
  """Reads one IDX file, plain or packed by gzip.

  Raises:
    ValueError: if the file is none, or is longer or shorter than its header says.
  """
  content = Path(path).read_bytes()
  if content.startswith(b"\x1f\x8b"):
    try:
      content = gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
      raise ValueError(f"{path} must be whole, but gzip says: {error}.") from error
  if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in TYPES:
    raise ValueError(
      f"{path} must be an IDX file, which begins with two zeros and a type, got "
      f"{content[:4].hex(' ') or 'nothing'}."
    )
  dtype, start = np.dtype(TYPES[content[2]]), 4 + 4 * content[3]
  if len(content) < start:
    raise ValueError(f"{path} must have {start} bytes of header, got {len(content)}.")
  shape = np.frombuffer(content, ">u4", content[3], offset=4).tolist()
  expected = start + dtype.itemsize * math.prod(shape)
  if len(content) != expected:
    raise ValueError(
      f"{path} must have {expected} bytes for {dtype} of {tuple(shape)}, got "
      f"{len(content)}."
    )
  elements = np.frombuffer(content, dtype, offset=start).reshape(shape)
  return elements.astype(dtype.newbyteorder("="))
