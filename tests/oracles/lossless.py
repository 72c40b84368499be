"""Encodes bfloat16 as docs/inside/wire-format.md has Lossless, in plain NumPy."""

import ml_dtypes
import numpy as np

ELEMENTS, COLUMNS, ESCAPES = 1024, 128, 10


def encode(x):
  """The rows of numbers that are, or become, bfloat16: uint32[rows, 396]."""
  x = np.asarray(x).reshape(-1)
  if x.dtype != ml_dtypes.bfloat16:
    x = x.astype(np.float32)  # which ml_dtypes rounds to nearest even
  x = np.pad(x.astype(ml_dtypes.bfloat16), (0, -len(x) % ELEMENTS))
  return np.stack([_row(row) for row in x.view(np.uint16).reshape(-1, ELEMENTS)])


def _row(patterns):
  """The 396 words of 1024 patterns."""
  fields = [int(p) >> 7 & 255 for p in patterns]
  tops = [
    max((field for field in fields[start : start + COLUMNS] if field != 255), default=0)
    for start in range(0, ELEMENTS, COLUMNS)
  ]
  words, listed = [0] * (3 * COLUMNS), []
  for place, (pattern, field) in enumerate(zip(patterns.tolist(), fields, strict=True)):
    plane, column = divmod(place, COLUMNS)
    if field == 0:
      code = 14
    elif 0 <= tops[plane] - field <= 13:
      code = tops[plane] - field
    else:
      code = 15
      listed.append(place * 2**8 + field)
    byte = pattern // 2**15 * 2**7 + pattern % 2**7
    words[plane // 4 * COLUMNS + column] += byte * 2 ** (8 * (plane % 4))
    words[2 * COLUMNS + column] += code * 2 ** (4 * plane)
  entries = [*listed, *[2**32 - 1] * ESCAPES][:ESCAPES]
  if len(listed) > ESCAPES:
    entries[-1] = 2**32 - 2
  return np.array([*words, *_bytes(tops[:4]), *_bytes(tops[4:]), *entries], np.uint32)


def _bytes(numbers):
  """The word of four numbers below 256, the first in the lowest bits."""
  return [sum(number * 2 ** (8 * i) for i, number in enumerate(numbers))]
