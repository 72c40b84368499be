"""RandomK: one element of each stride, at a place that the row's key draws."""

import numpy as np

from tests.specs import dithers, planes
from tests.specs.top_k import entries_of


def stride_of(density, size):
  """The elements of which one is sent."""
  return -(-size // entries_of(density, size))


def row_keys(key, rows):
  """The key of each row of a leaf, from the leaf's, uint32[rows, 2]."""
  number = np.arange(rows)
  return np.stack(dithers.threefry2x32(key, number, number), axis=1)


def places(row_key, range_size, stride):
  """The elements of a row, int64[S]; `range_size` and more stand for nothing."""
  entry = np.arange(-(-range_size // stride), dtype=np.uint32)
  drawn = dithers.threefry2x32(row_key, entry, 0)[0] % stride
  return (entry * stride + drawn).astype(np.int64)


def positions(key, rows, size, density):
  """The elements of each of a leaf's rows, int64[rows, S], of `size` elements each."""
  stride = stride_of(density, size)
  return np.array([places(own, size, stride) for own in row_keys(key, rows)])


def encode(x, *, key, range_size, stride):
  """The rows of a leaf that is finite, uint32[ranges, 2 + S]."""
  parts = planes.tiled(planes.as_leaf(x), 1, range_size)[:, 0]
  keys, rows = row_keys(key, len(parts)), []
  for own, part in zip(keys, np.pad(parts, ((0, 0), (0, stride))), strict=True):
    rows.append(part[places(own, range_size, stride)])
  return planes.with_floats(keys, rows)


def decode(rows, size, *, range_size, stride):
  shape = (-(-size // range_size), 2 + -(-range_size // stride))
  rows = planes.checked(rows, shape)
  result = np.zeros((len(rows), range_size + stride), np.float32)
  for line, row in zip(result, rows, strict=True):
    line[places(row[:2], range_size, stride)] = planes.as_floats(row[2:])
  if result[:, range_size:].any():
    raise ValueError("a value behind the range must be zero.")
  return result[:, :range_size].ravel()[:size]
