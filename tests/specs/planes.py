"""Packs codes into words of rows, and reads rows of words."""

import numpy as np

TENSOR_WORDS = 512  # the words of a row with one scale a tensor
ROW_WORDS = 128  # the words of a row of a codec without buckets


def geometry(bits, bucket_size):
  """The codes of a word, and the words of a row."""
  return 32 // bits, TENSOR_WORDS if bucket_size is None else bucket_size


def as_leaf(x):
  """An array of any shape as a flat float32 one."""
  return np.asarray(x).astype(np.float32).ravel()


def filled(x, bucket_size):
  """The leaf, with a last bucket that repeats its own elements: float32[m B]."""
  leaf = as_leaf(x)
  whole = leaf.size // bucket_size * bucket_size
  copies = np.resize(leaf[whole:], bucket_size if leaf.size > whole else 0)
  return np.concatenate([leaf[:whole], copies])


def tiled(flat, per_word, words):
  """The elements as [tiles, P, B], filled with zeros."""
  flat = flat.ravel()
  padded = np.pad(flat, (0, -flat.size % (per_word * words)))
  return padded.reshape(-1, per_word, words)


def pack(codes, bits, bucket_size):
  """Codes in the leaf's order to planar words, uint32[tiles, B]; code 0 fills."""
  per_word, words = geometry(bits, bucket_size)
  planes = tiled(np.asarray(codes, np.uint32), per_word, words)
  if bits < 32 and (planes >> np.uint32(bits)).any():
    raise ValueError(f"a code does not fit in {bits} bits.")
  shifts = bits * np.arange(per_word, dtype=np.uint32)
  return np.bitwise_or.reduce(planes << shifts[:, None], axis=1)


def unpack(words, bits):
  """The codes of all planes of every row, uint32[tiles * P * B], in leaf's order."""
  per_word = 32 // bits
  used = per_word * bits
  if used < 32 and (words >> np.uint32(used)).any():
    raise ValueError(f"bits {used} to 31 of a word must be zero.")
  shifts = bits * np.arange(per_word, dtype=np.uint32)
  planes = words[:, None, :] >> shifts[:, None]
  return (planes & np.uint32(2**bits - 1)).ravel()


def with_floats(words, *floats):
  """Rows of words with float32 columns behind them."""
  tails = [np.asarray(tail, np.float32).view(np.uint32) for tail in floats]
  return np.concatenate([words, *tails], axis=1)


def as_floats(words):
  """Bit patterns as float32."""
  return np.ascontiguousarray(words).view(np.float32)


def checked_rows(rows, size, per_word, words, floats=0):
  """The rows, uint32[tiles, words + floats], if a leaf of so many elements has them."""
  return checked(rows, (-(-size // (per_word * words)), words + floats))


def checked(rows, shape):
  """The rows, if they are uint32 of this shape."""
  rows = np.asarray(rows)
  if rows.dtype != np.uint32:
    raise ValueError(f"the rows must be uint32, got {rows.dtype}.")
  if rows.shape != shape:
    raise ValueError(f"the rows must have the shape {shape}, got {rows.shape}.")
  return rows


def refuse_filler(filler):
  """Raises where something behind the end of a leaf is not zero."""
  if filler.any():
    raise ValueError("the elements that fill the last tile must have the code 0.")
