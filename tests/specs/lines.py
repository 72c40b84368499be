"""Splits lines of messages."""

import numpy as np

LANE = 128
LEAST = 12_800  # words of the shortest line that is cut into lanes


def split_line(line, shapes):
  """The arrays of a line, each uint32[rows, words] of these shapes."""
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
  whole = lambda array: array.shape[1] // LANE * LANE
  parts = [x[:, i : i + LANE] for x in arrays for i in range(0, whole(x), LANE)]
  for part in (*parts, *(x[:, whole(x) :] for x in arrays)):
    part[:] = line[at : at + part.size].reshape(part.shape)
    at += part.size
  return arrays
