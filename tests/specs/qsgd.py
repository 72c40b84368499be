"""QSGD and sums of its codes, in NumPy's binary32, which rounds once an operation."""

import numpy as np

from tests.specs import dithers, planes
from tests.specs import scales as scale_table

# The outermost level of `norm="rms"`, in root mean squares, by the bits of a code.
REACH = {1: 0.798, 2: 1.494, 3: 2.051, 4: 2.5125}


def top_of(bits, levels):
  """The largest magnitude of codes: s."""
  return 2**bits - 1 if levels == "uniform" else 2 ** (bits - 1) - 1


def scales_of(x, *, bits, bucket_size, norm, scale_per_row=False):
  """The scales that a row carries, float32[tiles, P], or [tiles, 1] per tensor."""
  per_word, words = planes.geometry(bits, bucket_size)
  leaf = planes.filled(x, bucket_size) if norm == "rms" else planes.as_leaf(x)
  tiles = planes.tiled(leaf, per_word, words)
  buckets = tiles
  if bucket_size is None:
    rows = len(tiles) if scale_per_row else 1
    buckets = tiles.reshape(rows, 1, tiles.size // max(rows, 1))
  wide = np.abs(buckets.astype(np.float64))
  with np.errstate(over="ignore", invalid="ignore"):
    if norm == "max":
      norms = wide.max(axis=2, initial=0)
    else:
      norms = np.sqrt(np.square(wide).sum(axis=2))
    norms[~np.isfinite(buckets).all(axis=2)] = np.nan
    found = scale_table.of_norms(norms)
    if norm == "rms":
      reach = np.float32(REACH[bits] / np.sqrt(bucket_size))
      found = scale_table.of_norms(found * reach)
  return np.broadcast_to(found, (len(tiles), found.shape[1])).copy()


def shared_scales(parts, **options):
  """The largest scales of all workers' parts, as :func:`scales_of`; NaN wins."""
  return np.max([scales_of(x, **options) for x in parts], axis=0)


def encode(
  x, *, key=None, bits, bucket_size, levels, rounding, scales=None, inline=True, **how
):
  """The rows of a leaf, uint32[tiles, B + scales]; ``how`` as of :func:`scales_of`."""
  per_word, words = planes.geometry(bits, bucket_size)
  top = top_of(bits, levels)
  if scales is None:
    scales = scales_of(x, bits=bits, bucket_size=bucket_size, **how)
  rms = how.get("norm") == "rms"
  leaf = planes.filled(x, bucket_size) if rms else planes.as_leaf(x)
  tiles = planes.tiled(leaf, per_word, words)
  scales = scale_table.given(scales, len(tiles), per_word, bucket_size)

  # L * 2^16 is an integer of 16 significant bits at most: exact in binary32.
  full = top << 16 if levels == "sign_magnitude" else top << 15
  fixed = fixed_point(tiles, scales, full)
  # With uniform levels positions are rounded, not magnitudes.
  signed = tiles if levels == "sign_magnitude" else np.abs(tiles)
  addend = dithers.addend(rounding, signed, key, bits=bits, bucket_size=bucket_size)
  if levels == "sign_magnitude":
    sign = np.signbit(tiles).astype(np.uint32) << np.uint32(bits - 1)
    codes = (fixed + addend) >> np.uint32(16) | sign
  else:
    position = np.where(tiles < 0, np.uint32(full) - fixed, np.uint32(full) + fixed)
    codes = (position + addend) >> np.uint32(16)
  packed = planes.pack(codes, bits, words)
  return planes.with_floats(packed, scales) if inline else packed


def fixed_point(tiles, scales, full, limit=np.inf):
  """Magnitudes over scales, in units of which a scale has ``full``: uint32."""
  above = np.nextafter(np.float32(full), np.float32(np.inf))
  with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
    multiplier = np.where(scales == 0, np.float32(0), above / scales)
    product = np.minimum(np.abs(tiles), np.float32(limit)) * multiplier[:, :, None]
  product = np.where(np.isnan(product), np.float32(0), product)
  return np.minimum(np.trunc(product), np.float32(full)).astype(np.uint32)


def decode(rows, size, *, bits, bucket_size, levels, scales=None):
  """The values of a payload, float32[size]; a bucket with a NaN scale is NaN."""
  rule = dict(bits=bits, bucket_size=bucket_size, levels=levels)
  if scales is not None:
    return decode_sums(integers(rows, size, **rule), scales, **rule)
  per_word, words = planes.geometry(bits, bucket_size)
  floats = 1 if bucket_size is None else per_word
  rows = planes.checked_rows(rows, size, per_word, words, floats)
  scale = scale_table.read(rows[:, words:], size, per_word, words)
  codes = planes.unpack(rows[:, :words], bits)
  top = top_of(bits, levels)
  if levels == "sign_magnitude":
    # Zero has the code 0 under every scale, except where a NaN spoils the bucket.
    planes.refuse_filler(codes[size:][np.isfinite(scale[size:])])
    negative, magnitude = codes > top, codes & np.uint32(top)
  else:
    signed = 2 * codes.astype(np.int64) - top
    negative, magnitude = signed < 0, np.abs(signed)
  value = magnitudes(magnitude, scale, top)
  return np.where(negative, -value, value)[:size]


def magnitudes(count, scale, top):
  """What integers stand for that are not negative, float32."""
  with np.errstate(over="ignore", invalid="ignore"):
    whole = (count // top).astype(np.float32) * scale
    part = count.astype(np.float32) * (scale * (np.float32(1) / np.float32(top)))
  return np.where(count % top == 0, whole, part)


def integers(rows, size, *, bits, bucket_size, levels):
  """The integers of rows of words alone, whose scales workers share: int64[size]."""
  rows = planes.checked_rows(rows, size, *planes.geometry(bits, bucket_size))
  codes = planes.unpack(rows, bits)[:size].astype(np.int64)
  top = top_of(bits, levels)
  signed = np.where(codes > top, top + 1 - codes, codes)  # s + 1 is the sign bit
  return 2 * codes - top if levels == "uniform" else signed


def decode_sums(sums, scales, *, bits, bucket_size, levels):
  """The values of sums of integers under shared scales, float32 like the sums."""
  per_word, words = planes.geometry(bits, bucket_size)
  tiles = -(-len(sums) // (per_word * words))
  each = np.broadcast_to(np.float32(scales), (tiles, np.shape(scales)[1]))
  scale = scale_table.per_element(each, per_word, words)[: len(sums)]
  value = magnitudes(np.abs(sums), scale, top_of(bits, levels))
  return np.where(np.asarray(sums) < 0, -value, value)


def _sum_rule(workers, bits, bucket_size, levels):
  """The largest sum of workers' codes, its bits, and the words of a row."""
  limit = workers * top_of(bits, levels)
  return limit, (2 * limit).bit_length(), planes.geometry(bits, bucket_size)[1]


def pack_sums(sums, workers, *, bits, bucket_size, levels):
  """The sums of a share as its owner sends them in `two_shot`, uint32[rows, B]."""
  limit, width, words = _sum_rule(workers, bits, bucket_size, levels)
  return planes.pack(sums + limit, width, words)


def unpack_sums(words, size, workers, *, bits, bucket_size, levels):
  """The sums that an owner sends in the second stage of `two_shot`, int64[size]."""
  limit, width, row = _sum_rule(workers, bits, bucket_size, levels)
  words = planes.checked_rows(words, size, 32 // width, row)
  fields = planes.unpack(words, width)
  planes.refuse_filler(fields[size:])
  if (fields[:size] > 2 * limit).any():
    raise ValueError(f"a sum of {workers} codes is at most {limit}.")
  return fields[:size].astype(np.int64) - limit


def split_stats(message, sizes, *, bits, bucket_size):
  """The scales of each leaf in a message of bit patterns: float32[tiles, P]."""
  per_word = 32 // bits
  shapes = [
    (1, 1) if bucket_size is None else (-(-size // (per_word * bucket_size)), per_word)
    for size in sizes
  ]
  counts = [rows * width for rows, width in shapes]
  if np.shape(message) != (sum(counts),):
    raise ValueError(f"the message must have {sum(counts)} floats.")
  found = np.ascontiguousarray(message, np.int32).view(np.float32)
  scale_table.check(found)
  parts = np.split(found, np.cumsum(counts)[:-1])
  return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def expected_variance(x, *, bits, bucket_size, norm, levels):
  """E || Q(x) - x ||^2 of equation 1 of Grubic et al. 2018, exactly, in float64."""
  x = np.asarray(x, np.float64).ravel()
  tiles = planes.tiled(x, *planes.geometry(bits, bucket_size))
  buckets = tiles if bucket_size else tiles.reshape(1, 1, -1)
  lengths = np.linalg.norm(buckets, ord={"max": np.inf, "l2": 2}[norm], axis=2)
  norms = lengths.repeat(buckets.shape[2])[: x.size]
  top, safe = top_of(bits, levels), np.where(norms == 0, 1, norms)
  if levels == "uniform":
    position, step = (x / safe + 1) / 2 * top, 2 * norms / top
  else:
    position, step = np.abs(x) / safe * top, norms / top
  position = np.clip(position, 0, top)  # a rounded norm may be below an element
  p = position - np.minimum(np.floor(position), top - 1)
  return float(np.sum(np.square(step) * p * (1 - p)))
