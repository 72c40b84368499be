"""TopK: its selections by sorting and by Fang et al. 2018, and its rows."""

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tests.specs import planes

NAN_ORDER = 0x7F800001
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def range_of(size, owners=1):
  """n, the elements of a range of a leaf of so many elements."""
  ranges = owners
  while size > ranges * 2**30:
    ranges *= 2
  return -(-size // ranges)


def entries_of(density, size):
  """k: how many elements of a range are sent."""
  return max(1, min(size, math.ceil(density * size * (1 - 2.0**-40))))


def slots_of(density, size, selection="auto", slack=2.0):
  """S: entries that a row has room for."""
  k = entries_of(density, size)
  if selection == "auto":
    selection = "exact" if size < 2**20 else "threshold"  # trimmed has k slots, too
  searched = selection in ("threshold", "sampled")
  return min(size, math.floor(slack * k)) if searched else k


def order(x):
  """Magnitudes as integers: of numbers, infinities above these, NaN above all."""
  bits = np.asarray(x, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
  return np.minimum(bits, NAN_ORDER).astype(np.int64)


def largest(x, k):
  """The magnitudes of the k largest, in descending order, as of :func:`order`."""
  bits = order(x)
  return np.sort(np.partition(bits, bits.size - k)[bits.size - k :])[::-1]


def positions_of_largest(x, k):
  """Where these are, of equal elements the first ones."""
  return np.sort(np.argsort(-order(x), kind="stable")[:k])


def trimmed(x, k):
  """Algorithm 2: the positions of the top k of what a lowered threshold leaves."""
  v = np.abs(np.asarray(x, np.float64))
  mean, top = v.mean(), v.max()
  for ratio in (0.8, 0.6, 0.4, 0.2, 0.0, -0.2):
    survivors = np.flatnonzero(v > mean + ratio * (top - mean))
    if survivors.size >= k:
      break
  else:  # few are above the mean, and equal elements never are: none is trimmed
    survivors = np.arange(v.size)
  return survivors[positions_of_largest(np.asarray(x)[survivors], k)]


def threshold_ratio(x, k, most, eps=1e-3):
  """Algorithm 3: a threshold and how many elements exceed it, when the search ends."""
  v = np.abs(np.asarray(x, np.float64))
  mean, top = v.mean(), v.max()
  low, high = 0.0, 1.0
  while True:
    middle = (low + high) / 2
    threshold = mean + middle * (top - mean)
    count = int((v > threshold).sum())
    if k <= count <= most or high - low < eps:
      return threshold, count
    low, high = (middle, high) if count > most else (low, middle)


def exact(x, density):
  """What the k largest elements decode to: float32 with zeros elsewhere."""
  x = np.asarray(x, np.float32)
  result = np.zeros_like(x)
  chosen = positions_of_largest(x, entries_of(density, x.size))
  result[chosen] = x[chosen]
  return result


class Entries(NamedTuple):
  """What one row says: positions in its range, float32 values, in the row's order."""

  positions: np.ndarray
  values: np.ndarray


def _layout(range_size, slots, quantize, value_dtype):
  """Elements of a block, blocks, index words, and words of values of a row."""
  block = 32768 if quantize == "mean" else 65536
  half = -(-slots // 2)
  words = slots if value_dtype == "float32" else half
  means = {"asq": 1, "mean": 2}.get(quantize, words)
  return block, -(-range_size // block), half, means


def encode(
  x, *, range_size, slots, quantize=None, value_dtype="float32", positions=None
):
  """The rows of a leaf, uint32[ranges, words]; entries by their places."""
  block, blocks, half, _ = _layout(range_size, slots, quantize, value_dtype)
  rows = []
  for part in planes.tiled(planes.as_leaf(x), 1, range_size)[:, 0]:
    place = positions
    if place is None:
      own = np.flatnonzero(part > 0) if quantize == "asq" else np.arange(range_size)
      place = own[positions_of_largest(part[own], min(slots, own.size))]
    ends = np.searchsorted(place, block * np.arange(1, blocks + 1))
    chosen = part[place]
    codes = place % block
    if quantize == "mean":
      codes = codes | (chosen < 0) * block
      groups = chosen[chosen >= 0], chosen[chosen < 0]
      tail = np.float32([g.mean() if g.size else 0 for g in groups]).view(np.uint32)
    elif quantize == "asq":
      tail = np.float32([chosen.mean() if chosen.size else 0]).view(np.uint32)
    else:
      tail = _value_words(chosen, slots, value_dtype)
    words = ends.astype(np.uint32), _joined(codes, half), tail
    rows.append(np.concatenate(words))
  return np.array(rows, np.uint32)


def _joined(codes, half):
  """16-bit codes as words: all low halves, then all high ones."""
  codes = np.pad(np.asarray(codes, np.uint32), (0, 2 * half - len(codes)))
  return codes[:half] | codes[half:] << np.uint32(16)


def _value_words(values, slots, value_dtype):
  if value_dtype == "float32":
    return np.pad(values, (0, slots - values.size)).view(np.uint32)
  dtype = DTYPES[value_dtype]
  top = np.float32(ml_dtypes.finfo(dtype).max)
  values = np.where(np.isfinite(values), np.clip(values, -top, top), values)
  return _joined(values.astype(dtype).view(np.uint16), -(-slots // 2))


def entries(rows, *, range_size, slots, quantize=None, value_dtype="float32"):
  """The entries of each row of a payload, a list; arguments as of :func:`encode`."""
  block, blocks, half, words = _layout(range_size, slots, quantize, value_dtype)
  rows = planes.checked(rows, (len(rows), blocks + half + words))
  result = []
  for row in rows:
    ends = row[:blocks].astype(np.int64)
    used = int(ends[-1])
    if (np.diff(ends) < 0).any() or used > slots:
      raise ValueError(f"ends must not descend, nor the last exceed {slots}.")
    codes = _halves(row[blocks : blocks + half], slots)
    if codes[used:].any():
      raise ValueError("the codes of unused slots must be zero.")
    place = codes[:used] % block
    positions = np.searchsorted(ends, np.arange(used), side="right") * block + place
    if (positions >= range_size).any() or len(set(positions.tolist())) < used:
      raise ValueError("positions must be in the range, and no two the same.")
    tail = np.ascontiguousarray(row[blocks + half :])
    if quantize == "mean":
      values = _of_two_means(planes.as_floats(tail), codes[:used] >= block)
    elif quantize == "asq":
      values = np.full(used, planes.as_floats(tail)[0], np.float32)
      if not used and tail.any():
        raise ValueError("the mean of no entries must be zero.")
    else:
      if value_dtype == "float32":
        values = planes.as_floats(tail)
      else:
        patterns = _halves(tail, slots).astype(np.uint16)
        values = patterns.view(DTYPES[value_dtype]).astype(np.float32)
      if values[used:].view(np.uint32).any():
        raise ValueError("the values of unused slots must be zero.")
    result.append(Entries(positions, values[:used]))
  return result


def decode(rows, size, *, range_size, **options):
  """The values of a payload, float32[size]; options of :func:`entries`."""
  if len(rows) != -(-size // range_size):
    raise ValueError(f"the rows must be those of {size} elements, got {len(rows)}.")
  result = np.zeros((len(rows), range_size), np.float32)
  found = entries(rows, range_size=range_size, **options)
  for line, (positions, values) in zip(result, found, strict=True):
    line[positions] = values
  return result.ravel()[:size]


def _halves(words, count):
  """`count` codes of 16 bits: all low halves, then all high ones; a spare is zero."""
  codes = np.concatenate([words & 0xFFFF, words >> 16]).astype(np.int64)
  if codes[count:].any():
    raise ValueError("a half word behind the last slot must be zero.")
  return codes[:count]


def _of_two_means(means, negative):
  if means[0] < 0 or means[1] > 0:
    raise ValueError("the means must have the signs of what they stand for.")
  for mean, own in zip(means, (~negative, negative), strict=True):
    if mean != 0 and not own.any():
      raise ValueError("the mean of no entries must be zero.")
  return np.where(negative, means[1], means[0]).astype(np.float32)
