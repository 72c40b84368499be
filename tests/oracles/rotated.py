"""Computes rotations of tiles in plain NumPy, for the library to agree with.

:func:`rotate` follows docs/inside/wire-format.md bit by bit. :func:`matrix` is the
rotation as a matrix, of which the page's stages are a factorization.
"""

import functools
import itertools

import numpy as np

PER_TENSOR_WORDS = 512


def signs(count):
  """The Rudin-Shapiro sequence: -1 for each pair of neighboring ones in a number.

  Example:
    >>> signs(8).tolist()
    [1, 1, 1, -1, 1, 1, -1, 1]
  """
  ones = [bin(number) for number in range(count)]
  pairs = [sum(a == b == "1" for a, b in itertools.pairwise(x)) for x in ones]
  return np.array([(-1) ** n for n in pairs])


def matrix(group):
  """The Hadamard matrix of a group, float64: Kronecker powers of a 2 by 2 matrix."""
  return functools.reduce(
    np.kron, [np.array([[1.0, 1], [1, -1]])] * int(np.log2(group))
  )


def rotate(x, *, bits, bucket_size, group):
  """The rotated tiles of a leaf that zeros fill, float32[tiles * P * B]."""
  planes, words = 32 // bits, bucket_size or PER_TENSOR_WORDS
  leaf = np.asarray(x).astype(np.float32).ravel()
  leaf = np.pad(leaf, (0, -leaf.size % (planes * words))).reshape(-1, planes * words)
  scaled = np.float32(signs(planes * words)) * (leaf * np.float32(1 / group))
  parts = scaled.reshape(-1, planes // 8, 8, group // 8, words * 8 // group)
  elements = [parts[:, :, i // (group // 8), i % (group // 8)] for i in range(group)]

  def transform(xs):
    """Transforms the sums and the differences of the first and the second half."""
    if len(xs) == 1:
      return xs
    half = len(xs) // 2
    pairs = list(zip(xs[:half], xs[half:], strict=True))
    return transform([a + b for a, b in pairs]) + transform([a - b for a, b in pairs])

  with np.errstate(invalid="ignore", over="ignore"):
    rotated = np.stack(transform(elements), axis=2)
  return rotated.reshape(-1, planes // 8, 8, words).ravel()
