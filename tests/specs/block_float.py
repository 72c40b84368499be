"""BlockFloat: blocks of the Microscaling specification 1.0, section 6.3, and NVFP4."""

import ml_dtypes
import numpy as np

from tests.specs import dithers, planes

DTYPES = {
  "e4m3": ml_dtypes.float8_e4m3fn,
  "e5m2": ml_dtypes.float8_e5m2,
  "e3m2": ml_dtypes.float6_e3m2fn,
  "e2m3": ml_dtypes.float6_e2m3fn,
  "e2m1": ml_dtypes.float4_e2m1fn,
}
TINY = 2.0**-126


def bits_of(element):
  """The bits of a code."""
  return ml_dtypes.finfo(DTYPES[element]).bits


def largest(element):
  """The largest number of a format."""
  return float(ml_dtypes.finfo(DTYPES[element]).max)


def numbers(element):
  """Returns the numbers of all codes, float64, with NaN and infinities."""
  codes = np.arange(2 ** bits_of(element)).astype(np.uint8)
  return codes.view(DTYPES[element]).astype(np.float64)


def cast(y, element, r=None):
  """The codes of numbers, uint32, saturated; with integers `r` below 2^16 at random."""
  y, top = np.float64(y), largest(element)
  if r is None:
    inside = np.clip(y, -top, top).astype(DTYPES[element])  # one rounding, from float64
    return inside.view(np.uint8).astype(np.uint32)
  table = numbers(element)
  table = table[: int(np.flatnonzero(table == top)[0]) + 1]  # increasing, from zero
  code = dithers.one_of_two(np.minimum(np.abs(y), top), table, r)
  sign = np.signbit(y).astype(np.uint32) << (bits_of(element) - 1)
  return code.astype(np.uint32) | sign


def power_of_two_scales(amax, element, up):
  """The bytes of E8M0: 127 more than the exponents, 255 for what is not finite."""
  amax = np.float64(amax)
  finite = np.isfinite(amax)
  safe = np.where(finite & (amax >= TINY), amax, TINY)
  top = largest(element)
  exponent = np.frexp(safe)[1] - np.frexp(top)[1]
  exponent += up & (np.ldexp(top, exponent) < safe)
  byte = np.where(finite & (amax < TINY), 0, np.maximum(exponent + 127, 0))
  return np.where(finite, byte, 255).astype(np.uint32)


def shared_scale(amax, element):
  """The float32 scale of what shares one, by the page's products in binary32."""
  amax = np.float32(amax)
  if not amax >= np.float32(TINY):
    return np.float32(np.nan if np.isnan(amax) else 0)
  return max(amax * np.float32(1 / (448 * largest(element))), least_shared(element))


def least_shared(element):
  """The scale with which the smallest number under the smallest scale is 2^-126."""
  return np.float32(TINY / (2.0**-9 * numbers(element)[1]))


def number_scales(amax, shared, element, up):
  """The codes of E4M3 of scales of blocks, with the shared scale as a unit."""
  if shared == 0:
    return np.zeros(amax.shape, np.uint32)
  ratio = np.float32(amax) * (np.float32(1 / largest(element)) / shared)
  if shared == least_shared(element):
    ratio = np.ceil(ratio * 2**9) / np.float32(2**9)
  codes = cast(ratio, "e4m3", 2**16 - 1 if up else None)
  if not up:
    return codes
  # The smallest number that is not below: the random bits above have but 16 bits.
  below = numbers("e4m3")[codes] < ratio
  return np.minimum(codes + below, 126).astype(np.uint32)


def encode(x, *, element, scale, block_size, key=None):
  """The rows of a leaf, uint32[tiles, words]; without a key rounded to nearest."""
  bits, words, up = bits_of(element), planes.ROW_WORDS, key is not None
  flat = planes.as_leaf(x)
  tiles = planes.tiled(flat, 32 // bits, words)
  blocks = tiles.reshape(-1, block_size)
  with np.errstate(invalid="ignore"):
    amax = np.abs(blocks).max(axis=1, initial=0)
  r = None
  if up:
    # A word of five codes has unused bits, and as many random numbers as codes.
    lanes = dithers.random_lanes(key, len(tiles), bits=bits, bucket_size=words)
    r = dithers.signed_lanes(lanes.reshape(blocks.shape), blocks)
  if scale == "e8m0":
    scales = power_of_two_scales(amax, element, up)
    usable = np.where(scales == 255, 0, scales).astype(np.int64)
    y = np.ldexp(np.float64(blocks), 127 - usable[:, None])
    y = np.where(np.abs(blocks) < TINY, np.copysign(0, blocks), y)
    tail = []
  else:
    shared = shared_scale(np.abs(flat).max(initial=0), element)
    scales = number_scales(amax, shared, element, up)
    step = numbers("e4m3")[scales].astype(np.float32) * shared
    with np.errstate(divide="ignore"):
      inverse = np.where(step == 0, np.float32(0), np.float32(1) / step)
    y = blocks * inverse[:, None]
    tail = [np.full((len(tiles), 1), shared)]
  codes = cast(np.where(np.isfinite(y), y, 0), element, r)
  per_row = scales.size // max(len(tiles), 1)
  parts = planes.pack(codes, bits, words), planes.pack(scales, 8, per_row // 4)
  return planes.with_floats(np.concatenate(parts, axis=1), *tail)


def decode(rows, size, *, element, scale, block_size):
  bits, words = bits_of(element), planes.ROW_WORDS
  per_word = 32 // bits
  bytes_end = words + per_word * words // block_size // 4
  shares = scale == "e4m3"
  rows = planes.checked_rows(rows, size, per_word, words, bytes_end - words + shares)
  codes = planes.unpack(rows[:, :words], bits)
  scales = planes.unpack(rows[:, words:bytes_end], 8)
  number = numbers(element)[codes]
  if shares:
    step, bad = _steps(scales, planes.as_floats(rows[:, -1]), element)
  else:
    step, bad = np.ldexp(1.0, scales.astype(np.int64) - 127), scales == 255
  step, bad = np.where(bad, 1, step).repeat(block_size), bad.repeat(block_size)
  if not (np.abs(number[~bad]) <= largest(element)).all():
    raise ValueError(f"a number is at most {largest(element)}.")
  planes.refuse_filler(codes[size:][~bad[size:]])
  with np.errstate(over="ignore", invalid="ignore"):
    # Two products of binary32, or one that is exact in binary64.
    value = np.abs(np.float32(number) * np.float32(step) if shares else number * step)
  value = np.minimum(value, np.finfo(np.float32).max)
  if not shares:
    value = np.where(value < TINY, 0, value)
  value = np.copysign(np.where(bad, np.nan, value), number)
  return value.astype(np.float32)[:size]


def _steps(scales, shared, element):
  """The scale of each block, float32, and where it is NaN, of bytes and floats."""
  if (shared[1:] != shared[:-1])[~np.isnan(shared[1:])].any():
    raise ValueError("all rows of a leaf must have the same scale.")
  least = least_shared(element)
  if not (np.isnan(shared) | (shared == 0) | (shared >= least)).all():
    raise ValueError(f"a shared scale must be 0, NaN or at least {least}.")
  each = shared.repeat(scales.size // max(len(shared), 1))
  bad = np.isnan(each)
  if (scales[~bad] > 126).any():
    raise ValueError("a scale of a block is a number from 0 to 448.")
  return np.float32(numbers("e4m3")[scales]) * each, bad
