"""Reads payloads and messages by docs/inside/wire-format.md, with NumPy only.

Written from that page and from nothing else in this repository, so a payload that this
module reads is one that a program outside JAX can read too. It refuses, with
``ValueError``, what no encoder that follows the page could have sent.
"""

import ml_dtypes
import numpy as np

PER_TENSOR_WORDS = 512  # the words of a row of QSGD with `bucket_size=None`
DENSE_WORDS = 128
MIN_SCALE = np.float32(2.0**-96)

_QSGD_BITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
_DENSE_BITS = {
  np.dtype(np.float32): 32,
  np.dtype(np.float16): 16,
  np.dtype(ml_dtypes.bfloat16): 16,
}


def decode_qsgd(rows, size, *, bits, bucket_size, levels):
  """The values of a QSGD payload.

  Args:
    rows: uint32[tiles, words], the payload.
    size: the number of elements of the leaf.
    bits: the bits of a code, 1 to 8 or 16.
    bucket_size: the elements that share a scale; None is one scale a tensor.
    levels: "sign_magnitude" or "uniform".

  Returns:
    float32[size]. A bucket with a NaN scale is NaN throughout.
  """
  codes, scales = _padded_qsgd_codes(rows, size, bits, bucket_size)
  top = _top(bits, levels)
  if levels == "sign_magnitude":
    # Zero has the code 0 under every scale, except where a NaN spoils the bucket.
    filler = codes[size:][np.isfinite(scales[size:])]
    if filler.any():
      raise ValueError("the elements that fill the last tile must have the code 0.")
  codes, scales = codes[:size], scales[:size]
  if levels == "sign_magnitude":
    negative = codes >> np.uint32(bits - 1) == 1
    magnitude = codes & np.uint32(top)
  else:
    signed = 2 * codes.astype(np.int64) - top
    negative = signed < 0
    magnitude = np.abs(signed)
  with np.errstate(invalid="ignore"):
    step = scales * (np.float32(1) / np.float32(top))
    below = magnitude.astype(np.float32) * step
  value = np.where(magnitude == top, scales, below)
  return np.where(negative, -value, value)


