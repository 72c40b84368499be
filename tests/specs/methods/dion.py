"""Dion in float64, from Ahn et al. 2025, algorithm 1; the first axis has the inputs."""

import numpy as np

from tests.specs.power_sgd import compress_and_aggregate


class Dion:
  """The steps of one matrix of parameters and N workers, at the learning rate 1."""

  def __init__(self, q, workers, shape, mu):
    self.q, self.mu = np.array(q, np.float64), mu
    self.momenta = np.zeros((workers, *shape))

  def step(self, gradients):
    """The direction of one step, given all workers' gradients, ``[N, m, n]``."""
    buffers = self.momenta + np.asarray(gradients, np.float64)
    p, r = compress_and_aggregate(buffers, self.q)
    self.momenta = buffers - (1 - self.mu) * p @ r.T
    self.q = r / np.linalg.norm(r, axis=0)
    m, n = buffers.shape[1:]
    return np.sqrt(n / m) * p @ self.q.T
