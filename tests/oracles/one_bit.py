"""Computes OneBit in plain NumPy, for the library to agree with.

Two descriptions of the same quantiser, neither taken from the library:

* :func:`one_bit_encode` and :func:`one_bit_encode_columns` follow
  docs/inside/wire-format.md bit by bit, but for the means, whose last bits depend on
  the order of additions: those may be given, and are exact to binary32 otherwise;
* :func:`one_bit_ideal` is Q^1b of Grubic et al. 2018, section 2.2, in float64.
"""

import numpy as np

from tests.oracles import qsgd

PER_WORD = 32


def one_bit_means(x, *, bucket_size):
  """The means that a row carries, float32[tiles, 64]: avg+ of each bucket, then avg-.

  Sums are taken in float64 and rounded once.

  Args:
    x: the leaf, of any shape.
    bucket_size: the elements that share a pair of means.
  """
  leaf = qsgd.as_leaf(x)
  tiles = qsgd.tiled(leaf, PER_WORD, bucket_size)
  real = qsgd.tiled(np.ones(leaf.size, bool), PER_WORD, bucket_size)
  return np.concatenate(_means(tiles, real), axis=1)


def one_bit_encode(x, *, bucket_size, means=None):
  """The rows that the specification asks for, uint32[tiles, B + 64].

  Args:
    x: the leaf, of any shape.
    bucket_size: the elements that share a pair of means.
    means: float32[tiles, 64] to use instead of :func:`one_bit_means`.
  """
  if means is None:
    means = one_bit_means(x, bucket_size=bucket_size)
  leaf = qsgd.as_leaf(x)
  whole = leaf.size // bucket_size * bucket_size
  copies = np.resize(leaf[whole:], bucket_size if leaf.size > whole else 0)
  negative = np.concatenate([leaf[:whole], copies]) < 0
  words = qsgd.pack(negative, 1, bucket_size)
  return np.concatenate([words, np.asarray(means, np.float32).view(np.uint32)], axis=1)


def one_bit_column_means(x):
  """The means of the columns of a leaf, float32[columns, 2]: avg+, avg-."""
  columns = as_columns(x)
  return np.stack(_means(columns, np.ones(columns.shape, bool)), axis=1)


def one_bit_encode_columns(x, *, means=None):
  """The rows with `per_column`, uint32[columns, ceil(d0 / 32) + 2].

  Args:
    x: the leaf; its first dimension is d0, all others are columns.
    means: float32[columns, 2] to use instead of :func:`one_bit_column_means`.
  """
  if means is None:
    means = one_bit_column_means(x)
  columns = as_columns(x)
  words = np.zeros((len(columns), -(-columns.shape[1] // 32)), np.uint32)
  for i, element in enumerate(columns.T):
    words[:, i // 32] |= (element < 0).astype(np.uint32) << np.uint32(i % 32)
  return np.concatenate([words, np.asarray(means, np.float32).view(np.uint32)], axis=1)


def as_columns(x):
  """A leaf as float32[columns, d0]: each line is a column of the matrix."""
  x = np.asarray(x, np.float32)
  return np.ascontiguousarray(x.reshape(x.shape[0] if x.ndim else 1, -1).T)


def one_bit_ideal(v):
  """Q^1b of one vector (Grubic et al. 2018, section 2.2), float64 of its shape.

  avg+ is the mean over v_i >= 0, for it stands for those elements.

  Example:
    >>> one_bit_ideal([-3, -1, 2, 4])
    array([-2., -2.,  3.,  3.])
  """
  v = np.asarray(v, np.float64)
  positive = v >= 0
  quantised = np.empty_like(v)
  for side in (positive, ~positive):
    if side.any():
      quantised[side] = v[side].mean()
  return quantised


def _means(buckets, real):
  """The two means over the last axis of the elements that are real; NaN as a pair."""
  means = []
  with np.errstate(invalid="ignore"):
    for side in (buckets >= 0, buckets < 0):
      chosen = side & real
      total = np.where(chosen, buckets, 0).sum(axis=-1, dtype=np.float64)
      means.append((total / np.maximum(chosen.sum(axis=-1), 1)).astype(np.float32))
  bad = ~np.isfinite(buckets).all(axis=-1)
  return [np.where(bad, np.float32(np.nan), mean) for mean in means]
