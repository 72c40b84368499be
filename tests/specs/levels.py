"""QSGD with fitted levels, given as the integers k_i of level[i] = k_i / 256."""

import numpy as np

from tests.specs import dithers, planes, qsgd
from tests.specs import scales as scale_table

BINS = 256
MIDDLES = (np.arange(BINS) + 0.5) / BINS
SAMPLED_BUCKETS = 128


def first(bits):
  """The integers for which all 2^bits levels on [-1, 1] are equally spaced."""
  count = 2 ** (bits - 1)
  return np.rint(BINS * (np.arange(count) + 0.5) / (count - 0.5)).astype(int)


def counts_of(x, *, bits, bucket_size):
  """The magnitudes that a worker counts of a leaf, int64[256]."""
  leaf = planes.as_leaf(x)
  size = min(planes.geometry(bits, bucket_size)[1], max(leaf.size, 1))
  whole = leaf.size // size
  buckets = leaf[: whole * size].reshape(whole, size)
  scales = qsgd.scales_of(x, bits=bits, bucket_size=bucket_size, norm="max").ravel()
  scales = np.broadcast_to(scales[:1], whole) if bucket_size is None else scales
  counts = np.zeros(BINS, np.int64)
  sampled = min(whole, SAMPLED_BUCKETS)
  for i in range(sampled):
    bucket = i * whole // sampled
    if scales[bucket] > 0:
      magnitudes = np.abs(buckets[bucket]) * (np.float32(BINS) / scales[bucket])
      found = np.minimum(magnitudes, BINS - 1).astype(int)
      counts += np.bincount(found, minlength=BINS)
  return counts


def variance(counts, k):
  """The variance of stochastic rounding over all counts, in the middles of their bins.

  Between neighboring levels a and b it is (b - v) (v - a); below the first level,
  whose other neighbor is its negative, a^2 - v^2.
  """
  a = np.concatenate([[-k[0]], k]) / BINS
  upper = np.searchsorted(a, MIDDLES)
  return float(np.sum(counts * (a[upper] - MIDDLES) * (MIDDLES - a[upper - 1])))


def best(counts, bits):
  """The levels of least variance, by a search through all of them: int64[L].

  `least[b]` is the least variance of all counts below b / 256 if there is a level; one
  more level follows each time.
  """
  counts, v = np.asarray(counts, np.float64), MIDDLES
  ends = np.arange(BINS + 1) / BINS
  cost = np.full((BINS + 1, BINS + 1), np.inf)  # of the counts between two levels
  for a in range(BINS):
    for b in range(a + 1, BINS + 1):
      inside = slice(a, b)
      cost[a, b] = counts[inside] @ ((ends[b] - v[inside]) * (v[inside] - ends[a]))
  least = np.array([counts[:b] @ (ends[b] ** 2 - v[:b] ** 2) for b in range(BINS + 1)])
  parents = []
  for _ in range(2 ** (bits - 1) - 1):
    total = least[:, None] + cost
    parents.append(total.argmin(axis=0))
    least = total.min(axis=0)
  k = [BINS]
  for parent in reversed(parents):
    k.append(int(parent[k[-1]]))
  return np.array(k[::-1])


def encode(x, *, k, key=None, bits, bucket_size, rounding="stochastic"):
  """The rows of a leaf under levels k, uint32[tiles, B + scales + L]."""
  rule = dict(bits=bits, bucket_size=bucket_size)
  tiles = planes.tiled(planes.as_leaf(x), *planes.geometry(**rule))
  scales = qsgd.scales_of(x, norm="max", **rule)
  with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
    factor = np.where(scales == 0, np.float32(0), np.float32(2**16) / scales)
    t = np.abs(tiles) * factor[:, :, None]
  t = np.where(np.isnan(t), np.float32(0), t)
  piece = sum((t >= np.float32(256 * edge)).astype(int) for edge in k[:-1])
  slopes, offsets = _pieces([int(edge) for edge in k])
  product = np.trunc(t * np.array(slopes, np.float32)[piece]).astype(np.int64)
  middle = 2**15 * (2**bits - 1)
  fixed = np.minimum(product + np.array(offsets)[piece], middle)
  addend = dithers.addend(rounding, np.abs(tiles), key, **rule)
  codes = (middle + np.where(tiles < 0, -fixed, fixed) + addend) >> 16
  levels = np.broadcast_to(np.float32(np.divide(k, BINS)), (len(tiles), len(k)))
  return planes.with_floats(planes.pack(codes, bits, bucket_size), scales, levels)


def _pieces(k):
  """The slope m and the offset o of each piece, from zero to k[0], to k[1], ..."""
  slopes, offsets = [128 / k[0] if k[0] else 0.0], [0]
  for piece in range(1, len(k)):
    d = k[piece] - k[piece - 1]
    slopes.append(256 / d)
    offsets.append((piece - 1) * 2**16 + 2**15 - k[piece - 1] * 2**16 // d)
  return slopes, offsets


def decode(rows, size, *, bits, bucket_size):
  per_word, words = planes.geometry(bits, bucket_size)
  count = 2 ** (bits - 1)
  floats = (1 if bucket_size is None else per_word) + count
  rows = planes.checked_rows(rows, size, per_word, words, floats)
  scale = scale_table.read(rows[:, words:-count], size, per_word, words)
  codes = planes.unpack(rows[:, :words], bits).astype(np.int64)
  if not len(rows):
    return np.zeros(0, np.float32)
  levels = planes.as_floats(rows[:, -count:])
  k = 256 * levels[0]
  if (levels != levels[0]).any():
    raise ValueError("all rows must have the same levels.")
  whole = (k == np.trunc(k)).all() and k[0] >= 0
  if not whole or k[-1] != 256 or (np.diff(k) <= 0).any():
    raise ValueError("levels are increasing multiples of 1/256, the last of them 1.")
  negative = codes < count
  value = scale * levels[0][np.where(negative, count - 1 - codes, codes - count)]
  return np.where(negative, -value, value)[:size]
