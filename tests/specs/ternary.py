"""Ternary; the limit is given, for its last bits depend on the order of additions."""

import numpy as np

from tests.specs import dithers, planes, qsgd
from tests.specs import scales as scale_table

PER_WORD = {"2bit": 16, "base3": 20}


def clip_limit(x, clip_sigmas):
  """c * sigma as float32, with sigma in float64; infinite where there is no limit."""
  leaf = planes.as_leaf(x).astype(np.float64)
  if clip_sigmas is None or not np.isfinite(leaf).all() or not leaf.size:
    return np.float32(np.inf)
  limit = np.float32(clip_sigmas * leaf.std())
  return limit if limit > 0 else np.float32(np.inf)


def scales_of(
  x, *, packing, bucket_size, scaler="clipped", limit=np.inf, scale_per_row=False
):
  """A worker's own scales, float32[tiles, P], or [tiles, 1] without buckets."""
  buckets = tiles = _tiles(x, packing, bucket_size)
  if bucket_size is None:
    rows = len(tiles) if scale_per_row else 1
    buckets = tiles.reshape(rows, 1, tiles.size // rows)
  largest = np.abs(buckets).max(axis=2, initial=0)
  if scaler == "clipped":
    norms = np.minimum(largest, limit)
  else:  # sigma
    norms = np.where(np.isfinite(limit), limit, largest)
  norms = np.where(np.isfinite(buckets).all(axis=2), norms, np.nan)
  scales = scale_table.of_norms(norms)
  return np.broadcast_to(scales, (len(tiles), scales.shape[1])).copy()


def encode(
  x, *, key=None, scales=None, limit=np.inf, rounding="stochastic", inline=True, **rule
):
  """The rows of a leaf, uint32[tiles, B + scales]; of a packing and a bucket size."""
  packing, bucket_size = rule["packing"], rule["bucket_size"]
  tiles = _tiles(x, **rule)
  if scales is None:
    scales = scales_of(x, limit=limit, **rule)
  scales = scale_table.given(scales, len(tiles), PER_WORD[packing], bucket_size)
  fixed = qsgd.fixed_point(tiles, scales, 2**16, limit)
  # Planes of a word take lanes in order however many there are, so the first of the 32
  # planes of 1-bit codes are those of any fewer.
  addend = dithers.addend(rounding, tiles, key, bits=1, bucket_size=bucket_size)
  magnitude = ((fixed + addend) >> np.uint32(16)).astype(np.int64)
  packed = pack(np.where(tiles < 0, -magnitude, magnitude), packing)
  return planes.with_floats(packed, scales) if inline else packed


def pack(z, packing):
  """Integers -1, 0, 1 of int64[tiles, P, B] as words, uint32[tiles, B]."""
  if packing == "2bit":
    return planes.pack(z % 4, 2, z.shape[2])
  return _word_of_digits(np.moveaxis(z + 1, 1, 0))


def _word_of_digits(digits):
  value = np.zeros(digits[0].shape, np.uint64)
  for digit in digits:
    value = 3 * value + digit.astype(np.uint64)
  # Less than 3^20 * 2^32 < 2^64: no bit is lost.
  return ((value << np.uint64(32)) // np.uint64(3**20) + np.uint64(1)).astype(np.uint32)


def decode(rows, size, *, packing, bucket_size, scales=None):
  """The values of a payload, float32[size]; scales that all workers share are given."""
  z, scale = _read(rows, size, packing, bucket_size, scales)
  return z.astype(np.float32) * scale


def integers(rows, size, **options):
  """The integers -1, 0 and 1 of a payload, int64[size]; options of :func:`decode`."""
  return _read(rows, size, **options)[0]


def _read(rows, size, packing, bucket_size, scales):
  """Integers and scales of the elements, int64[size] and float32[size]."""
  per_word = PER_WORD[packing]
  words = planes.geometry(2, bucket_size)[1]
  inline = 1 if bucket_size is None else per_word
  floats = inline if scales is None else 0
  rows = planes.checked_rows(rows, size, per_word, words, floats)
  if scales is None:
    scales = planes.as_floats(rows[:, words:])
  scales = np.broadcast_to(np.asarray(scales, np.float32), (len(rows), inline))
  scale_table.check(scales)
  scale = scale_table.per_element(scales, per_word, words)
  if packing == "2bit":
    codes = planes.unpack(rows[:, :words], 2).astype(np.int64)
    if (codes == 2).any():
      raise ValueError("no integer has the code 2.")
    z = np.where(codes == 3, -1, codes)
  else:
    z = _digits(rows[:, :words]) - 1
  planes.refuse_filler(z[size:][np.isfinite(scale[size:])])
  if z[scale == 0].any():
    raise ValueError("under a scale of 0 all integers are 0.")
  return z[:size], scale[:size]


def _digits(words):
  """The twenty digits of each word, int64, in the leaf's order."""
  fraction, digits = words.astype(np.uint64), []
  for _ in range(20):
    fraction = 3 * fraction
    digits.append(fraction >> np.uint64(32))
    fraction &= np.uint64(2**32 - 1)
  if (words != _word_of_digits(digits)).any():
    raise ValueError("a word must be floor(v 2^32 / 3^20) + 1 of its digits' v.")
  return np.stack(digits, axis=1).astype(np.int64).ravel()


def clip(g, limit):
  """Equation 9 of Wen et al. 2017, float64: f(g_i), with c * sigma for `limit`."""
  g = np.asarray(g, np.float64)
  return np.where(np.abs(g) <= limit, g, np.sign(g) * limit)


def ternarize(g, uniform, scaler=None):
  """Equations 1 and 2 of Wen et al. 2017, float64 of the shape of `g`.

  b_k is 1 with probability |g_k| / s: where `uniform >= 1 - |g_k| / s`, so that
  `uniform = (r + 0.5) / 2^16` makes the choice of the fixed-point rule with r.
  The gradient g is clipped already, and s is max(abs(g)), or given.
  """
  g = np.asarray(g, np.float64)
  s = np.abs(g).max() if scaler is None else scaler
  b = uniform >= 1 - np.abs(g) / s
  return s * np.sign(g) * b


def _tiles(x, packing, bucket_size):
  words = planes.geometry(2, bucket_size)[1]
  return planes.tiled(planes.as_leaf(x), PER_WORD[packing], words)
