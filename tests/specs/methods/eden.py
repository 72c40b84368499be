"""EDEN of N vectors, ``float64[N, d]`` with d a power of two, from its formulas.

EDEN (Vargaftik et al., 2022, https://arxiv.org/abs/2108.08842) rotates each vector at
random, by signs and a Hadamard transform R, and rounds to the nearest of the levels q
that lose least of normal numbers. One scale S a vector is sent beside: ``unbiased``,
S = |x|^2 / <Rx, q>, or ``least squares``, S = <Rx, q> / |q|^2. With one bit it is DRIVE
(Vargaftik et al., 2021, https://arxiv.org/abs/2105.08339). The authors write both in
https://github.com/amitport/EDEN-Distributed-Mean-Estimation.
"""

import functools
import math

import numpy as np
from scipy import stats

SCALES = ("unbiased", "least squares")


def hadamard(x: np.ndarray) -> np.ndarray:
  """Transforms the last axis by the orthonormal Hadamard matrix, its own inverse."""
  size, width = x.shape[-1], 1
  if size & (size - 1):
    raise ValueError(f"a row must have a power of two of elements, got {size}.")
  while width < size:
    pairs = x.reshape(*x.shape[:-1], -1, 2, width)
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    x = np.stack([first + second, first - second], -2).reshape(x.shape)
    width *= 2
  return x / math.sqrt(size)


@functools.cache
def lloyd_max(bits: int) -> np.ndarray:
  """The levels of least squared error for normal numbers, by Lloyd's iteration."""
  count = 2**bits
  # Many levels are as dense as the third root of the density (Panter and Dite, 1951).
  levels = math.sqrt(3) * stats.norm.ppf((np.arange(count) + 0.5) / count)
  for _ in range(4000):  # each level becomes the mean of the numbers nearest to it
    edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    levels = -np.diff(stats.norm.pdf(edges)) / np.diff(stats.norm.cdf(edges))
  return levels


def eden(x: np.ndarray, bits: int, scale: str, seed: int) -> np.ndarray:
  """Decodes EDEN's messages, each vector rotated by itself."""
  signs = np.random.default_rng(seed).choice([-1.0, 1.0], x.shape)
  rotated = hadamard(signs * x)
  norm = np.linalg.norm(x, axis=-1, keepdims=True)
  levels = lloyd_max(bits)
  edges = (levels[1:] + levels[:-1]) / 2
  rounded = levels[np.searchsorted(edges, rotated * math.sqrt(x.shape[-1]) / norm)]
  along = np.sum(rotated * rounded, -1, keepdims=True)
  least = along / np.sum(rounded**2, -1, keepdims=True)
  factor = norm**2 / along if scale == "unbiased" else least
  return signs * hadamard(factor * rounded)
