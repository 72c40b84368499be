"""EightBit, with the data types of Dettmers 2016, section 3.1."""

import functools
from fractions import Fraction

import numpy as np

from tests.specs import dithers, planes, qsgd
from tests.specs import scales as scale_table

# First splits of (0.1, 1): of the paper's examples, and of its text.
AT_0_45, AT_ONCE = Fraction(45, 100), Fraction(55, 100)
DATA_TYPES = ("dynamic_tree", "dynamic_map", "static_tree", "linear", "mantissa")


@functools.cache
def levels(data_type):
  """The magnitudes of positive numbers in the order of their codes, float64."""
  if data_type == "linear":
    return np.arange(128) / 127
  if data_type == "mantissa":
    integers = {k * 10 ** (7 - e) for e in range(8) for k in range(16)}
    return np.array(sorted(integers)) / 15e7
  if data_type == "static_tree":
    table = [tree(j, 4, AT_ONCE) / 10 ** (7 - e) for e in range(8) for j in range(16)]
  else:
    # Seven bits: n zeros, the flag, and 6 - n bits of the tree; or seven zeros.
    first = AT_0_45 if data_type == "dynamic_tree" else AT_ONCE
    table = [Fraction(0)]
    for n in range(6, -1, -1):
      table += [tree(j, 6 - n, first) / 10**n for j in range(2 ** (6 - n))]
  numbers = [0.0, *map(float, table[1:])]  # each rounded once
  return np.array(numbers + [1.0] * (data_type == "dynamic_map"))


def tree(path, bits, first):
  """Returns where the cell at the end of a path would be split next, a Fraction.

  The highest of the path's bits is its first step: 1 to the upper part of (0.1, 1),
  which is split at ``first``; all other splits bisect.
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
  found = []
  for code, gap in enumerate(np.diff(table)):
    # Float64 noise of the differences is below 1e-8 of them; steps differ by a third.
    if not found or abs(gap / found[-1][2] - 1) > 1e-6:
      found.append((table[code], code, gap))
  return found


def fixed_scale(data_type, exponent_offset):
  """The scale of an offset, float32."""
  unit = 1.5 if data_type == "mantissa" else 1.0
  return np.float32(unit * 10.0**exponent_offset)


def scales_of(
  x, *, data_type, bucket_size, rounding="nearest", exponent_offset=None, **rows
):
  """The scales that a row carries, float32[tiles, P], or [tiles, 1] by tensor."""
  scales = qsgd.scales_of(x, bits=8, bucket_size=bucket_size, norm="max", **rows)
  if exponent_offset is not None:
    return np.where(np.isnan(scales), scales, fixed_scale(data_type, exponent_offset))
  if rounding == "stochastic":
    with np.errstate(over="ignore"):
      scales = scales * np.float32(1 / largest_of_both_signs(data_type))
  return np.minimum(scales, scale_table.LARGEST)


def encode(
  x, *, key=None, data_type, bucket_size, scales=None, rounding="nearest", **offset
):
  """The rows of a leaf, uint32[tiles, B + scales]."""
  rule = dict(data_type=data_type, bucket_size=bucket_size)
  if scales is None:
    scales = scales_of(x, rounding=rounding, **rule, **offset)
  tiles = planes.tiled(planes.as_leaf(x), *planes.geometry(8, bucket_size))
  scales = scale_table.given(scales, len(tiles), 4, bucket_size)
  with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
    factor = np.where(scales == 0, np.float32(0), np.float32(2**16) / scales)
    t = np.abs(tiles) * factor[:, :, None]
  fixed = _positions(np.where(np.isnan(t), np.float32(0), t), data_type)
  addend = dithers.addend(rounding, tiles, key, bits=8, bucket_size=bucket_size)
  last = len(levels(data_type)) - 1
  top = np.where(tiles < 0, min(last, 127), last).astype(np.int64)
  codes = (np.minimum(fixed, top << 16) + np.int64(addend)) >> 16
  codes = np.where((tiles < 0) & (codes > 0), codes + 128, codes)
  return planes.with_floats(planes.pack(codes, 8, bucket_size), scales)


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


def nearest(t, data_type):
  """The magnitude's code nearest to each signed t, by search in float64."""
  table = levels(data_type)
  above = np.clip(np.searchsorted(table, np.abs(t)), 1, len(table) - 1)
  lower = np.abs(t) - table[above - 1] < table[above] - np.abs(t)
  # Only dynamic_map has more, one for positive numbers alone.
  return np.where(t < 0, np.minimum(above - lower, 127), above - lower)


def decode(rows, size, *, data_type, bucket_size, exponent_offset=None):
  words = planes.geometry(8, bucket_size)[1]
  floats = 1 if bucket_size is None else 4
  rows = planes.checked_rows(rows, size, 4, words, floats)
  if exponent_offset is None:
    scale = scale_table.read(rows[:, words:], size, 4, words)
  else:
    fixed = fixed_scale(data_type, exponent_offset)
    scale = scale_table.per_element(planes.as_floats(rows[:, words:]), 4, words)
    if not (np.isnan(scale) | (scale == fixed)).all():
      raise ValueError(f"a scale must be {fixed} or NaN.")
  codes = planes.unpack(rows[:, :words], 8)
  planes.refuse_filler(codes[size:][np.isfinite(scale[size:])])
  table = np.float32(levels(data_type))
  positive = codes < (129 if data_type == "dynamic_map" else 128)
  magnitude = np.where(positive, codes, codes & np.uint32(127))
  if (magnitude >= len(table)).any() or not magnitude[~positive].all():
    raise ValueError(f"a magnitude is below {len(table)}; zero has no sign.")
  value = table[magnitude] * scale
  return np.where(positive, value, -value)[:size]
