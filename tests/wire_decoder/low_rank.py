"""Reads payloads of PowerSGD by docs/inside/wire-format.md alone, with NumPy only."""

import math

import numpy as np

from tests.wire_decoder import words


def decode_power_sgd(rows, shape, *, rank, bits=32):
  """The values of a PowerSGD payload, float64 in the shape of the leaf.

  Args:
    rows: uint32[rows, words], those of the left factor, then those of the right one.
    shape: of the leaf.
    rank: the columns of both factors.
    bits: 8 or 32.
  """
  m, n = _cut(shape)
  size = 128 if bits == 32 else 4 * 512
  count = -(-rank * m // size)
  left = _factor(rows[:count], (rank, m), bits)
  right = _factor(rows[count:], (rank, n), bits)
  value = np.zeros((m, n))
  basis = []
  for row, other in zip(left, right, strict=True):
    length = np.linalg.norm(row)
    for column in (*basis, *basis):
      row = row - (row @ column) * column
    if np.linalg.norm(row) > 2.0**-16 * length:
      basis.append(row / np.linalg.norm(row))
      value += np.outer(basis[-1], other)
  return value.reshape(shape)


def _cut(shape):
  cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
  return sorted(cuts, key=lambda cut: (sum(cut), cut[0]))[0]


def _factor(rows, shape, bits):
  size = math.prod(shape)
  if bits == 32:
    flat = words.decode_dense(rows, size, np.float32)
  else:
    hyper = dict(bits=8, bucket_size=512, levels="sign_magnitude")
    flat = words.decode_qsgd(rows, size, **hyper)
  return flat.astype(np.float64).reshape(shape)
