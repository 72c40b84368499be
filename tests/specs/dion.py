"""Computes Dion in plain NumPy and float64, for the library to agree with.

From Ahn et al. 2025, algorithm 1, with momenta of N workers that are averaged as
factors alone. Its matrices are transposed here: the first axis has the inputs.
"""

import numpy as np

from tests.specs.power_sgd import compress_and_aggregate, decompress


class Dion:
  """The steps of one matrix of parameters and N workers, at the learning rate 1."""

  def __init__(self, q, workers, shape, mu):
    self.q = np.array(q, np.float64)
    self.momenta = np.zeros((workers, *shape))
    self.mu = mu

  def step(self, gradients):
    """The direction of one step, given all workers' gradients, ``[N, m, n]``."""
    buffers = self.momenta + np.asarray(gradients, np.float64)
    p, r = compress_and_aggregate(buffers, self.q)
    self.momenta = buffers - (1 - self.mu) * decompress(p, r)
    self.q = r / np.linalg.norm(r, axis=0)
    m, n = buffers.shape[1:]
    return np.sqrt(n / m) * decompress(p, self.q)
