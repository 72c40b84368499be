"""Loads the Brown corpus, a million words of American English that appeared in 1961.

`make data` prepares it. Of its 500 texts every tenth is for testing, from the first on,
so that all fifteen kinds of text are in both parts.
"""

import collections
from pathlib import Path

import numpy as np

from examples.lib.data import FOLDER
from examples.lib.data.text import Text, as_characters

UNKNOWN, END = "<unk>", "<eos>"


def characters(data_dir: Path = FOLDER) -> Text:
  """Reads the corpus as bytes, a sentence a line and a space between words."""
  return Text(*(as_characters(x.encode("latin-1")) for x in _texts(data_dir)))


def words(data_dir: Path = FOLDER, symbols: int = 10_000) -> Text:
  """Reads the corpus as numbers of lower-case words: 0 of rare ones, 1 of ends."""
  train, test = (x.replace("\n", f" {END} ").lower().split() for x in _texts(data_dir))
  counts = collections.Counter(train)
  del counts[END]
  known = [UNKNOWN, END, *(word for word, _ in counts.most_common(symbols - 2))]
  numbers = {word: i for i, word in enumerate(known)}
  numbered = lambda part: np.array([numbers.get(x, 0) for x in part], np.int32)
  return Text(numbered(train), numbered(test), symbols)


def _texts(data_dir: Path) -> list[str]:
  """Returns the texts for training as one, and those for testing."""
  import tensorflow_datasets as tfds  # few runs need it, and it takes seconds

  try:
    options = {"data_dir": data_dir, "download": False}
    sources = tfds.data_source("brown", split=["train", "test"], **options)
  except tfds.core.DatasetNotFoundError as error:
    said = "must hold the Brown corpus, got none. `make data` prepares it in datasets/."
    raise FileNotFoundError(f"{data_dir} {said}") from error
  return ["".join(x["text"].decode() for x in source) for source in sources]
