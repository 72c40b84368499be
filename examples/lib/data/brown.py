"""Loads the Brown corpus, a million words of American English that appeared in 1961.

`make data` fetches its 500 texts. Of these every tenth is for testing, from the first
on, so that all fifteen kinds of text are in both parts. Tags of words are left out.
"""

import collections
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from examples.lib.data import download
from examples.lib.data.text import Text, as_characters

FOLDER = download.FOLDER / "brown"
UNKNOWN, END = "<unk>", "<eos>"


def characters(folder: Path = FOLDER) -> Text:
  """Reads the corpus as bytes, a sentence a line and a space between words."""
  train, test = (
    "".join(f"{' '.join(sentence)}\n" for text in part for sentence in text)
    for part in _split(folder)
  )
  return Text(*(as_characters(x.encode("latin-1")) for x in (train, test)))


def words(folder: Path = FOLDER, symbols: int = 10_000) -> Text:
  """Reads the corpus as numbers of lower-case words.

  Args:
    folder: where the texts are.
    symbols: how many numbers there are. Words that are rarer in the texts for training
      than the others have the number 0. Sentences end with the number 1.
  """
  train, test = (
    [word for text in part for sentence in text for word in _ended(sentence)]
    for part in _split(folder)
  )
  counts = collections.Counter(train)
  del counts[END]
  known = [UNKNOWN, END, *(word for word, _ in counts.most_common(symbols - 2))]
  numbers = {word: i for i, word in enumerate(known)}
  return Text(
    *(np.array([numbers.get(x, 0) for x in part], np.int32) for part in (train, test)),
    symbols,
  )


def _ended(sentence: list[str]) -> Iterator[str]:
  yield from map(str.lower, sentence)
  yield END


def _split(folder: Path) -> tuple[list[list[list[str]]], list[list[list[str]]]]:
  """Returns the texts for training and those for testing, as sentences of words."""
  texts = [_sentences(path) for path in sorted(folder.glob("c[a-r][0-9][0-9]"))]
  if len(texts) < 2:
    raise FileNotFoundError(
      f"{folder} must hold the texts ca01 to cr09 of the Brown corpus, got "
      f"{len(texts)} of them. `make data` fetches them."
    )
  return [x for i, x in enumerate(texts) if i % 10], texts[::10]


def _sentences(path: Path) -> list[list[str]]:
  """Reads a text, in which each word has a slash and its tag behind it."""
  lines = path.read_text("latin-1").splitlines()
  return [
    [word.rpartition("/")[0] for word in line.split()] for line in lines if line.strip()
  ]
