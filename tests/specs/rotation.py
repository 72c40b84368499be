"""Rotates tiles, and back, in the page's stages: a factorization of :func:`matrix`."""

import numpy as np
import scipy.linalg

from tests.specs import planes


def signs(count):
  """The Rudin-Shapiro sequence: -1 for each pair of neighboring ones in a number."""
  return np.array([(-1) ** (x & x >> 1).bit_count() for x in range(count)])


def matrix(group):
  """The Hadamard matrix of a group, float64: Kronecker powers of a 2 by 2 matrix."""
  return scipy.linalg.hadamard(group, np.float64)


def rotate(x, *, bits, bucket_size, group):
  """The rotated tiles of a leaf that zeros fill, float32[tiles * P * B]."""
  per_word, words = planes.geometry(bits, bucket_size)
  tiles = planes.tiled(planes.as_leaf(x), 1, per_word * words)[:, 0]
  scaled = np.float32(signs(per_word * words)) * (tiles * np.float32(1 / group))
  return _transformed(scaled, per_word, words, group).ravel()


def unrotate(values, *, bits, bucket_size, group):
  """What rotated values stand for, float32 in the leaf's order; of whole tiles."""
  per_word, words = planes.geometry(bits, bucket_size)
  tiles = np.asarray(values, np.float32).reshape(-1, per_word * words)
  sums = _transformed(tiles, per_word, words, group)
  return np.where(signs(per_word * words) < 0, -sums, sums).ravel()


def _transformed(tiles, per_word, words, group):
  """The tiles with all groups transformed, float32[tiles, P * B]."""
  quarters = group // 8
  shape = per_word // 8, 8, quarters, words // quarters
  tile = np.arange(per_word * words).reshape(shape)
  # Of each group the places of its elements in the tile, by their numbers.
  places = tile.transpose(1, 2, 0, 3).reshape(group, -1)
  y = tiles[:, places]
  bit = group
  with np.errstate(invalid="ignore", over="ignore"):
    while bit > 1:
      bit //= 2
      low = [i for i in range(group) if not i & bit]
      high = [i | bit for i in low]
      sums, differences = y[:, low] + y[:, high], y[:, low] - y[:, high]
      y[:, low], y[:, high] = sums, differences
  result = np.empty_like(tiles)
  result[:, places] = y
  return result
