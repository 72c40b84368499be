"""Computes QSGD with clipped levels in plain NumPy, for the library to agree with.

Written from docs/inside/wire-format.md: a leaf is filled with copies, and its scales
are a multiple of the root mean squares of buckets. All else is that of :mod:`qsgd`.
"""

import numpy as np

from tests.oracles import qsgd

# The outermost level, in root mean squares: half of 1, 3, 7 and 15 steps.
REACH = {1: 0.798, 2: 1.494, 3: 2.051, 4: 2.5125}


def filled(x, bucket_size):
  """The leaf, with a last bucket that repeats its own elements: float32[m B].

  Example:
    >>> filled([1, 2, 3, 4, 5, 6], 4).tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 5.0, 6.0]
  """
  leaf = qsgd.as_leaf(x)
  whole = leaf.size // bucket_size * bucket_size
  copies = np.resize(leaf[whole:], bucket_size if leaf.size > whole else 0)
  return np.concatenate([leaf[:whole], copies])


def scales(x, *, bits, bucket_size):
  """The scales that a row carries, float32[tiles, P], up to their last bits."""
  buckets = filled(x, bucket_size)
  lengths = qsgd.qsgd_scales(buckets, bits=bits, bucket_size=bucket_size, norm="l2")
  factor = np.float32(REACH[bits] / np.sqrt(bucket_size))
  found = qsgd.scales_of_norms(lengths * factor)
  return np.where(np.isnan(lengths), lengths, found)


def encode(x, *, bits, bucket_size, scales, **rule):
  """The rows that the specification asks for, uint32[tiles, B + P].

  Args:
    x: the leaf, of any shape.
    bits: the bits of a code, 1 to 4.
    bucket_size: the elements that share a scale.
    scales: float32[tiles, P], as the library found them.
    **rule: of :func:`qsgd.qsgd_encode`.
  """
  return qsgd.qsgd_encode(
    filled(x, bucket_size),
    bits=bits,
    bucket_size=bucket_size,
    norm=None,
    levels="uniform",
    scales=scales,
    **rule,
  )
