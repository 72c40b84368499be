"""Computes what BlockTop sends in plain NumPy, from its page: blocks are sorted."""

import numpy as np

SMALL = np.float32(0.375)


def cut(x, block_size):
  """Elements without the bits that do not count: as many as a place has."""
  bits = np.float32(x).view(np.uint32)
  return (bits & ~np.uint32(block_size - 1)).view(np.float32)


def chosen(x, *, block_size, count):
  """The places of the largest elements of blocks [m, B], int64[m, count]."""
  bits = np.abs(cut(x, block_size)).view(np.uint32).astype(np.int64)
  return np.argsort(-bits, axis=1, kind="stable")[:, :count]  # the first of equals


def scale_of(x):
  """The scale of what a tile sends."""
  largest = np.abs(x).max()
  if not np.isfinite(largest):
    return np.float32(np.nan)
  if largest < 2.0**-126:
    return np.float32(0)
  return max(largest, np.float32(2.0**-96))


def rounded(x, scale, last, value_bits):
  """What entries become under a scale; `last` says which are at the end of a block."""
  if value_bits == 32:
    return x
  if np.isnan(scale) or scale == 0:
    return np.full(x.shape, scale)
  size = np.abs(x)
  if value_bits == 8:
    factor = np.nextafter(np.float32(127 << 16), np.float32(np.inf)) / scale
    fixed = np.minimum((size * factor).astype(np.int64), 127 << 16)
    level = (fixed + (1 << 15)) >> 16
    step = scale * np.float32(1 / 127)
    value = np.where(level == 127, scale, np.float32(level) * step)
    return np.where(x < 0, -value, value).astype(np.float32)
  levels = np.float32([0, SMALL * scale, scale])
  middles = scale * np.float32([SMALL / 2, (1 + SMALL) / 2])
  value = levels[(size[:, None] >= middles).sum(axis=1)]
  odd = last & (x > 0)
  value[odd] = np.where(size[odd] >= scale / 2, scale, 0)
  return np.where(x < 0, -value, value)


def block_top(x, *, block_size, count, value_bits):
  """What a leaf decodes to, float32[n]."""
  bits = int(np.log2(block_size)) + (value_bits if value_bits < 32 else 0)
  tile = 32 // bits * 32 * block_size
  sent = np.zeros(-(-x.size // tile) * tile, np.float32)
  for start in range(0, x.size, tile):
    own = np.zeros(tile, np.float32)
    own[: x[start : start + tile].size] = x[start : start + tile]
    blocks = own.reshape(-1, block_size)
    places = chosen(blocks, block_size=block_size, count=count)
    entries = np.take_along_axis(blocks, places, axis=1)
    if value_bits < 32:
      entries = cut(entries, block_size)
    scale = scale_of(entries)
    last = (places == block_size - 1).ravel()
    value = rounded(entries.ravel(), scale, last, value_bits).reshape(entries.shape)
    out = np.zeros_like(blocks)
    np.put_along_axis(out, places, value, axis=1)
    if value_bits < 32 and np.isnan(scale):
      out[:] = np.nan
    elif value_bits == 32:
      out[~np.isfinite(entries).all(axis=1)] = np.nan
    sent[start : start + tile] = out.ravel()
  return sent[: x.size]
