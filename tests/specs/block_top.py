"""BlockTop: blocks are sorted."""

import numpy as np

from tests.specs import planes, qsgd
from tests.specs import scales as scale_table

WORDS = 32
SMALL = np.float32(0.375)


def _layout(block_size, value_bits):
  """The bits of a code and of a value below its place, and the blocks of a tile."""
  below = value_bits if value_bits < 32 else 0
  bits = block_size.bit_length() - 1 + below
  return bits, below, 32 // bits * WORDS


def cut(x, block_size):
  """Elements without the bits that do not count: as many as a place has."""
  bits = np.float32(x).view(np.uint32)
  return (bits & ~np.uint32(block_size - 1)).view(np.float32)


def encode(x, *, block_size, count, value_bits):
  """The rows of a leaf, uint32[tiles, words]."""
  bits, below, blocks = _layout(block_size, value_bits)
  tiles = planes.tiled(planes.as_leaf(x), blocks, block_size)
  order = np.abs(cut(tiles, block_size)).view(np.uint32).astype(np.int64)
  places = np.argsort(-order, axis=2, kind="stable")[:, :, :count]  # first of equals
  value = np.take_along_axis(tiles, places, axis=2)
  tail = []
  if value_bits < 32:
    value = cut(value, block_size)
    norms = np.abs(value).max(axis=(1, 2), initial=0)
    scale = scale_table.of_norms(np.where(np.isfinite(norms), norms, np.nan))[:, None]
    tail = [scale.view(np.uint32)]
    low, sent = _rounded(value, scale[:, :, None], places == block_size - 1, value_bits)
  else:
    low, sent = 0, value != 0
  codes = np.where(sent, (block_size - 1 - places) << below | low, 0)
  parts = []
  for number in range(count):
    parts.append(planes.pack(codes[:, :, number], bits, WORDS))
    if value_bits == 32:
      parts.append(np.where(sent, value, 0)[:, :, number].view(np.uint32))
  return np.concatenate([*parts, *tail], axis=1)


def _rounded(value, scale, last, value_bits):
  """The bits of entries below their places, and which are sent."""
  sign = (value < 0).astype(np.int64)
  if value_bits == 8:
    fixed = qsgd.fixed_point(value, scale[:, :, 0], 127 << 16)
    level = (fixed + np.uint32(1 << 15)) >> np.uint32(16)
    return sign << 7 | level, level > 0
  size, odd = np.abs(value), last & (value > 0)  # the last place has no code for 3/8
  large = size >= np.where(odd, scale / 2, scale * np.float32((1 + SMALL) / 2))
  sent = np.where(odd, large, size >= scale * np.float32(SMALL / 2)) & (scale > 0)
  return sign << 1 | large, sent


def decode(rows, size, *, block_size, count, value_bits):
  bits, below, blocks = _layout(block_size, value_bits)
  each = WORDS + (blocks if value_bits == 32 else 0)
  tiles = -(-size // (blocks * block_size))
  rows = planes.checked(rows, (tiles, count * each + (value_bits < 32)))
  leaf = np.zeros((tiles, blocks, block_size), np.float32)
  bad = np.zeros((tiles, blocks), bool)
  if value_bits < 32:
    scale = planes.as_floats(rows[:, -1:])
    scale_table.check(scale)
    bad |= np.isnan(scale)
  for number in range(count):
    part = rows[:, number * each : (number + 1) * each]
    codes = planes.unpack(part[:, :WORDS], bits).reshape(tiles, blocks)
    if value_bits == 32:
      if codes[part[:, WORDS:] == 0].any():
        raise ValueError("an entry of the value 0 must have the code 0.")
      value = planes.as_floats(part[:, WORDS:])
      bad |= ~np.isfinite(value)
    else:
      value = _values(codes, scale, value_bits)
      if codes[bad | (scale == 0)].any():
        raise ValueError("under a scale of 0 or NaN a code must be 0.")
    sent = codes > 0 if value_bits < 32 else value != 0
    tile, block = np.nonzero(sent)
    place = block_size - 1 - (codes >> below)[tile, block]
    if leaf[tile, block, place].any():
      raise ValueError("two entries of a block must have two places.")
    leaf[tile, block, place] = value[tile, block]
  leaf[bad] = np.nan
  flat = leaf.ravel()
  planes.refuse_filler(flat[size:][np.isfinite(flat[size:])])
  return flat[:size]


def _values(codes, scale, value_bits):
  if value_bits == 2:
    size = np.where(codes & 1, scale, scale * SMALL)
    value = np.where(codes >> 1 & 1, -size, size)
    return np.where(codes == 0, np.float32(0), value)
  level = codes & 127
  if codes[level == 0].any():
    raise ValueError("an entry of the level 0 must have the code 0.")
  size = qsgd.magnitudes(level, scale, 127)
  return np.where(codes & 128, -size, size)
