"""PowerSGD in float64, from Vogels et al. 2019, and its payload."""

import math

import numpy as np

from tests.specs import dense, dithers, qsgd

EIGHT_BITS = dict(bits=8, bucket_size=512, levels="sign_magnitude")
# By the bits of a number its module, its fields, and what only the writer takes.
CODERS = {
  32: (dense, dict(dtype=np.float32), {}),
  8: (qsgd, EIGHT_BITS, dict(norm="max", rounding="nearest")),
}


def matrix_of(shape):
  """The matrix that a leaf is: m and n."""
  cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
  return min(cuts, key=lambda cut: (sum(cut), cut[0]))


def start(key, rank, n):
  """The rows of a start, float64[rank, n]."""
  h = -(-n // 2)
  words = dithers.threefry2x32(key, np.arange(rank)[:, None], np.arange(h))
  signed = np.concatenate(words, axis=1)[:, :n].view(np.int32)
  return (signed >> 8) * 2.0**-23


def orthonormal_rows(rows):
  """Each row less its projections on those before it, over its length, or zero."""
  basis = []
  for row in rows:
    length = np.linalg.norm(row)
    for other in (*basis, *basis):
      row = row - (row @ other) * other
    rest = np.linalg.norm(row)
    basis.append(row / rest if rest > 2.0**-16 * length else np.zeros_like(row))
  return np.array(basis)


def encode(x, *, rank, bits=32):
  """The rows of one worker alone, both factors: uint32[rows, words]; it is rounded."""
  m, n = matrix_of(np.shape(x))
  matrix = np.float64(x).reshape(m, n)
  left = start((0, 0), rank, n) @ matrix.T
  right = orthonormal_rows(left) @ matrix
  coder, fields, more = CODERS[bits]
  return np.concatenate([coder.encode(x, **fields, **more) for x in (left, right)])


def decode(rows, shape, *, rank, bits=32):
  """The values of a payload, float64 in the shape of the leaf."""
  m, n = matrix_of(shape)
  count = -(-rank * m // (128 if bits == 32 else 4 * 512))
  factors, (coder, fields, _) = [], CODERS[bits]
  for part, width in ((rows[:count], m), (rows[count:], n)):
    flat = coder.decode(part, rank * width, **fields)
    factors.append(flat.astype(np.float64).reshape(rank, width))
  return (orthonormal_rows(factors[0]).T @ factors[1]).reshape(shape)


def compress_and_aggregate(matrices, q):
  """Algorithm 1 of [N, m, n]: orthonormal columns [m, r], and a factor [n, r]."""
  p = np.mean([matrix @ q for matrix in matrices], axis=0)
  p = orthonormal_rows(p.T).T
  return p, np.mean([matrix.T @ p for matrix in matrices], axis=0)


class ErrorFeedbackSGD:
  """Algorithm 2 for one matrix of parameters and N workers, momentum around it."""

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
    mean = p @ self.q.T
    self.errors = corrected - mean
    self.m = self.momentum * self.m + mean
    self.x -= self.learning_rate * (mean + self.m)
    return mean


class AlternateSGD:
  """Gradient descent by ACP-SGD (Zhang et al. 2023), for one matrix and N workers."""

  def __init__(self, shape, q, workers):
    self.factor = np.array(q, np.float64)
    self.errors = np.zeros((workers, *shape))
    self.sends_left = True

  def step(self, gradients):
    """The mean that the factors of one step stand for, given all workers' gradients."""
    sided = (lambda x: x) if self.sends_left else (lambda x: x.swapaxes(-1, -2))
    corrected = sided(np.asarray(gradients, np.float64) + self.errors)
    basis = orthonormal_rows(self.factor.T).T
    own = corrected @ basis
    self.errors = sided(corrected - own @ basis.T)
    self.factor = own.mean(axis=0)
    self.sends_left = not self.sends_left
    return sided(self.factor @ basis.T)
