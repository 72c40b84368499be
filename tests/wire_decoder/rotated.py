"""Rotates tiles back as docs/inside/wire-format.md describes it, with NumPy only.

Like words.py, it is written from that page and from nothing else.
"""

import numpy as np

PER_TENSOR_WORDS = 512


def unrotate(values, *, bits, bucket_size, group):
  """What rotated values stand for, float32 in the leaf's order.

  Args:
    values: float32[tiles * P * B], of whole tiles.
    bits: the bits of a code, 1, 2 or 4.
    bucket_size: B; None is one scale a tensor.
    group: the elements of a group, 8 or 32.
  """
  planes, words = 32 // bits, bucket_size or PER_TENSOR_WORDS
  quarters = group // 8
  tile = np.arange(planes * words).reshape(planes // 8, 8, quarters, words // quarters)
  # Of each group the places of its elements in the tile, by their numbers.
  places = tile.transpose(1, 2, 0, 3).reshape(group, -1)
  tiles = np.asarray(values, np.float32).reshape(-1, planes * words)
  y = tiles[:, places]
  bit = group
  with np.errstate(invalid="ignore", over="ignore"):
    while bit > 1:
      bit //= 2
      low = [i for i in range(group) if not i & bit]
      high = [i | bit for i in low]
      sums, differences = y[:, low] + y[:, high], y[:, low] - y[:, high]
      y = y.copy()
      y[:, low], y[:, high] = sums, differences
  result = np.empty_like(tiles)
  result[:, places] = y
  negative = [bin(j & j >> 1).count("1") % 2 == 1 for j in range(planes * words)]
  return np.where(negative, -result, result).ravel()
