"""Computes QSGD with fitted levels in plain NumPy, for the library to agree with.

Two descriptions of the same quantiser, neither taken from the library:

* :func:`levels_encode` follows the fixed-point rule of docs/inside/wire-format.md to
  the bit;
* :func:`levels_variance` and :func:`best_levels` are its aim on real numbers (float64):
  the variance of stochastic rounding, and the levels for which it is smallest.

Levels are given as the integers k_i of level[i] = k_i / 256.
"""

import numpy as np

from tests.oracles import qsgd

BINS = 256
SAMPLED_BUCKETS = 128


def first_levels(bits):
  """The integers for which all 2^bits levels on [-1, 1] are equally spaced.

  Example:
    >>> first_levels(3)
    array([ 37, 110, 183, 256])
  """
  count = 2 ** (bits - 1)
  return np.rint(BINS * (np.arange(count) + 0.5) / (count - 0.5)).astype(int)


def counts_of(x, *, bits, bucket_size):
  """The magnitudes that a worker counts of a leaf, int64[256].

  Args:
    x: the leaf, of any shape.
    bits: the bits of a code.
    bucket_size: the elements that share a scale; None is one scale a tensor, which is
      counted in pieces of 512.
  """
  leaf = qsgd.as_leaf(x)
  size = qsgd.PER_TENSOR_WORDS if bucket_size is None else bucket_size
  size = min(size, max(leaf.size, 1))
  whole = leaf.size // size
  buckets = leaf[: whole * size].reshape(whole, size)
  scales = qsgd.qsgd_scales(x, bits=bits, bucket_size=bucket_size, norm="max")
  scales = np.broadcast_to(scales.ravel()[:1], whole) if bucket_size is None else scales
  counts = np.zeros(BINS, np.int64)
  sampled = min(whole, SAMPLED_BUCKETS)
  for i in range(sampled):
    bucket = i * whole // sampled
    scale = scales.ravel()[bucket]
    if scale > 0:
      magnitudes = np.abs(buckets[bucket]) * (np.float32(BINS) / scale)
      counts += np.bincount(
        np.minimum(magnitudes, BINS - 1).astype(int), minlength=BINS
      )
  return counts


def levels_variance(counts, k):
  """The variance of stochastic rounding over all counts, in the middles of their bins.

  Between neighboring levels a and b it is (b - v) (v - a); below the first level,
  whose other neighbor is its negative, a^2 - v^2.

  Args:
    counts: int[256].
    k: the integers of the levels.

  Example:
    >>> counts = np.zeros(256)
    >>> counts[127] = 2  # at 127.5 / 256, halfway between 0 and 255 / 256
    >>> 256**2 * levels_variance(counts, [0, 255, 256]) == 2 * 127.5**2
    True
  """
  v = (np.arange(BINS) + 0.5) / BINS
  a = np.concatenate([[-k[0]], k]) / BINS
  upper = np.searchsorted(a, v)
  return float(np.sum(counts * (a[upper] - v) * (v - a[upper - 1])))


def best_levels(counts, bits):
  """The levels of least variance, by a search through all of them: int64[L].

  `least[b]` is the least variance of all counts below b / 256 if there is a level; one
  more level follows each time.
  """
  counts = np.asarray(counts, np.float64)
  v = (np.arange(BINS) + 0.5) / BINS
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


def levels_encode(
  x,
  k,
  *,
  key=None,
  bits,
  bucket_size,
  rounding="stochastic",
  lanes=None,
  first_row=0,
  scale_per_row=False,
):
  """The rows that the specification asks for, uint32[tiles, B + scales + L].

  Where the scale is NaN the page leaves the codes open; here they are those of zero.

  Args:
    x: the leaf, of any shape.
    k: the integers of the levels.
    key: the leaf's key, two 32-bit words; only read for stochastic rounding.
    bits: the bits of a code, 2 to 4.
    bucket_size: the elements that share a scale; None is one scale a tensor.
    rounding: "nearest" or "stochastic".
    lanes: uint32[tiles, P, B] to use instead of :func:`qsgd.random_lanes`.
    first_row: the index of the first row, for :func:`qsgd.random_lanes`.
    scale_per_row: by tensor, one scale for each row, as in later stages.
  """
  count = 2 ** (bits - 1)
  words = qsgd.PER_TENSOR_WORDS if bucket_size is None else bucket_size
  tiles = qsgd.tiled(qsgd.as_leaf(x), 32 // bits, words)
  scales = qsgd.qsgd_scales(
    x, bits=bits, bucket_size=bucket_size, norm="max", scale_per_row=scale_per_row
  )
  with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
    factor = np.where(scales == 0, np.float32(0), np.float32(2**16) / scales)
    t = np.abs(tiles) * factor[:, :, None]
  t = np.where(np.isnan(t), np.float32(0), t)
  piece = sum((t >= np.float32(256 * edge)).astype(int) for edge in k[:-1])
  slopes, offsets = _pieces([int(edge) for edge in k])
  product = np.trunc(t * np.array(slopes, np.float32)[piece]).astype(np.int64)
  fixed = np.minimum(product + np.array(offsets)[piece], 2**15 * (2 * count - 1))
  if rounding == "stochastic" and lanes is None:
    lanes = qsgd.random_lanes(
      key, len(tiles), bits=bits, bucket_size=bucket_size, first_row=first_row
    )
  addend = np.int64(2**15) if rounding == "nearest" else lanes.astype(np.int64)
  signed = np.where(tiles < 0, -fixed, fixed)
  codes = (2**15 * (2 * count - 1) + signed + addend) >> 16
  packed = qsgd.pack(codes, bits, words)
  levels = np.broadcast_to(np.asarray(k) / np.float32(BINS), (len(tiles), count))
  floats = np.concatenate([scales, levels.astype(np.float32)], axis=1)
  return np.concatenate([packed, floats.view(np.uint32)], axis=1)


def _pieces(k):
  """The slope m and the offset o of each piece, from zero to k[0], to k[1], ..."""
  slopes, offsets = [128 / k[0] if k[0] else 0.0], [0]
  for piece in range(1, len(k)):
    d = k[piece] - k[piece - 1]
    slopes.append(256 / d)
    offsets.append((piece - 1) * 2**16 + 2**15 - k[piece - 1] * 2**16 // d)
  return slopes, offsets
