"""Levels that lose least of normal numbers when each is rounded to the nearest."""

import functools
import math
from statistics import NormalDist

import numpy as np


@functools.cache
def normal_levels(bits: int) -> np.ndarray:
  """Returns the positive ones of ``2**bits`` levels for a standard normal number.

  Each is the mean of the numbers that are nearest to it (Lloyd, 1957; Max, 1960), found
  by Newton's method, and rounded to a multiple of 2**-16, so that hosts with other
  libraries of mathematics have the same bits.

  Example:
    >>> normal_levels(2)
    array([0.45277405, 1.5104218 ], dtype=float32)
  """
  count, normal = 2 ** (bits - 1), NormalDist()
  # Many levels are as dense as the third root of the density (Panter and Dite, 1951).
  start = [normal.inv_cdf((count + i + 0.5) / (2 * count)) for i in range(count)]
  levels = math.sqrt(3) * np.array(start)
  for _ in range(12):
    edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    above = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in edges])
    share = above[:-1] - above[1:]
    mean = (density[:-1] - density[1:]) / share
    # By how much a mean moves with the edge below and above, half as fast as a level.
    below = (mean - edges[:-1]) * density[:-1] / share / 2
    over = (edges[1:-1] - mean[:-1]) * density[1:-1] / share[:-1] / 2
    slopes = np.diag(1 - np.append(0.0, below[1:]) - np.append(over, 0.0))
    slopes -= np.diag(below[1:], -1) + np.diag(over, 1)
    levels = levels - np.linalg.solve(slopes, levels - mean)
  return (np.round(levels * 2**16) / 2**16).astype(np.float32)
