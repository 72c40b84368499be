"""Computes PowerSGD in plain NumPy and float64, for the library to agree with.

From Vogels et al. 2019: algorithm 1, the low-rank step over N workers, and algorithm 2,
gradient descent with error feedback and momentum around it.
"""

import numpy as np


def orthogonalize(p):
  """Orthonormal columns with the spans of the first columns, one after another.

  Householder's factors have them up to signs; Gram and Schmidt's have the signs of the
  columns themselves.
  """
  q, r = np.linalg.qr(p)
  return q * np.where(np.diag(r) < 0, -1.0, 1.0)


def compress_and_aggregate(matrices, q):
  """Algorithm 1: the factors of the mean of all workers' matrices.

  Args:
    matrices: `[N, m, n]`.
    q: the right factor of the step before, `[n, r]`.

  Returns:
    `[m, r]` with orthonormal columns, and `[n, r]`.
  """
  p = np.mean([matrix @ q for matrix in matrices], axis=0)
  p = orthogonalize(p)
  q = np.mean([matrix.T @ p for matrix in matrices], axis=0)
  return p, q


def decompress(p, q):
  """The matrix that two factors stand for."""
  return p @ q.T


class ErrorFeedbackSGD:
  """Algorithm 2 for one matrix of parameters and N workers."""

  def __init__(self, x, q, workers, learning_rate, momentum):
    self.x = np.array(x, np.float64)
    self.q = np.array(q, np.float64)
    self.errors = np.zeros((workers, *self.x.shape))
    self.m = np.zeros_like(self.x)
    self.learning_rate, self.momentum = learning_rate, momentum

  def step(self, gradients):
    """One step with the gradients of all workers; returns what they decompress."""
    corrected = np.asarray(gradients, np.float64) + self.errors
    p, self.q = compress_and_aggregate(corrected, self.q)
    mean = decompress(p, self.q)
    self.errors = corrected - mean
    self.m = self.momentum * self.m + mean
    self.x -= self.learning_rate * (mean + self.m)
    return mean


class AlternateSGD:
  """Gradient descent by ACP-SGD (Zhang et al. 2023), for one matrix and N workers.

  Each worker's error is what its own factor lacks of its own matrix.
  """

  def __init__(self, shape, q, workers):
    self.factor = np.array(q, np.float64)
    self.errors = np.zeros((workers, *shape))
    self.sends_left = True

  def step(self, gradients):
    """The mean that the factors of one step stand for, given all workers' gradients."""
    corrected = np.asarray(gradients, np.float64) + self.errors
    basis = orthogonalize(self.factor)
    sided = corrected if self.sends_left else corrected.swapaxes(1, 2)
    own = sided @ basis
    lost = sided - own @ basis.T
    self.errors = lost if self.sends_left else lost.swapaxes(1, 2)
    self.factor = own.mean(axis=0)
    mean = self.factor @ basis.T
    result = mean if self.sends_left else mean.T
    self.sends_left = not self.sends_left
    return result
