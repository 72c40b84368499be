"""OneBit, by buckets or columns; its means are sums: exact to binary32, or given."""

import numpy as np

from tests.specs import planes

PER_WORD = 32


def means_of(x, *, bucket_size=None, column=None):
  """The means that a row carries: avg+ of each bucket or column, then avg-."""
  leaf = planes.as_leaf(x)
  cut = lambda y: planes.tiled(y, PER_WORD, bucket_size)
  if column is not None:
    cut = lambda y: y.reshape(column, -1).T[:, None]
  buckets, real = cut(leaf), cut(np.ones(leaf.size, bool))
  means = []
  with np.errstate(invalid="ignore"):
    for side in (buckets >= 0, buckets < 0):
      chosen = side & real
      total = np.where(chosen, buckets, 0).sum(axis=-1, dtype=np.float64)
      means.append((total / np.maximum(chosen.sum(axis=-1), 1)).astype(np.float32))
  bad = ~np.isfinite(buckets).all(axis=-1)
  return np.concatenate([np.where(bad, np.float32(np.nan), x) for x in means], axis=1)


def encode(x, *, bucket_size=None, column=None, means=None):
  """The rows of a leaf, uint32[tiles, B + 64] or uint32[columns, ceil(d0 / 32) + 2]."""
  if means is None:
    means = means_of(x, bucket_size=bucket_size, column=column)
  if column is None:
    words = planes.pack(planes.filled(x, bucket_size) < 0, 1, bucket_size)
  else:
    negative = planes.as_leaf(x).reshape(column, -1).T < 0
    padded = np.pad(negative, ((0, 0), (0, -column % 32)))
    octets = np.packbits(padded, axis=1, bitorder="little")
    words = np.ascontiguousarray(octets).view("<u4")
  return planes.with_floats(words, means)


def decode(rows, size, *, bucket_size=None, column=None):
  """The values of a payload, float32[size]; a bucket with NaN means is NaN."""
  if column is not None:
    words = -(-column // 32)
    rows = planes.checked(rows, (size // column if column else 1, words + 2))
    bits = np.unpackbits(
      np.ascontiguousarray(rows[:, :words]).view(np.uint8), axis=1, bitorder="little"
    )
    if bits[:, column:].any():
      raise ValueError("unused bits must be zero.")
    negative = bits[:, :column] == 1
    real = np.ones(negative.shape, bool)
    positive_mean, negative_mean = planes.as_floats(rows[:, words:]).T
  else:
    rows = planes.checked_rows(rows, size, PER_WORD, bucket_size, 2 * PER_WORD)
    flat = planes.unpack(rows[:, :bucket_size], 1) == 1
    check_copies(flat, size, bucket_size)
    negative = flat.reshape(-1, bucket_size)
    real = (np.arange(flat.size) < size).reshape(negative.shape)
    means = planes.as_floats(rows[:, bucket_size:])
    positive_mean, negative_mean = means[:, :PER_WORD], means[:, PER_WORD:]
  means = positive_mean.ravel(), negative_mean.ravel()
  _check_means(*means, (real & ~negative).any(axis=1), (real & negative).any(axis=1))
  value = np.where(negative, means[1][:, None], means[0][:, None])
  return (value if column is None else value.T).ravel()[:size]


def check_copies(negative, size, bucket_size):
  """Raises where a last bucket's signs do not repeat, or others follow it."""
  start = size // bucket_size * bucket_size
  expected = np.zeros(negative.size - start, bool)
  if size > start:
    expected[:bucket_size] = np.resize(negative[start:size], bucket_size)
  if (negative[start:] != expected).any():
    raise ValueError(
      "the elements that fill the last tile must have the codes of what they repeat."
    )


def _check_means(positive_mean, negative_mean, some_positive, some_negative):
  bad = np.isnan(positive_mean)
  if (bad != np.isnan(negative_mean)).any():
    raise ValueError("both means of a bucket are NaN, or neither.")
  if np.isinf(positive_mean).any() or np.isinf(negative_mean).any():
    raise ValueError("a mean must be finite or NaN.")
  if (positive_mean < 0).any() or (negative_mean > 0).any():
    raise ValueError("avg+ must not be negative, avg- must not be positive.")
  none = positive_mean[~some_positive & ~bad], negative_mean[~some_negative & ~bad]
  if any(mean.any() for mean in none):
    raise ValueError("the mean of no elements must be 0.")


def ideal(v):
  """Q^1b of one vector (Grubic et al. 2018, section 2.2), float64 of its shape."""
  v = np.asarray(v, np.float64)
  result = np.empty_like(v)
  for side in (v >= 0, v < 0):
    if side.any():
      result[side] = v[side].mean()
  return result
