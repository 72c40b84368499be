"""Reads payloads of OneBit, Sign, Ternary, EightBit, FloatCast, Natural, fitted QSGD.

Like words.py: from docs/inside/wire-format.md alone, with NumPy only, and refusing,
with ``ValueError``, what no encoder that follows the page could have sent.
"""

import numpy as np

from tests.wire_decoder.words import (
  DENSE_WORDS,
  PER_TENSOR_WORDS,
  checked_rows,
  checked_scales,
  checked_words,
  codes_of_words,
  floats_of_words,
  per_element,
)

_TERNARY_PLANES = {"2bit": 16, "base3": 20}


def decode_one_bit(rows, size, *, bucket_size):
  """The values of a OneBit payload, float32[size]; a bucket with NaN means is NaN.

  Args:
    rows: uint32[tiles, B + 64], the payload.
    size: the number of elements of the leaf.
    bucket_size: the elements that share a pair of means.
  """
  rows = checked_rows(rows, size, 32, bucket_size, floats=64)
  negative = codes_of_words(rows[:, :bucket_size], 1) == 1
  start = size // bucket_size * bucket_size
  expected = np.zeros(negative.size - start, bool)
  if size > start:
    expected[:bucket_size] = np.resize(negative[start:size], bucket_size)
  if (negative[start:] != expected).any():
    raise ValueError(
      "the elements that fill the last tile must have the codes of what they repeat."
    )
  real = np.arange(negative.size) < size
  means = floats_of_words(rows[:, bucket_size:])
  positive_mean, negative_mean = _checked_means(
    means[:, :32].ravel(),
    means[:, 32:].ravel(),
    negative.reshape(-1, bucket_size),
    real.reshape(-1, bucket_size),
  )
  value = np.where(
    negative, negative_mean.repeat(bucket_size), positive_mean.repeat(bucket_size)
  )
  return value[:size]


