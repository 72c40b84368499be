"""Computes Sign and its votes in plain NumPy, for the library to agree with.

From docs/inside/wire-format.md, section Sign, but for the last bits of a mean
magnitude, which may be given; without them sums are taken in float64.
"""

import numpy as np

from tests.oracles import qsgd

PER_WORD = 32


def sign_scales(x, *, bucket_size, scale):
  """The scales of a leaf's buckets, float32[tiles, 32]."""
  leaf = qsgd.as_leaf(x)
  if scale == "mean":
    whole = leaf.size // bucket_size * bucket_size
    copies = np.resize(leaf[whole:], bucket_size if leaf.size > whole else 0)
    leaf = np.concatenate([leaf[:whole], copies])
  size = np.abs(np.float64(qsgd.tiled(leaf, PER_WORD, bucket_size)))
  with np.errstate(invalid="ignore"):
    found = size.mean(axis=-1) if scale == "mean" else np.float64(size.max(axis=-1) > 0)
  return np.float32(np.where(np.isfinite(size).all(axis=-1), found, np.nan))


def sign_encode(x, *, bucket_size, scale, scales=None):
  """The rows that the specification asks for, uint32[tiles, B + 32] or [tiles, B + 2].

  Args:
    x: the leaf, of any shape.
    bucket_size: the elements that share a scale.
    scale: "mean" or "one".
    scales: float32[tiles, 32] to use instead of :func:`sign_scales`.
  """
  leaf = qsgd.as_leaf(x)
  if scales is None:
    scales = sign_scales(leaf, bucket_size=bucket_size, scale=scale)
  if scale == "mean":
    whole = leaf.size // bucket_size * bucket_size
    copies = np.resize(leaf[whole:], bucket_size if leaf.size > whole else 0)
    leaf = np.concatenate([leaf[:whole], copies])
    tail = np.asarray(scales, np.float32).view(np.uint32)
  else:
    flags = [scales != 0, np.isnan(scales)]
    place = np.uint32(1) << np.arange(PER_WORD, dtype=np.uint32)
    tail = np.stack([(flag * place).sum(axis=1) for flag in flags], axis=1)
  words = qsgd.pack(leaf < 0, 1, bucket_size)
  return np.concatenate([words, tail.astype(np.uint32)], axis=1)


def sign(x, *, bucket_size, scale):
  """The values that elements become, float32, from the definition."""
  leaf = qsgd.as_leaf(x)
  scales = sign_scales(leaf, bucket_size=bucket_size, scale=scale)
  return np.where(leaf < 0, -1, 1) * scales.repeat(bucket_size)[: leaf.size]


def vote(values, kind):
  """What all workers get of their signs, float32: the mean, or the sign of most."""
  count = np.sum(np.float32(values), axis=0, dtype=np.float32)  # integers: exact
  if kind == "majority":
    return np.sign(count)
  return count * (np.float32(1) / np.float32(len(values)))
