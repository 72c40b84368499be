"""Models of other projects' codes in NumPy, written from their formulas.

Each takes the vectors of N workers, ``float64[N, d]`` where d is a power of two, and
returns what the receiver decodes from each, of the same shape. They share no code with
the library, and none of its random numbers.

EDEN (Vargaftik et al., 2022, https://arxiv.org/abs/2108.08842) rotates each vector at
random, by signs and a Hadamard transform R of its own, and rounds to the nearest of
the levels q that lose least of normal numbers. One scale S a vector is sent beside:
``unbiased``, S = |x|^2 / <Rx, q>, or ``least squares``, S = <Rx, q> / |q|^2. With one
bit it is DRIVE (Vargaftik et al., 2021, https://arxiv.org/abs/2105.08339). The authors
write both scales in https://github.com/amitport/EDEN-Distributed-Mean-Estimation, whose
levels the tests compare. A Hadamard transform with random signs stands for a uniform
rotation, there as here; the unbiased scale is exactly unbiased only with the latter.

THC (Li et al., 2024, https://arxiv.org/abs/2302.08545) rotates all vectors alike, cuts
them off beyond the largest t |x| / sqrt(d) of any worker, where t leaves the share p of
normal numbers outside, and rounds at random to neighbors in a table of integers, which
add up without decoding. This is a reading of the method: no figure of the paper checks
it, and the residuals that return what is cut off are left out.
"""

import functools
import math

import numpy as np
from scipy import stats

SCALES = ("unbiased", "least squares")
GRID, CUT = 30, 1 / 32  # THC: the largest integer of a table of 4 bits, and p


def hadamard(x: np.ndarray) -> np.ndarray:
  """Transforms the last axis by the orthonormal Hadamard matrix, its own inverse."""
  size = x.shape[-1]
  if size & (size - 1):
    raise ValueError(f"x must have a power of two of elements a row, got {size}.")
  width = 1
  while width < size:
    pairs = x.reshape(*x.shape[:-1], -1, 2, width)
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    x = np.stack([first + second, first - second], -2).reshape(x.shape)
    width *= 2
  return x / math.sqrt(size)


@functools.cache
def lloyd_max(bits: int) -> np.ndarray:
  """Returns the levels of least squared error for normal numbers.

  Lloyd's iteration: each level is the mean of the numbers that are nearest to it.
  """
  count = 2**bits
  # Many levels are as dense as the third root of the density (Panter and Dite, 1951).
  levels = math.sqrt(3) * stats.norm.ppf((np.arange(count) + 0.5) / count)
  for _ in range(4000):
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
  if scale == "unbiased":
    factor = norm**2 / along
  else:
    factor = along / np.sum(rounded**2, -1, keepdims=True)
  return signs * hadamard(factor * rounded)


@functools.cache
def thc_table(count: int, grid: int, cut: float) -> tuple[int, ...]:
  """Returns the integers from 0 to ``grid`` of least variance, ``count`` of them.

  They stand for equally spaced numbers from -t to t, and t leaves ``cut`` of the normal
  numbers outside. A number x between neighbors a and b has the variance (b - x)(x - a).
  A dynamic program over the integers finds the least sum.
  """
  cost = interval_costs(grid, cut)
  least, sources = cost[0], []
  for _ in range(count - 2):
    totals = least[:, None] + cost
    sources.append(totals.argmin(0))
    least = totals.min(0)
  places = [grid]
  for source in reversed(sources):
    places.append(int(source[places[-1]]))
  return (0, *reversed(places))


def interval_costs(grid: int, cut: float) -> np.ndarray:
  """Returns the variance from numbers between each two integers, infinite if a >= b."""
  limit = stats.norm.isf(cut / 2)
  edge = np.linspace(-limit, limit, grid + 1)
  density, below = stats.norm.pdf(edge), stats.norm.cdf(edge)
  # Integrals of 1, x and x^2 times the density, up to each edge.
  zeroth, first, second = below, -density, below - edge * density
  a, b = edge[:, None], edge[None, :]
  of = lambda upto: upto[None, :] - upto[:, None]
  cost = (a + b) * of(first) - of(second) - a * b * of(zeroth)
  return np.where(a < b, cost, np.inf)


def thc(x: np.ndarray, bits: int, grid: int, seed: int) -> np.ndarray:
  """Decodes THC's messages, all vectors rotated alike."""
  rng = np.random.default_rng(seed)
  signs = rng.choice([-1.0, 1.0], x.shape[-1])
  largest = np.linalg.norm(x, axis=-1).max()
  limit = stats.norm.isf(CUT / 2) * largest / math.sqrt(x.shape[-1])
  place = (np.clip(hadamard(signs * x) / limit, -1, 1) + 1) * grid / 2
  table = np.asarray(thc_table(2**bits, grid, CUT))
  upper = np.clip(np.searchsorted(table, place), 1, len(table) - 1)
  low, high = table[upper - 1], table[upper]
  codes = np.where(rng.random(x.shape) * (high - low) < place - low, high, low)
  return signs * hadamard((2 * codes / grid - 1) * limit)
