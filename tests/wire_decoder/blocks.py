"""Reads payloads of BlockTop, by docs/inside/wire-format.md alone, with NumPy only."""

import numpy as np

from tests.wire_decoder.words import checked_words, floats_of_words

WORDS = 32


def decode_block_top(rows, size, *, block_size, count, value_bits):
  """The values of a BlockTop payload, float32[size].

  Args:
    rows: uint32[tiles, words], the payload.
    size: the number of elements of the leaf.
    block_size: the elements of a block, B.
    count: the entries of a block.
    value_bits: the bits of a value.
  """
  place_bits = int(np.log2(block_size))
  bits = place_bits + (value_bits if value_bits < 32 else 0)
  blocks = 32 // bits * WORDS
  each = WORDS + (blocks if value_bits == 32 else 0)
  rows = checked_words(rows, (2,), "rows")
  tiles = -(-size // (blocks * block_size))
  if rows.shape != (tiles, count * each + (value_bits < 32)):
    raise ValueError(f"the rows must have the shape of {tiles} tiles.")
  leaf = np.zeros((tiles, blocks, block_size), np.float32)
  bad = np.zeros((tiles, blocks), bool)
  if value_bits < 32:
    scale = floats_of_words(rows[:, -1:])
    bad |= np.isnan(scale)
    right = bad[:, :1] | (scale == 0) | (scale >= 2.0**-96) & np.isfinite(scale)
    if not right.all():
      raise ValueError("a scale must be 0, NaN or finite and at least 2^-96.")
  for number in range(count):
    part = rows[:, number * each : (number + 1) * each]
    codes = _codes(part[:, :WORDS], bits).reshape(tiles, blocks)
    behind = codes >> (value_bits if value_bits < 32 else 0)
    if value_bits == 32:
      if codes[part[:, WORDS:] == 0].any():
        raise ValueError("an entry of the value 0 must have the code 0.")
      value = floats_of_words(part[:, WORDS:])
      bad |= ~np.isfinite(value)
    else:
      value = _values(codes, scale, value_bits)
      if codes[bad | (scale == 0)].any():
        raise ValueError("under a scale of 0 or NaN a code must be 0.")
    sent = codes > 0 if value_bits < 32 else value != 0
    tile, block = np.nonzero(sent)
    place = block_size - 1 - behind[tile, block]
    if leaf[tile, block, place].any():
      raise ValueError("two entries of a block must have two places.")
    leaf[tile, block, place] = value[tile, block]
  leaf[bad] = np.nan
  flat = leaf.reshape(-1)
  if flat[size:][np.isfinite(flat[size:])].any():
    raise ValueError("the elements that fill the last tile must not be sent.")
  return flat[:size]


def _codes(words, bits):
  if bits * (32 // bits) < 32 and (words >> np.uint32(bits * (32 // bits))).any():
    raise ValueError("unused bits of a word must be zero.")
  shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
  return (words[:, None, :] >> shifts[:, None]) & np.uint32(2**bits - 1)


def _values(codes, scale, value_bits):
  if value_bits == 2:
    size = np.where(codes & 1, scale, scale * np.float32(0.375))
    value = np.where(codes >> 1 & 1, -size, size)
    return np.where(codes == 0, np.float32(0), value)
  level = codes & 127
  if (codes[level == 0] != 0).any():
    raise ValueError("an entry of the level 0 must have the code 0.")
  step = scale * np.float32(1 / 127)
  size = np.where(level == 127, scale, level.astype(np.float32) * step)
  return np.where(codes & 128, -size, size)
