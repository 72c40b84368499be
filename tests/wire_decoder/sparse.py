"""Reads payloads of TopK and RandomK.

Like words.py: from docs/inside/wire-format.md alone, with NumPy only, and refusing,
with ``ValueError``, what no encoder that follows the page could have sent.
"""

from typing import NamedTuple

import numpy as np

from tests.oracles import qsgd
from tests.wire_decoder.words import checked_words, floats_of_words


class Entries(NamedTuple):
  """What one row says: positions in its range, float32 values, in the row's order."""

  positions: np.ndarray
  values: np.ndarray


def range_of(size, owners=1):
  """n, the elements of a range of a leaf of so many elements.

  Args:
    size: the number of elements of the leaf.
    owners: N in two_shot and hierarchical, else 1.
  """
  ranges = owners
  while size > ranges * 2**30:
    ranges *= 2
  return -(-size // ranges)


def top_k_entries(rows, *, range_size, slots, quantize=None, value_dtype="float32"):
  """The entries of each row of a TopK payload, a list.

  Args:
    rows: uint32[ranges, words], the payload.
    range_size: n, the elements of a range.
    slots: S.
    quantize: None, "asq" or "mean".
    value_dtype: "float32", "bfloat16" or "float16".
  """
  rows = checked_words(rows, (2,), "rows")
  block = 32768 if quantize == "mean" else 65536
  blocks, half = -(-range_size // block), -(-slots // 2)
  means = {"asq": 1, "mean": 2}.get(quantize)
  words = slots if value_dtype == "float32" else half
  expected = blocks + half + (words if means is None else means)
  if rows.shape[1] != expected:
    raise ValueError(f"a row must have {expected} words, got {rows.shape[1]}.")
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
      values = _of_two_means(floats_of_words(tail), codes[:used] >= block)
    elif quantize == "asq":
      values = np.full(used, floats_of_words(tail)[0], np.float32)
      if not used and tail.any():
        raise ValueError("the mean of no entries must be zero.")
    else:
      values = _values(tail, slots, value_dtype)
      if values[used:].view(np.uint32).any():
        raise ValueError("the values of unused slots must be zero.")
    result.append(Entries(positions, values[:used]))
  return result


def decode_top_k(rows, size, *, range_size, **options):
  """The values of a TopK payload, float32[size]; options of :func:`top_k_entries`."""
  if len(rows) != -(-size // range_size):
    raise ValueError(f"the rows must be those of {size} elements, got {len(rows)}.")
  result = np.zeros((len(rows), range_size), np.float32)
  for line, entries in zip(
    result, top_k_entries(rows, range_size=range_size, **options), strict=True
  ):
    line[entries.positions] = entries.values
  return result.ravel()[:size]


def decode_random_k(rows, size, *, range_size, stride):
  """The values of a RandomK payload, float32[size].

  Args:
    rows: uint32[ranges, words], the payload.
    size: the number of elements of the leaf.
    range_size: n, the elements of a range.
    stride: the elements of which one is sent.
  """
  rows = checked_words(rows, (2,), "rows")
  slots = -(-range_size // stride)
  if rows.shape != (-(-size // range_size), 2 + slots):
    raise ValueError(f"the rows have the wrong shape {rows.shape}.")
  result = np.zeros((len(rows), range_size), np.float32)
  for line, row in zip(result, rows, strict=True):
    entry = np.arange(slots, dtype=np.uint32)
    place = entry * stride + qsgd.threefry2x32(row[:2], entry, 0)[0] % stride
    values, inside = floats_of_words(row[2:]), place < range_size
    if values[~inside].any():
      raise ValueError("a value behind the range must be zero.")
    line[place[inside]] = values[inside]
  return result.ravel()[:size]


def _halves(words, count):
  """`count` codes of 16 bits: all low halves, then all high ones; a spare is zero."""
  codes = np.concatenate([words & 0xFFFF, words >> 16]).astype(np.int64)
  if codes[count:].any():
    raise ValueError("a half word behind the last slot must be zero.")
  return codes[:count]


def _values(words, slots, value_dtype):
  if value_dtype == "float32":
    return floats_of_words(words)
  codes = _halves(words, slots)
  if value_dtype == "bfloat16":
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
  return codes.astype(np.uint16).view(np.float16).astype(np.float32)


def _of_two_means(means, negative):
  positive_mean, negative_mean = means
  if positive_mean < 0 or negative_mean > 0:
    raise ValueError("the means must have the signs of what they stand for.")
  for mean, own in ((positive_mean, ~negative), (negative_mean, negative)):
    if mean != 0 and not own.any():
      raise ValueError("the mean of no entries must be zero.")
  return np.where(negative, negative_mean, positive_mean).astype(np.float32)
