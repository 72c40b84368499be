"""Reads payloads of Lossless.

Like words.py: from docs/inside/wire-format.md alone, with NumPy only, and refusing,
with ``ValueError``, what no encoder that follows the page could have sent.
"""

import numpy as np

from tests.wire_decoder.words import codes_of_words

_ELEMENTS, _WORDS, _ZERO, _ESCAPE = 1024, 396, 14, 15
_UNUSED, _FULL = 0xFFFFFFFF, 0xFFFFFFFE


def decode_lossless(rows, size):
  """The values of a Lossless payload, float32[size]; full rows are NaN.

  Args:
    rows: uint32[tiles, 396], the payload.
    size: the number of elements of the leaf.
  """
  rows = np.asarray(rows, np.uint32)
  count = -(-size // _ELEMENTS)
  if rows.shape != (count, _WORDS):
    raise ValueError(f"there must be {count} rows of {_WORDS} words, got {rows.shape}.")
  parts = [codes_of_words(rows[:, at : at + 128], 8) for at in (0, 128)]
  byte = np.concatenate([part.reshape(count, 512) for part in parts], axis=1)
  distance = codes_of_words(rows[:, 256:384], 4).reshape(count, _ELEMENTS)
  tops = rows[:, 384:386, None] >> np.arange(0, 32, 8, dtype=np.uint32) & 255
  largest = tops.reshape(count, 8).repeat(128, axis=1)
  full = rows[:, -1] == _FULL
  field = np.where(distance == _ZERO, 0, largest.astype(np.int64) - distance)
  for row, listed in enumerate(rows[:, 386:]):
    used = listed[listed != _UNUSED]
    places = (used >> 8).astype(np.int64)
    if full[row]:
      continue
    if not np.array_equal(places, np.flatnonzero(distance[row] == _ESCAPE)):
      raise ValueError("the list must have the places of the escapes, in their order.")
    field[row, places] = used & 255
  sent = field[~full]
  if ((sent < 0) | (sent > 255)).any():
    raise ValueError("an exponent field must be from 0 to 255.")
  bits = byte >> 7 << 15 | np.uint32(field & 255) << 7 | byte & 127
  bits[full] = 0x7FC0
  flat = bits.ravel()
  if flat[size:][~full.repeat(_ELEMENTS)[size:]].any():
    raise ValueError("the elements that fill the last row must be zeros.")
  return (np.uint32(flat) << 16).view(np.float32)[:size]
