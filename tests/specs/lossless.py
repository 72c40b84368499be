"""Lossless, of numbers that are, or become, bfloat16."""

import ml_dtypes
import numpy as np

from tests.specs import planes

ELEMENTS, WORDS, ESCAPES = 1024, 396, 10
ZERO, ESCAPE, UNUSED, FULL = 14, 15, 0xFFFFFFFF, 0xFFFFFFFE


def encode(x):
  """The rows of a leaf, uint32[tiles, 396]."""
  x = np.asarray(x).reshape(-1)
  if x.dtype != ml_dtypes.bfloat16:
    x = x.astype(np.float32)  # which ml_dtypes rounds to nearest even
  patterns = x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.int64)
  patterns = planes.tiled(patterns, 8, 128)
  fields = patterns >> 7 & 255
  tops = np.where(fields == 255, 0, fields).max(axis=2, initial=0)
  distance = tops[:, :, None] - fields
  code = np.where((distance >= 0) & (distance < ZERO), distance, ESCAPE)
  code = np.where(fields == 0, ZERO, code)
  byte = patterns >> 15 << 7 | patterns & 127
  lists = np.full((len(patterns), ESCAPES), UNUSED)
  for row, entries in enumerate(lists):
    places = np.flatnonzero(code[row] == ESCAPE)
    listed = (places << 8 | fields[row].ravel()[places])[:ESCAPES]
    entries[: listed.size] = listed
    if places.size > ESCAPES:
      entries[-1] = FULL
  words = [planes.pack(half, 8, 128) for half in (byte[:, :4], byte[:, 4:])]
  words += [planes.pack(code, 4, 128)]
  words += [planes.pack(half, 8, 1) for half in (tops[:, :4], tops[:, 4:])]
  return np.concatenate([*words, lists.astype(np.uint32)], axis=1)


def decode(rows, size):
  """The values of a payload, float32[size]; full rows are NaN."""
  count = -(-size // ELEMENTS)
  rows = planes.checked(rows, (count, WORDS))
  parts = [planes.unpack(rows[:, at : at + 128], 8) for at in (0, 128)]
  byte = np.concatenate([part.reshape(count, 512) for part in parts], axis=1)
  distance = planes.unpack(rows[:, 256:384], 4).reshape(count, ELEMENTS)
  tops = [planes.unpack(rows[:, [at]], 8).reshape(count, 4) for at in (384, 385)]
  largest = np.concatenate(tops, axis=1).repeat(128, axis=1)
  full = rows[:, -1] == FULL
  field = np.where(distance == ZERO, 0, largest.astype(np.int64) - distance)
  for row in np.flatnonzero(~full):
    used = rows[row, 386:][rows[row, 386:] != UNUSED]
    places = (used >> 8).astype(np.int64)
    if not np.array_equal(places, np.flatnonzero(distance[row] == ESCAPE)):
      raise ValueError("the list must have the places of the escapes, in their order.")
    field[row, places] = used & 255
  sent = field[~full]
  if ((sent < 0) | (sent > 255)).any():
    raise ValueError("an exponent field must be from 0 to 255.")
  bits = byte >> 7 << 15 | np.uint32(field & 255) << 7 | byte & 127
  bits[full] = 0x7FC0
  flat = bits.ravel()
  planes.refuse_filler(flat[size:][~full.repeat(ELEMENTS)[size:]])
  return (np.uint32(flat) << 16).view(np.float32)[:size]
