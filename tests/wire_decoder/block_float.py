"""Reads payloads of BlockFloat.

Like words.py: from docs/inside/wire-format.md alone, with NumPy only, and refusing,
with ``ValueError``, what no encoder that follows the page could have sent.
"""

import numpy as np

from tests.wire_decoder.words import (
  DENSE_WORDS,
  checked_rows,
  codes_of_words,
  floats_of_words,
)

# Bits of the exponent and of the mantissa, the largest number, and the smallest.
_FORMATS = {
  "e4m3": (4, 3, 448, 2.0**-9),
  "e5m2": (5, 2, 57344, 2.0**-16),
  "e3m2": (3, 2, 28, 2.0**-4),
  "e2m3": (2, 3, 7.5, 2.0**-3),
  "e2m1": (2, 1, 6, 2.0**-1),
}


def decode_block_float(rows, size, *, element, scale, block_size):
  """The values of a BlockFloat payload, float32[size].

  Args:
    rows: uint32[tiles, words], the payload.
    size: the number of elements of the leaf.
    element: "e4m3", "e5m2", "e3m2", "e2m3" or "e2m1".
    scale: "e8m0" or "e4m3".
    block_size: the elements that share a scale.
  """
  e, m, largest, smallest = _FORMATS[element]
  per_word = 32 // (1 + e + m)
  words = per_word * DENSE_WORDS // block_size // 4
  shares = scale == "e4m3"
  rows = checked_rows(rows, size, per_word, DENSE_WORDS, floats=words + shares)
  codes = codes_of_words(rows[:, :DENSE_WORDS], 1 + e + m)
  scales = codes_of_words(rows[:, DENSE_WORDS : DENSE_WORDS + words], 8)
  length = _lengths(codes, e, m)
  negative = codes >> np.uint32(e + m) == 1
  shared = floats_of_words(rows[:, DENSE_WORDS + words :]).ravel()
  if shares:
    step, bad = _steps(scales, shared, len(rows), 2.0**-117 / smallest)
  else:
    step, bad = np.ldexp(1.0, scales.astype(np.int64) - 127), scales == 255
  step, bad = step.repeat(block_size), bad.repeat(block_size)
  if ((length > largest) | np.isnan(length))[~bad].any():
    raise ValueError(f"a number is at most {largest}.")
  if codes[size:][~bad[size:]].any():
    raise ValueError("the elements that fill the last tile must have the code 0.")
  if shares:
    with np.errstate(over="ignore", invalid="ignore"):
      value = np.minimum(np.float32(length) * step, np.finfo(np.float32).max)
  else:
    # Exact in binary64, and what is too large was rounded up to 2^128.
    value = np.minimum(length * np.where(bad, 1, step), np.finfo(np.float32).max)
    value = np.where(value < 2.0**-126, 0, value)
  value = np.where(bad, np.nan, value)
  return np.where(negative, -value, value).astype(np.float32)[:size]


def _lengths(codes, e, m):
  """The magnitudes of codes, float64; NaN and infinity where the format has them."""
  field = (codes >> np.uint32(m) & np.uint32(2**e - 1)).astype(np.int64)
  mantissa = (codes & np.uint32(2**m - 1)) / 2.0**m
  bias = 2 ** (e - 1) - 1
  small = np.ldexp(mantissa, 1 - bias)
  length = np.where(field == 0, small, np.ldexp(1 + mantissa, field - bias))
  last = field == 2**e - 1
  if (e, m) == (5, 2):
    return np.where(last, np.where(mantissa == 0, np.inf, np.nan), length)
  if (e, m) == (4, 3):
    return np.where(last & (mantissa == 7 / 8), np.nan, length)
  return length


def _steps(scales, shared, rows, least):
  """The scale of each block, float32, and where it is NaN, of bytes and floats."""
  if (shared[1:] != shared[:-1])[~np.isnan(shared[1:])].any():
    raise ValueError("all rows of a leaf must have the same scale.")
  if not (np.isnan(shared) | (shared == 0) | (shared >= least)).all():
    raise ValueError(f"a shared scale must be 0, NaN or at least {least}.")
  each = shared.repeat(scales.size // max(rows, 1))
  bad = np.isnan(each)
  if (scales[~bad] > 126).any():
    raise ValueError("a scale of a block is a number from 0 to 448.")
  return np.float32(_lengths(scales, 4, 3)) * each, bad
