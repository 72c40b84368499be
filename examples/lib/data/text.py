"""Loads modules of Python's standard library as a text to model byte by byte.

Every Python has these files, so nothing is downloaded. They differ a little between
versions of Python, so compare perplexities of one version only.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Large modules that Python 3.11 to 3.13 all have, each one file of plain Python.
MODULES = tuple(
  "argparse ast configparser dataclasses datetime difflib doctest enum functools "
  "inspect ipaddress mailbox optparse pdb pickle pickletools pydoc shutil statistics "
  "subprocess tarfile threading typing turtle".split()
)
CHARACTERS = 128  # ASCII; the few bytes above it are read as "?"


class Tokens(NamedTuple):
  """Sequences, and the next symbol behind each position."""

  inputs: np.ndarray  # [count, length], of the text's type
  labels: np.ndarray  # int32[count, length]


class Text(NamedTuple):
  train: np.ndarray  # of integers from 0 on
  test: np.ndarray
  symbols: int = CHARACTERS  # that all of them are below


def load(folder: str | Path | None = None) -> Text:
  """Reads nine tenths of every module for training, and its last tenth for testing."""
  folder = Path(folder or sysconfig.get_paths()["stdlib"])
  train, test = [], []
  for name in MODULES:
    code = as_characters((folder / f"{name}.py").read_bytes())
    first = len(code) * 9 // 10
    train.append(code[:first])
    test.append(code[first:])
  return Text(np.concatenate(train), np.concatenate(test))


def as_characters(text: bytes) -> np.ndarray:
  """Returns the bytes as numbers below ``CHARACTERS``."""
  code = np.frombuffer(text, np.uint8)
  return np.where(code < CHARACTERS, code, ord("?")).astype(np.uint8)


def sequences(text: np.ndarray, starts: np.ndarray, length: int) -> Tokens:
  """Cuts sequences of ``length`` symbols out of a text, one from each of ``starts``."""
  windows = text[starts[:, None] + np.arange(length + 1)]
  return Tokens(windows[:, :-1], windows[:, 1:].astype(np.int32))


def in_order(text: np.ndarray, length: int, most: int | None = None) -> Tokens:
  """Cuts a text into sequences to test on, and leaves out its last few symbols."""
  starts = np.arange(0, len(text) - length, length)
  if most is not None and len(starts) > most:
    starts = starts[np.arange(most) * len(starts) // most]
  return sequences(text, starts, length)


def batches(
  text: np.ndarray, size: int, length: int, *, seed: int, part: int = 0, parts: int = 1
) -> Iterator[Tokens]:
  """Yields batches without end, of sequences that start anywhere."""
  mine = slice(part * size // parts, (part + 1) * size // parts)
  generator = np.random.default_rng(seed)
  while True:
    starts = generator.integers(len(text) - length, size=size)
    yield sequences(text, starts[mine], length)
