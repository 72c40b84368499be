"""Text to model byte by byte: modules of Python's own standard library.

Embedded as ``digits`` is: every Python has these files, so nothing downloads. They
differ a little from one Python to the next, so perplexities compare within one.
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
  """Sequences, and what follows each of their bytes."""

  inputs: np.ndarray  # uint8[count, length]
  labels: np.ndarray  # int32[count, length]


class Text(NamedTuple):
  train: np.ndarray  # uint8[characters]
  test: np.ndarray


def load(folder: str | Path | None = None) -> Text:
  """The first nine tenths of every module for training, the last tenth for testing.

  Args:
    folder: where the modules are; None for the running Python's standard library.
  """
  folder = Path(folder or sysconfig.get_paths()["stdlib"])
  train, test = [], []
  for name in MODULES:
    code = np.frombuffer((folder / f"{name}.py").read_bytes(), np.uint8)
    code = np.where(code < CHARACTERS, code, ord("?")).astype(np.uint8)
    first = len(code) * 9 // 10
    train.append(code[:first])
    test.append(code[first:])
  return Text(np.concatenate(train), np.concatenate(test))


def sequences(text: np.ndarray, starts: np.ndarray, length: int) -> Tokens:
  """The sequences of ``length`` bytes from each of ``starts`` on."""
  windows = text[starts[:, None] + np.arange(length + 1)]
  return Tokens(windows[:, :-1], windows[:, 1:].astype(np.int32))


def in_order(text: np.ndarray, length: int) -> Tokens:
  """All sequences one after the other, to test on; the last few bytes are left out."""
  return sequences(text, np.arange(0, len(text) - length, length), length)


def batches(
  text: np.ndarray,
  batch_size: int,
  length: int,
  *,
  seed: int,
  part: int = 0,
  parts: int = 1,
) -> Iterator[Tokens]:
  """Endless batches of sequences that start anywhere.

  Args:
    text: what to draw from.
    batch_size: sequences in a batch, a multiple of ``parts``.
    length: bytes in a sequence.
    seed: equal seeds give equal batches.
    part: which part of every batch to return, for the process with this index.
    parts: how many parts a batch is cut into, for this many processes.
  """
  mine = slice(part * batch_size // parts, (part + 1) * batch_size // parts)
  generator = np.random.default_rng(seed)
  while True:
    starts = generator.integers(len(text) - length, size=batch_size)
    yield sequences(text, starts[mine], length)
