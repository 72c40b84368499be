"""Computes EightBit in plain NumPy, for the library to agree with.

Two descriptions of the same quantiser, neither taken from the library:

* :func:`eight_bit_encode` follows docs/inside/wire-format.md bit by bit;
* :func:`levels` are the data types of Dettmers 2016, section 3.1, and :func:`nearest`
  is a search for the nearest level, both in float64.
"""

from fractions import Fraction

import numpy as np

from tests.oracles import qsgd

# First splits of (0.1, 1): of the paper's examples, and of its text.
AT_0_45, AT_ONCE = Fraction(45, 100), Fraction(55, 100)
DATA_TYPES = ("dynamic_tree", "dynamic_map", "static_tree", "linear", "mantissa")


def levels(data_type):
  """The magnitudes of positive numbers in the order of their codes, float64.

  Example:
    >>> len(levels("dynamic_map")), len(levels("mantissa"))
    (129, 114)
  """
  if data_type == "linear":
    return np.arange(128) / 127
  if data_type == "mantissa":
    integers = {k * 10 ** (7 - e) for e in range(8) for k in range(16)}
    return np.array(sorted(integers)) / 15e7
  if data_type == "static_tree":
    table = [tree(j, 4, AT_ONCE) / 10 ** (7 - e) for e in range(8) for j in range(16)]
  elif data_type in ("dynamic_tree", "dynamic_map"):
    # Seven bits: n zeros, the flag, and 6 - n bits of the tree; or seven zeros.
    first = AT_0_45 if data_type == "dynamic_tree" else AT_ONCE
    table = [Fraction(0)]
    for n in range(6, -1, -1):
      table += [tree(j, 6 - n, first) / 10**n for j in range(2 ** (6 - n))]
  else:
    raise ValueError(f"no data type {data_type!r}.")
  numbers = [0.0, *map(float, table[1:])]  # each rounded once
  return np.array(numbers + [1.0] * (data_type == "dynamic_map"))


def tree(path, bits, first):
  """Returns where the cell at the end of a path would be split next, a Fraction.

  Args:
    path: an integer, whose highest bit is the first step: 1 to the upper part.
    bits: the steps of the path.
    first: the split of (0.1, 1); all others bisect.
  """
  low, high, split = Fraction(1, 10), Fraction(1), first
  for step in reversed(range(bits)):
    low, high = (split, high) if path >> step & 1 else (low, split)
    split = (low + high) / 2
  return split


def largest_of_both_signs(data_type):
  """The largest magnitude that negative numbers have too."""
  return levels(data_type)[:128][-1]


def lines(data_type):
  """The runs of equally spaced levels: (first level, its code, distance), float64."""
  table = levels(data_type)
  gaps = np.diff(table)
  found = []
  for code, gap in enumerate(gaps):
    # Float64 noise of the differences is below 1e-8 of them; steps differ by a third.
    if not found or abs(gap / found[-1][2] - 1) > 1e-6:
      found.append((table[code], code, gap))
  return found


def eight_bit_scales(
  x,
  *,
  data_type,
  bucket_size,
  rounding="nearest",
  exponent_offset=None,
  scale_per_row=False,
):
  """The scales that a row carries, float32[tiles, P], or [tiles, 1] by tensor.

  Args:
    x: the leaf, of any shape.
    data_type: one of `DATA_TYPES`.
    bucket_size: the elements that share a scale; None is one scale a tensor.
    rounding: "nearest" or "stochastic".
    exponent_offset: None, or k for fixed scales of 10^k, or 1.5 * 10^k for "mantissa".
    scale_per_row: by tensor, one scale for each row, as in later stages.
  """
  scales = qsgd.qsgd_scales(
    x, bits=8, bucket_size=bucket_size, norm="max", scale_per_row=scale_per_row
  )
  if exponent_offset is not None:
    fixed = (1.5 if data_type == "mantissa" else 1.0) * 10.0**exponent_offset
    return np.where(np.isnan(scales), scales, np.float32(fixed))
  if rounding == "stochastic":
    with np.errstate(over="ignore"):
      scales = scales * np.float32(1 / largest_of_both_signs(data_type))
  return np.minimum(scales, np.finfo(np.float32).max)


def eight_bit_encode(
  x,
  *,
  key=None,
  data_type,
  bucket_size,
  scales,
  rounding="nearest",
  lanes=None,
  first_row=0,
):
  """The rows that the specification asks for, uint32[tiles, B + scales].

  Where the scale is NaN the page leaves the codes open; here they are those of zero.

  Args:
    x: the leaf, of any shape.
    key: the leaf's key, two 32-bit words; only read for stochastic rounding.
    data_type: one of `DATA_TYPES`.
    bucket_size: the elements that share a scale; None is one scale a tensor.
    scales: float32[tiles, P or 1], as :func:`eight_bit_scales`.
    rounding: "nearest" or "stochastic".
    lanes: uint32[tiles, P, B] to use instead of those of the key.
    first_row: the index of the first row, for the key's.
  """
  words = qsgd.PER_TENSOR_WORDS if bucket_size is None else bucket_size
  tiles = qsgd.tiled(qsgd.as_leaf(x), 4, words)
  scales = np.asarray(scales, np.float32)
  expected = (len(tiles), 1 if bucket_size is None else 4)
  if scales.shape != expected:
    raise ValueError(f"`scales` must have the shape {expected}, got {scales.shape}.")
  with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
    factor = np.where(scales == 0, np.float32(0), np.float32(2**16) / scales)
    t = np.abs(tiles) * factor[:, :, None]
  fixed = _positions(np.where(np.isnan(t), np.float32(0), t), data_type)
  if rounding == "stochastic" and lanes is None:
    lanes = qsgd.random_lanes(
      key, len(tiles), bits=8, bucket_size=bucket_size, first_row=first_row
    )
  addend = np.int64(2**15)
  if rounding == "stochastic":
    addend = qsgd.signed_lanes(lanes, tiles).astype(np.int64)
  last = len(levels(data_type)) - 1
  top = np.where(tiles < 0, min(last, 127), last).astype(np.int64)
  codes = (np.minimum(fixed, top << 16) + addend) >> 16
  codes = np.where((tiles < 0) & (codes > 0), codes + 128, codes)
  packed = qsgd.pack(codes, 8, words)
  return np.concatenate([packed, scales.view(np.uint32)], axis=1)


def nearest(t, data_type):
  """The magnitude's code nearest to each signed t, by search in float64."""
  table = levels(data_type)
  above = np.clip(np.searchsorted(table, np.abs(t)), 1, len(table) - 1)
  lower = np.abs(t) - table[above - 1] < table[above] - np.abs(t)
  # Only dynamic_map has more, one for positive numbers alone.
  return np.where(t < 0, np.minimum(above - lower, 127), above - lower)


def _positions(t, data_type):
  """How far along the codes t >= 0 is, int64; both in 2^-16 of one, or of the scale."""
  fixed = None
  for first, code, distance in lines(data_type):
    slope = np.float32(1 / distance)
    offset = round(2.0**16 * (code - first / distance))
    with np.errstate(over="ignore"):
      product = np.trunc(np.minimum(t * slope, np.float32(2**40))).astype(np.int64)
    here = product + offset
    start = np.float32(2.0**16 * first)
    fixed = here if fixed is None else np.where(t >= start, here, fixed)
  return fixed
