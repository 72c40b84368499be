"""Splits lines of messages."""

import numpy as np

LANE = 128
LEAST = 12_800  # words of the shortest line that is cut into lanes


def split_line(line, shapes):
  """The arrays of a line, each uint32[rows, words].

  Args:
    line: uint32[M], or uint32[K, 128] if it is cut into lanes.
    shapes: the rows and the words of a row of each array.
  """
  line = np.asarray(line)
  counts = [rows * width for rows, width in shapes]
  words = sum(counts)
  expected = (words,) if words < LEAST else (-(-words // LANE), LANE)
  if line.dtype != np.uint32 or line.shape != expected:
    raise ValueError(f"a line of {words} words must be uint32{[*expected]}.")
  line = line.ravel()
  if line[words:].any():
    raise ValueError("words behind the last must be zero.")
  if words < LEAST:
    parts = zip(np.split(line, np.cumsum(counts)[:-1]), shapes, strict=True)
    return [part.reshape(shape) for part, shape in parts]
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