def shared_codes(rows, size, *, bits, bucket_size, levels):
  """The integers of rows whose scales all workers share, int64[size].

  Args:
    rows: uint32[tiles, B], words alone.
    size: the number of elements of the leaf.
    bits: the bits of a code, 1 to 8 or 16.
    bucket_size: the elements that share a scale; None is one scale a tensor.
    levels: "sign_magnitude" or "uniform".
  """
  top = _top(bits, levels)
  words = PER_TENSOR_WORDS if bucket_size is None else bucket_size
  rows = checked_rows(rows, size, 32 // bits, words)
  codes = codes_of_words(rows, bits)[:size].astype(np.int64)
  if levels == "uniform":
    return 2 * codes - top
  magnitude = codes % (top + 1)
  return np.where(codes == magnitude, magnitude, -magnitude)


def unpack_sums(words, size, workers, *, bits, bucket_size, levels):
  """The sums that an owner sends in the second stage of `two_shot`, int64[size].

  Args:
    words: uint32[rows, B].
    size: the number of elements of the share, whole tiles.
    workers: N.
    bits: the bits of a code, not of a sum.
    bucket_size: the elements that share a scale; None is one scale a tensor.
    levels: "sign_magnitude" or "uniform".
  """
  limit = workers * _top(bits, levels)
  width = 1
  while 2**width < 2 * limit + 1:
    width += 1
  row = PER_TENSOR_WORDS if bucket_size is None else bucket_size
  if size % (32 // bits * row):
    raise ValueError(f"a share has whole tiles, got {size} elements.")
  words = checked_rows(words, size, 32 // width, row)
  fields = codes_of_words(words, width)
  if fields[size:].any():
    raise ValueError("the fields behind the last bucket must be zero.")
  if (fields[:size] > 2 * limit).any():
    raise ValueError(f"a sum of {workers} codes is at most {limit}.")
  return fields[:size].astype(np.int64) - limit


def decode_sums(sums, scales, *, bits, bucket_size, levels):
  """The values of sums of codes that share their scales, float32[size].

  Args:
    sums: integers, in the leaf's order; codes of one worker are sums as well.
    scales: float32[tiles, P], or float32[1, 1] with `bucket_size=None`.
    bits: the bits of a code.
    bucket_size: the elements that share a scale; None is one scale a tensor.
    levels: "sign_magnitude" or "uniform".
  """
  top = _top(bits, levels)
  size = len(sums)
  scale = np.asarray(scales, np.float32).repeat(bucket_size or max(size, 1))[:size]
  magnitude = np.abs(sums)
  with np.errstate(invalid="ignore", over="ignore"):
    exact = (magnitude // top).astype(np.float32) * scale
    step = scale * (np.float32(1) / np.float32(top))
    between = magnitude.astype(np.float32) * step
  value = np.where(magnitude % top == 0, exact, between)
  return np.where(np.asarray(sums) < 0, -value, value)


def split_stats(message, sizes, *, bits, bucket_size):
  """The scales of each leaf in a message of statistics.

  Args:
    message: int32[floats], bit patterns.
    sizes: the elements of each leaf that the codec encodes.
    bits: the bits of a code.
    bucket_size: the elements that share a scale; None is one scale a tensor.

  Returns:
    A list of float32[tiles, P], or of float32[1, 1].
  """
  per_word = 32 // bits
  shapes = [
    (1, 1) if bucket_size is None else (-(-size // (per_word * bucket_size)), per_word)
    for size in sizes
  ]
  counts = [rows * width for rows, width in shapes]
  if np.shape(message) != (sum(counts),):
    raise ValueError(f"the message must have {sum(counts)} floats.")
  scales = np.ascontiguousarray(message, np.int32).view(np.float32)
  with np.errstate(invalid="ignore"):
    if not (np.isnan(scales) | (scales == 0) | (scales >= MIN_SCALE)).all():
      raise ValueError("a scale must be 0, NaN or at least 2^-96.")
  parts = np.split(scales, np.cumsum(counts)[:-1])
  return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def decode_dense(rows, size, dtype):
  """The values of a Dense payload as float32[size]; the widening loses nothing.

  Args:
    rows: uint32[tiles, 128], the payload.
    size: the number of elements of the leaf.
    dtype: what the values travelled as: float32, float16 or ml_dtypes.bfloat16.
  """
  dtype = np.dtype(dtype)
  if dtype not in _DENSE_BITS:
    raise ValueError(f"`dtype` must be float32, float16 or bfloat16, got {dtype}.")
  bits = _DENSE_BITS[dtype]
  rows = checked_rows(rows, size, 32 // bits, DENSE_WORDS)
  codes = codes_of_words(rows, bits)
  if codes[size:].any():
    raise ValueError("the elements that fill the last tile must be zero.")
  patterns = codes[:size].astype(np.uint32 if bits == 32 else np.uint16)
  return patterns.view(dtype).astype(np.float32)


def _top(bits, levels):
  if levels == "uniform":
    return 2**bits - 1
  if levels != "sign_magnitude" or bits < 2:
    raise ValueError(f"no levels {levels!r} of {bits} bits.")
  return 2 ** (bits - 1) - 1


def _padded_qsgd_codes(rows, size, bits, bucket_size):
  if bits not in _QSGD_BITS:
    raise ValueError(f"`bits` must be 1 to 8 or 16, got {bits}.")
  per_word = 32 // bits
  words = PER_TENSOR_WORDS if bucket_size is None else bucket_size
  scales = 1 if bucket_size is None else per_word
  rows = checked_rows(rows, size, per_word, words, floats=scales)
  per_element = checked_scales(rows[:, words:], size, per_word, words)
  return codes_of_words(rows[:, :words], bits), per_element


def floats_of_words(words):
  return np.ascontiguousarray(words).view(np.float32)


def checked_scales(patterns, size, per_word, words):
  """Each element's scale, in the leaf's order, of a row's scales: [tiles, P or 1]."""
  scale = floats_of_words(patterns)
  with np.errstate(invalid="ignore"):
    legal = np.isnan(scale) | (patterns == 0) | (scale >= MIN_SCALE)
  if not legal.all() or np.isinf(scale).any():
    raise ValueError("a scale must be +0, NaN or finite and at least 2^-96.")
  if scale.shape[1] > 1 and patterns.ravel()[-(-size // words) :].any():
    raise ValueError("a bucket beyond the end of the leaf must have the scale 0.")
  return per_element(scale, per_word, words)


def per_element(scale, per_word, words):
  """float32[tiles, P or 1] for each element of the tiles, in the leaf's order."""
  return np.broadcast_to(scale, (len(scale), per_word)).ravel().repeat(words)


def codes_of_words(words, bits):
  """The planes of every row, one after the other: elements in the leaf's order."""
  per_word = 32 // bits
  used = per_word * bits
  if used < 32 and (words >> np.uint32(used)).any():
    raise ValueError(f"bits {used} to 31 of a word must be zero.")
  shifts = bits * np.arange(per_word, dtype=np.uint32)
  planes = words[:, None, :] >> shifts[:, None]
  return (planes & np.uint32(2**bits - 1)).ravel()


def checked_rows(rows, size, per_word, words, floats=0):
  rows = checked_words(rows, (2,), "rows")
  if words < 1:
    raise ValueError(f"`bucket_size` must be at least 1, got {words}.")
  if size < 0:
    raise ValueError(f"`size` must not be negative, got {size}.")
  expected = (-(-size // (per_word * words)), words + floats)
  if rows.shape != expected:
    raise ValueError(f"the rows must have the shape {expected}, got {rows.shape}.")
  return rows


def checked_words(array, ranks, name):
  array = np.asarray(array)
  if array.dtype != np.uint32:
    raise ValueError(f"`{name}` must be uint32, got {array.dtype}.")
  if array.ndim not in ranks:
    raise ValueError(f"`{name}` has the wrong shape {array.shape}.")
  return array