def decode_one_bit_columns(rows, shape):
  """The values of a OneBit payload with `per_column`, float32 of the leaf's shape.

  Args:
    rows: uint32[columns, ceil(d0 / 32) + 2], the payload.
    shape: the shape of the leaf.
  """
  d0 = shape[0] if shape else 1
  columns, words = int(np.prod(shape[1:])), -(-d0 // 32)
  rows = checked_words(rows, (2,), "rows")
  if rows.shape != (columns, words + 2):
    raise ValueError(f"the rows must have the shape {(columns, words + 2)}.")
  bits = rows[:, :words, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)
  negative = bits.reshape(columns, words * 32) == 1
  if negative[:, d0:].any():
    raise ValueError("unused bits must be zero.")
  negative = negative[:, :d0]
  means = floats_of_words(rows[:, words:])
  positive_mean, negative_mean = _checked_means(
    means[:, 0], means[:, 1], negative, np.ones(negative.shape, bool)
  )
  value = np.where(negative, negative_mean[:, None], positive_mean[:, None])
  return value.T.reshape(shape)


def ternary_codes(rows, size, *, packing, bucket_size, scales):
  """The integers -1, 0 and 1 of a Ternary payload, int64[size].

  Args:
    rows: uint32[tiles, B + scales], the payload.
    size: the number of elements of the leaf.
    packing: "2bit" or "base3".
    bucket_size: the elements that share a scale; None is one scale a leaf.
    scales: float32[tiles, P], or [tiles, 1] or [1, 1] without buckets, if all workers
      share them; None reads them behind the words.
  """
  return _ternary(rows, size, packing, bucket_size, scales)[0]


def decode_ternary(rows, size, *, packing, bucket_size, scales=None):
  """The values of a Ternary payload, float32[size]; the arguments as above."""
  z, scale = _ternary(rows, size, packing, bucket_size, scales)
  return z.astype(np.float32) * scale


def decode_eight_bit(rows, size, *, data_type, bucket_size, exponent_offset=None):
  """The values of an EightBit payload, float32[size].

  Args:
    rows: uint32[tiles, B + scales], the payload.
    size: the number of elements of the leaf.
    data_type: "dynamic_tree", "dynamic_map", "static_tree", "linear" or "mantissa".
    bucket_size: the elements that share a scale; None is one scale a tensor.
    exponent_offset: None, or the k of the fixed scale.
  """
  words = PER_TENSOR_WORDS if bucket_size is None else bucket_size
  rows = checked_rows(rows, size, 4, words, floats=1 if bucket_size is None else 4)
  if exponent_offset is None:
    scale = checked_scales(rows[:, words:], size, 4, words)
  else:
    fixed = 10.0**exponent_offset * (1.5 if data_type == "mantissa" else 1)
    scale = per_element(floats_of_words(rows[:, words:]), 4, words)
    if not (np.isnan(scale) | (scale == np.float32(fixed))).all():
      raise ValueError(f"a scale must be {fixed} or NaN.")
  codes = codes_of_words(rows[:, :words], 8)
  if codes[size:][np.isfinite(scale[size:])].any():
    raise ValueError("the elements that fill the last tile must have the code 0.")
  table = _eight_bit_table(data_type)
  positive = codes < (129 if data_type == "dynamic_map" else 128)
  magnitude = np.where(positive, codes, codes & np.uint32(127))
  if (magnitude >= len(table)).any() or not magnitude[~positive].all():
    raise ValueError(f"a magnitude is below {len(table)}; zero has no sign.")
  value = table[magnitude] * scale
  return np.where(positive, value, -value)[:size]


def decode_nonuniform(rows, size, *, bits, bucket_size):
  """The values of a payload of QSGD with fitted levels, float32[size].

  Args:
    rows: uint32[tiles, B + scales + L], the payload.
    size: the number of elements of the leaf.
    bits: the bits of a code, 2 to 4.
    bucket_size: the elements that share a scale; None is one scale a tensor.
  """
  if bits not in (2, 3, 4):
    raise ValueError(f"`bits` must be 2 to 4, got {bits}.")
  per_word, count = 32 // bits, 2 ** (bits - 1)
  words = PER_TENSOR_WORDS if bucket_size is None else bucket_size
  floats = (1 if bucket_size is None else per_word) + count
  rows = checked_rows(rows, size, per_word, words, floats)
  scale = checked_scales(rows[:, words:-count], size, per_word, words)
  codes = codes_of_words(rows[:, :words], bits).astype(np.int64)
  if not len(rows):
    return np.zeros(0, np.float32)
  levels = floats_of_words(rows[:, -count:])
  k = 256 * levels[0]
  if (levels != levels[0]).any():
    raise ValueError("all rows must have the same levels.")
  if (
    not (k == np.trunc(k)).all() or k[0] < 0 or k[-1] != 256 or (np.diff(k) <= 0).any()
  ):
    raise ValueError(
      "levels must be increasing multiples of 1/256, the last of them 1."
    )
  negative = codes < count
  value = scale * levels[0][np.where(negative, count - 1 - codes, codes - count)]
  return np.where(negative, -value, value)[:size]


def decode_float_cast(
  rows, size, *, exponent_bits, mantissa_bits, byte=None, addends=1, scale=1.0
):
  """The values of a FloatCast payload, float32[size].

  Args:
    rows: uint32[tiles, 128], the payload.
    size: the number of elements of the leaf.
    exponent_bits: e.
    mantissa_bits: m.
    byte: what the workers agreed on, or None with a constant scale.
    addends: N, with a byte.
    scale: the constant factor.
  """
  used = 1 + exponent_bits + mantissa_bits
  width = min(b for b in (4, 8, 16, 32) if b >= used)
  rows = checked_rows(rows, size, 32 // width, DENSE_WORDS)
  codes = codes_of_words(rows, width).astype(np.int64)
  if (codes >> used).any():
    raise ValueError(f"bits {used} to {width - 1} of a code must be zero.")
  if codes[size:].any() and byte != 255:
    raise ValueError("the elements that fill the last tile must have the code 0.")
  if byte == 255:
    return np.full(size, np.nan, np.float32)
  negative, magnitude = np.divmod(codes[:size], 2 ** (used - 1))
  field, mantissa = np.divmod(magnitude, 2**mantissa_bits)
  last = field == 2**exponent_bits - 1
  if byte is not None and last.any():
    raise ValueError("with a byte every code must be that of a number.")
  bias = 2 ** (exponent_bits - 1) - 1
  fraction = mantissa / 2.0**mantissa_bits
  value = np.where(
    field == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (field - bias)
  )
  infinite = (mantissa == 0) & (mantissa_bits > 0)
  value = np.where(last, np.where(infinite, np.inf, np.nan), value)
  value = np.where(negative == 1, -value, value)
  with np.errstate(over="ignore"):
    if byte is None:
      return value.astype(np.float32) * np.float32(1 / scale)
    room = int(np.ceil(np.log2(addends)))  # of an integer below 2^23: exact
    value = value * 2.0 ** -(bias - (byte - 126 + room) if byte else 0)
    return np.where(np.abs(value) < 2.0**-126, 0, value).astype(np.float32)


def decode_natural(rows, size):
  """The values of a Natural payload, float32[size].

  Args:
    rows: uint32[tiles, 128], the payload.
    size: the number of elements of the leaf.
  """
  codes = codes_of_words(checked_rows(rows, size, 4, DENSE_WORDS), 8)
  if codes[size:].any():
    raise ValueError("the elements that fill the last tile must have the code 0.")
  negative, field = np.divmod(codes[:size].astype(np.int64), 128)
  value = np.where(field == 0, 0.0, np.ldexp(1.0, field - 63))
  value = np.where(field == 127, np.nan, value)
  return np.where(negative == 1, -value, value).astype(np.float32)


def decode_sign(rows, size, *, bucket_size, scale):
  """The values of a Sign payload, float32[size]; a bucket with a NaN is NaN.

  Args:
    rows: uint32[tiles, B + 32], or with `scale="one"` uint32[tiles, B + 2].
    size: the number of elements of the leaf.
    bucket_size: the elements that share a scale.
    scale: "mean" or "one".
  """
  tail = 32 if scale == "mean" else 2
  rows = checked_rows(rows, size, 32, bucket_size, floats=tail)
  negative = codes_of_words(rows[:, :bucket_size], 1) == 1
  start = size // bucket_size * bucket_size
  expected = np.zeros(negative.size - start, bool)
  if size > start and scale == "mean":
    expected[:bucket_size] = np.resize(negative[start:size], bucket_size)
  elif size > start:
    expected[: size - start] = negative[start:size]  # zeros follow
  if (negative[start:] != expected).any():
    raise ValueError(
      "the elements that fill the last tile must have the codes of the page."
    )
  if scale == "mean":
    scales = floats_of_words(rows[:, bucket_size:]).ravel()
    if (np.isinf(scales) | (scales < 0)).any():
      raise ValueError("a mean magnitude must be finite or NaN, and not negative.")
  else:
    some = codes_of_words(rows[:, bucket_size : bucket_size + 1], 1)
    bad = codes_of_words(rows[:, bucket_size + 1 :], 1)
    if (bad > some).any():
      raise ValueError("a bucket that is not finite must be marked as not zero.")
    scales = np.where(bad == 1, np.nan, np.float32(some))
  if scales[-(-size // bucket_size) :].any():
    raise ValueError("a bucket beyond the end of the leaf must have the scale 0.")
  value = np.float32(scales).repeat(bucket_size)
  return np.where(negative, -value, value)[:size]


def unpack_votes(words, size, workers, *, bucket_size, vote):
  """The counts that an owner sends in the second stage of `two_shot`, float32[size].

  Args:
    words: uint32[rows, B].
    size: the number of elements of the share, whole tiles.
    workers: N.
    bucket_size: the elements that share a scale.
    vote: "mean" or "majority".
  """
  most = workers if vote == "mean" else 1
  width = 1
  while 2**width < 2 * most + 2:
    width += 1
  words = checked_rows(words, size, 32 // width, bucket_size)
  fields = codes_of_words(words, width)
  if fields[size:].any():
    raise ValueError("the fields behind the last bucket must be zero.")
  if (fields > 2 * most + 1).any():
    raise ValueError(f"a count is at most {most}.")
  counts = np.float32(fields[:size].astype(np.int64) - most - 1)
  return np.where(fields[:size] == 0, np.float32(np.nan), counts)


def _checked_means(positive_mean, negative_mean, negative, real):
  """The means of buckets, float32[buckets], with bool[buckets, elements] of theirs."""
  bad = np.isnan(positive_mean)
  if (bad != np.isnan(negative_mean)).any():
    raise ValueError("both means of a bucket are NaN, or neither.")
  if np.isinf(positive_mean).any() or np.isinf(negative_mean).any():
    raise ValueError("a mean must be finite or NaN.")
  if (positive_mean < 0).any() or (negative_mean > 0).any():
    raise ValueError("avg+ must not be negative, avg- must not be positive.")
  no_positive = ~(real & ~negative).any(axis=1) & ~bad
  no_negative = ~(real & negative).any(axis=1) & ~bad
  if positive_mean[no_positive].any() or negative_mean[no_negative].any():
    raise ValueError("the mean of no elements must be 0.")
  return positive_mean, negative_mean


def _ternary(rows, size, packing, bucket_size, scales):
  """Integers and scales of the elements, int64[size] and float32[size]."""
  per_word = _TERNARY_PLANES[packing]
  words = PER_TENSOR_WORDS if bucket_size is None else bucket_size
  inline = 1 if bucket_size is None else per_word
  rows = checked_rows(
    rows, size, per_word, words, floats=0 if scales is not None else inline
  )
  if scales is None:
    scale = per_element(floats_of_words(rows[:, words:]), per_word, words)
  else:
    scales = np.broadcast_to(np.asarray(scales, np.float32), (len(rows), inline))
    scale = per_element(scales, per_word, words)
  if not (
    np.isnan(scale) | (scale == 0) | (scale >= 2.0**-96) & np.isfinite(scale)
  ).all():
    raise ValueError("a scale must be 0, NaN or finite and at least 2^-96.")
  if packing == "2bit":
    codes = codes_of_words(rows[:, :words], 2).astype(np.int64)
    if (codes == 2).any():
      raise ValueError("no integer has the code 2.")
    z = np.where(codes == 3, -1, codes)
  else:
    z = _base3_digits(rows[:, :words]) - 1
  if z[size:][np.isfinite(scale[size:])].any():
    raise ValueError("the elements that fill the last tile must have the code of 0.")
  if z[scale == 0].any():
    raise ValueError("under a scale of 0 all integers are 0.")
  return z[:size], scale[:size]


def _base3_digits(words):
  """The twenty digits of each word, int64, in the leaf's order."""
  fraction, digits = words.astype(np.uint64), []
  for _ in range(20):
    fraction = 3 * fraction
    digits.append(fraction >> np.uint64(32))
    fraction &= np.uint64(2**32 - 1)
  value = np.zeros(words.shape, np.uint64)
  for digit in digits:
    value = 3 * value + digit
  if (words != (value << np.uint64(32)) // np.uint64(3**20) + np.uint64(1)).any():
    raise ValueError("a word must be floor(v 2^32 / 3^20) + 1 of its digits' v.")
  return np.stack(digits, axis=1).astype(np.int64).ravel()


def _eight_bit_table(data_type):
  """The magnitudes of positive numbers by their codes, float32."""
  if data_type == "linear":
    table = [m / 127 for m in range(128)]
  elif data_type == "mantissa":
    # Equal numbers differ in float64 by their last bits, by less than 1e-12.
    table = [0.0]
    for value in sorted(k / 15 * 10.0**-e for k in range(1, 16) for e in range(8)):
      if value > table[-1] * (1 + 1e-12):
        table.append(value)
  elif data_type == "static_tree":
    table = [0.0]
    for m in range(1, 128):
      e, j = m // 16, m % 16
      table.append(10.0 ** (e - 7) * (0.1 + 0.9 * (j + 0.5) / 16))
  elif data_type in ("dynamic_tree", "dynamic_map"):
    table = [0.0]
    for m in range(1, 128):
      leaves = 2 ** (m.bit_length() - 1)
      n = 6 - (m.bit_length() - 1)
      s = (m - leaves + 0.5) / leaves
      at_once, at_0_45 = 0.1 + 0.9 * s, max(0.1 + 0.7 * s, 1.1 * s - 0.1)
      table.append(10.0**-n * (at_0_45 if data_type == "dynamic_tree" else at_once))
    if data_type == "dynamic_map":
      table.append(1.0)
  else:
    raise ValueError(f"no data type {data_type!r}.")
  return np.array(table).astype(np.float32)
