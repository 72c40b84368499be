"""Sign and its votes, but for the last bits of a mean magnitude, which may be given."""

import numpy as np

from tests.specs import one_bit, planes
from tests.specs import scales as scale_table

PER_WORD = 32


def scales_of(x, *, bucket_size, scale):
  """The scales of a leaf's buckets, float32[tiles, 32]; sums are taken in float64."""
  leaf = planes.filled(x, bucket_size) if scale == "mean" else planes.as_leaf(x)
  size = np.abs(np.float64(planes.tiled(leaf, PER_WORD, bucket_size)))
  with np.errstate(invalid="ignore"):
    found = size.mean(axis=-1) if scale == "mean" else np.float64(size.max(axis=-1) > 0)
  return np.float32(np.where(np.isfinite(size).all(axis=-1), found, np.nan))


def encode(x, *, bucket_size, scale, scales=None):
  """The rows of a leaf, uint32[tiles, B + 32], or [tiles, B + 2] of scales of one."""
  if scales is None:
    scales = scales_of(x, bucket_size=bucket_size, scale=scale)
  if scale == "mean":
    words = planes.pack(planes.filled(x, bucket_size) < 0, 1, bucket_size)
    return planes.with_floats(words, scales)
  words = planes.pack(planes.as_leaf(x) < 0, 1, bucket_size)
  flags = [planes.pack(flag, 1, 1) for flag in (scales != 0, np.isnan(scales))]
  return np.concatenate([words, *flags], axis=1)


def decode(rows, size, *, bucket_size, scale):
  """The values of a payload, float32[size]; a bucket with a NaN is NaN."""
  tail = PER_WORD if scale == "mean" else 2
  rows = planes.checked_rows(rows, size, PER_WORD, bucket_size, floats=tail)
  negative = planes.unpack(rows[:, :bucket_size], 1) == 1
  if scale == "mean":
    one_bit.check_copies(negative, size, bucket_size)
    scales = planes.as_floats(rows[:, bucket_size:]).ravel()
    if (np.isinf(scales) | (scales < 0)).any():
      raise ValueError("a mean magnitude must be finite or NaN, and not negative.")
  else:
    planes.refuse_filler(negative[size:])
    some, bad = (planes.unpack(rows[:, [at]], 1) for at in (-2, -1))
    if (bad > some).any():
      raise ValueError("a bucket that is not finite must be marked as not zero.")
    scales = np.where(bad == 1, np.nan, np.float32(some))
  scale_table.nothing_behind(scales, size, bucket_size)
  value = np.float32(scales).repeat(bucket_size)
  return np.where(negative, -value, value)[:size]


def values(x, *, bucket_size, scale):
  """The values that elements become, float32, from the definition."""
  leaf = planes.as_leaf(x)
  scales = scales_of(leaf, bucket_size=bucket_size, scale=scale)
  return np.where(leaf < 0, -1, 1) * scales.repeat(bucket_size)[: leaf.size]


def vote(values, kind):
  """What all workers get of their signs, float32: the mean, or the sign of most."""
  count = np.sum(np.float32(values), axis=0, dtype=np.float32)  # integers: exact
  if kind == "majority":
    return np.sign(count)
  return count * (np.float32(1) / np.float32(len(values)))


def unpack_votes(words, size, workers, *, bucket_size, vote):
  """The counts that an owner sends in the second stage of `two_shot`, float32[size]."""
  most = workers if vote == "mean" else 1
  width = (2 * most + 1).bit_length()
  words = planes.checked_rows(words, size, 32 // width, bucket_size)
  fields = planes.unpack(words, width)
  planes.refuse_filler(fields[size:])
  if (fields > 2 * most + 1).any():
    raise ValueError(f"a count is at most {most}.")
  counts = np.float32(fields[:size].astype(np.int64) - most - 1)
  return np.where(fields[:size] == 0, np.float32(np.nan), counts)
