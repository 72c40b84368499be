"""Splits lines of messages by docs/inside/wire-format.md, with NumPy only."""

import numpy as np

from tests.wire_decoder.words import checked_words

LANE = 128
LEAST = 12_800  # words of the shortest line that is cut into lanes


def split_line(line, shapes):
  """The arrays of a line, each uint32[rows, words].

  Args:
    line: uint32[M], or uint32[K, 128] if it is cut into lanes.
    shapes: the rows and the words of a row of each array.
  """
  line = checked_words(line, (1, 2), "line")
  words = sum(rows * width for rows, width in shapes)
  if words < LEAST:
    if line.shape != (words,):
      raise ValueError(f"a short line must have {words} words, got {line.shape}.")
    ends = np.cumsum([rows * width for rows, width in shapes])
    parts = zip(np.split(line, ends[:-1]), shapes, strict=True)
    return [part.reshape(shape) for part, shape in parts]
  if line.shape != (-(-words // LANE), LANE):
    raise ValueError(f"a line of {words} words must be lanes, got {line.shape}.")
  line = line.ravel()
  if line[words:].any():
    raise ValueError("words behind the last must be zero.")
  arrays, at = [np.zeros(shape, np.uint32) for shape in shapes], 0
  for array in arrays:
    for column in range(0, array.shape[1] // LANE * LANE, LANE):
      part = line[at : at + LANE * len(array)].reshape(-1, LANE)
      array[:, column : column + LANE] = part
      at += part.size
  for array in arrays:
    rest = array[:, array.shape[1] // LANE * LANE :]
    rest[:] = line[at : at + rest.size].reshape(rest.shape)
    at += rest.size
  return arrays
