"""Computes QSGD and sums of codes in plain NumPy, for the library to agree with.

Two descriptions of the same quantiser, neither taken from the library:

* :func:`qsgd_encode` follows the fixed-point rule of docs/inside/wire-format.md to the
  bit;
* :func:`qsgd_ideal` is equation 1 of Grubic et al. 2018 on real numbers (float64).

Binary32 arithmetic here is NumPy's: each operation rounds once, to nearest even, and
subnormal numbers are kept.
"""

import hashlib

import numpy as np

PER_TENSOR_WORDS = 512
DENSE_WORDS = 128

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry2x32(key, c0, c1, rounds=20):
  """Threefry-2x32 (Salmon et al. 2011).

  Args:
    key: two 32-bit words.
    c0: the first word of each counter, an integer or an array.
    c1: the second word.
    rounds: the number of rounds.

  Returns:
    Two uint32 arrays of the broadcast shape of `c0` and `c1`.

  Example:
    >>> a, b = threefry2x32((0, 0), 0, 0)
    >>> hex(a), hex(b)
    ('0x6b200159', '0x99ba4efe')
    >>> [hex(word) for word in threefry2x32((0, 0), 0, 0, 13)]  # Random123's answer
    ['0x9d1c5ec6', '0x8bd50731']
  """
  k0, k1 = (np.asarray(word, np.uint32) for word in key)
  schedule = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
  x0, x1 = np.broadcast_arrays(np.asarray(c0, np.uint32), np.asarray(c1, np.uint32))
  with np.errstate(over="ignore"):  # NumPy warns where scalars wrap around
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for number in range(rounds):
      group, place = divmod(number, 4)
      rotation = _ROTATIONS[group % 2][place]
      x0 = x0 + x1
      x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
      x1 = x1 ^ x0
      if place == 3:
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
  return x0, x1


def fold_in(key, number):
  """The key that `jax.random.fold_in` makes of a threefry key and a number.

  Example:
    >>> fold_in((0, 7), 3)
    (276534068, 1641862660)
  """
  return tuple(int(word) for word in threefry2x32(key, 0, number))


def name_words(text):
  """The two words of a leaf's name, or of the names of a matrix's leaves.

  Example:
    >>> [hex(word) for word in name_words("abc")]
    ['0xba7816bf', '0x8f01cfea']
  """
  digest = hashlib.sha256(text.encode()).digest()
  return tuple(int.from_bytes(digest[i : i + 4], "big") for i in (0, 4))


def leaf_key(seed, step, name, *more):
  """The key of a leaf by its name, or of the stage of one, with a newline behind it.

  All workers share it; with a worker's number behind it, it is that worker's own.
  """
  result = (0, seed)
  for number in (step, *name_words(name), *more):
    result = fold_in(result, number)
  return result


def mask(worker):
  """The page's constant of a worker, below 2^16.

  Example:
    >>> [mask(i) for i in range(4)]
    [0, 65535, 32768, 32767]
  """
  mirrored = int(f"{worker >> 1:016b}"[::-1], 2)
  return mirrored ^ 0xFFFF if worker % 2 else mirrored


def leaf_dither(seed, step, name, worker, *more):
  """The key of a leaf that all workers share, and a worker's mask: three integers."""
  return (*leaf_key(seed, step, name, *more), mask(worker))


def random_lanes(key, tiles, *, bits, bucket_size, first_row=0):
  """The 16-bit integers of stochastic rounding, uint32[tiles, P, B].

  Args:
    key: the leaf's key, two 32-bit words; a mask behind them is XORed with each.
    tiles: the number of rows.
    bits: the bits of a code.
    bucket_size: the words of a row; None is one scale a tensor, 512 words.
    first_row: the index of the first of the rows.
  """
  per_word, words = _geometry(bits, bucket_size)
  groups = -(-per_word // 8)
  row = np.arange(first_row, first_row + tiles, dtype=np.uint32)[:, None]
  column = np.arange(groups * words, dtype=np.uint32)
  a, b = (
    out.reshape(tiles, groups, words) for out in threefry2x32(key[:2], row, column, 13)
  )
  low, high = np.uint32(0xFFFF), np.uint32(16)
  q = [a & low, a >> high, b & low, b >> high]
  pairs = [q[0] ^ q[2], q[1] ^ q[3], q[0] ^ q[3], q[1] ^ q[2]]
  lanes = np.stack(q + pairs, axis=2).reshape(tiles, groups * 8, words)
  return lanes[:, :per_word] ^ np.uint32(key[2] if len(key) > 2 else 0)


def signed_lanes(lanes, x):
  """Returns what rounds the magnitudes of x as `lanes` would round x itself."""
  return np.where(np.signbit(x), 0xFFFF - lanes, lanes)


def as_leaf(x):
  """An array of any shape as a flat float32 one."""
  return np.asarray(x).astype(np.float32).ravel()


def tiled(flat, per_word, words):
  """The elements as [tiles, P, B], filled with zeros."""
  flat = flat.ravel()
  tiles = -(-flat.size // (per_word * words))
  padded = np.zeros(tiles * per_word * words, flat.dtype)
  padded[: flat.size] = flat
  return padded.reshape(tiles, per_word, words)


def scales_of_norms(norms):
  """The page's table: norms, NaN where an element is not finite, to float32 scales."""
  with np.errstate(over="ignore", invalid="ignore"):
    norms = np.minimum(np.asarray(norms), np.finfo(np.float32).max).astype(np.float32)
    raised = np.maximum(norms, np.float32(2.0**-96))
    return np.where(norms < np.float32(2.0**-126), np.float32(0), raised)


def pack(codes, bits, bucket_size):
  """Codes in the leaf's order to planar words, uint32[tiles, B]; code 0 fills."""
  per_word, words = _geometry(bits, bucket_size)
  planes = tiled(np.asarray(codes, np.uint32), per_word, words)
  if bits < 32 and (planes >> np.uint32(bits)).any():
    raise ValueError(f"a code does not fit in {bits} bits.")
  packed = np.zeros((len(planes), words), np.uint32)
  for plane in range(per_word):
    packed |= planes[:, plane] << np.uint32(plane * bits)
  return packed


def unpack(packed, size, bits):
  """The inverse of :func:`pack`: the first `size` codes, uint32[size]."""
  per_word = 32 // bits
  planes = np.empty((len(packed), per_word, packed.shape[1]), np.uint32)
  for plane in range(per_word):
    planes[:, plane] = packed >> np.uint32(plane * bits) & np.uint32(2**bits - 1)
  return planes.ravel()[:size]


def qsgd_scales(x, *, bits, bucket_size, norm, scale_per_row=False):
  """The scales that a row carries, float32[tiles, P], or [tiles, 1] per tensor.

  The l2 norm is accumulated in float64 and rounded once, so it neither overflows nor
  underflows on the way; a sum in binary32 may differ in the last bits.

  Args:
    x: the leaf, of any shape.
    bits: the bits of a code.
    bucket_size: the elements that share a scale; None is one scale a tensor.
    norm: "max" or "l2".
    scale_per_row: with `bucket_size=None`, one scale for each row instead, as in the
      second stage of `two_shot`.
  """
  per_word, words = _geometry(bits, bucket_size)
  tiles = tiled(as_leaf(x), per_word, words)
  if bucket_size is not None:
    buckets = tiles
  elif scale_per_row:
    buckets = tiles.reshape(len(tiles), 1, per_word * words)
  else:
    buckets = tiles.reshape(1, 1, tiles.size)
  wide = np.abs(buckets.astype(np.float64))
  with np.errstate(over="ignore", invalid="ignore"):
    if norm == "max":
      norms = wide.max(axis=2, initial=0)
    elif norm == "l2":
      norms = np.sqrt(np.square(wide).sum(axis=2))
    else:
      raise ValueError(f"`norm` must be 'max' or 'l2', got {norm!r}.")
  scales = scales_of_norms(norms)
  scales[~np.isfinite(buckets).all(axis=2)] = np.nan
  return np.broadcast_to(scales, (len(tiles), scales.shape[1])).copy()


def shared_scales(parts, *, bits, bucket_size, norm):
  """The largest scales of all workers' parts, as :func:`qsgd_scales`; NaN wins."""
  options = dict(bits=bits, bucket_size=bucket_size, norm=norm)
  return np.max([qsgd_scales(x, **options) for x in parts], axis=0)


def qsgd_encode(
  x,
  *,
  key=None,
  bits,
  bucket_size,
  norm,
  levels,
  rounding,
  scales=None,
  lanes=None,
  first_row=0,
  scale_per_row=False,
  inline=True,
):
  """The rows that the specification asks for, uint32[tiles, B + scales].

  Where the scale is NaN the page leaves the codes open; here they are those of zero.

  Args:
    x: the leaf, of any shape.
    key: the leaf's key, two 32-bit words; only read for stochastic rounding.
    bits: the bits of a code, 1 to 8 or 16.
    bucket_size: the elements that share a scale; None is one scale a tensor.
    norm: "max" or "l2".
    levels: "sign_magnitude" or "uniform".
    rounding: "nearest" or "stochastic".
    scales: float32[tiles, P or 1] to use instead of :func:`qsgd_scales`.
    lanes: uint32[tiles, P, B] to use instead of :func:`random_lanes`.
    first_row: the index of the first row, for :func:`random_lanes`.
    scale_per_row: as in :func:`qsgd_scales`.
    inline: whether the scales follow the words; not where workers share them.
  """
  per_word, words = _geometry(bits, bucket_size)
  top = _levels(bits, levels)
  tiles = tiled(as_leaf(x), per_word, words)
  if scales is None:
    scales = qsgd_scales(
      x, bits=bits, bucket_size=bucket_size, norm=norm, scale_per_row=scale_per_row
    )
  scales = np.asarray(scales, np.float32)
  expected = (len(tiles), 1 if bucket_size is None else per_word)
  if scales.shape != expected:
    raise ValueError(f"`scales` must have the shape {expected}, got {scales.shape}.")

  # L * 2^16 is an integer of 16 significant bits at most: exact in binary32.
  full = top << 16 if levels == "sign_magnitude" else top << 15
  above = np.nextafter(np.float32(full), np.float32(np.inf))
  with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
    multiplier = np.where(scales == 0, np.float32(0), above / scales)
    product = np.abs(tiles) * multiplier[:, :, None]
  product = np.where(np.isnan(product), np.float32(0), product)
  fixed = np.minimum(np.trunc(product), np.float32(full)).astype(np.uint32)

  if rounding == "nearest":
    addend = np.uint32(2**15)
  elif rounding == "stochastic":
    if lanes is None:
      lanes = random_lanes(
        key, len(tiles), bits=bits, bucket_size=bucket_size, first_row=first_row
      )
    addend = lanes if levels == "uniform" else signed_lanes(lanes, tiles)
  else:
    raise ValueError(f"`rounding` must be 'nearest' or 'stochastic', got {rounding!r}.")
  negative = tiles < 0
  if levels == "sign_magnitude":
    sign = np.signbit(tiles).astype(np.uint32) << np.uint32(bits - 1)
    codes = (fixed + addend) >> np.uint32(16) | sign
  else:
    center = np.uint32(full)
    position = np.where(negative, center - fixed, center + fixed)
    codes = (position + addend) >> np.uint32(16)
  packed = pack(codes, bits, words)
  if not inline:
    return packed
  return np.concatenate([packed, scales.view(np.uint32)], axis=1)


def sum_of_codes(rows, *, bits, levels):
  """The integers of rows that share their scales, added: int64[tiles * P * B].

  Args:
    rows: uint32[N, tiles, B], of N workers.
    bits: the bits of a code.
    levels: "sign_magnitude" or "uniform".
  """
  top, size = _levels(bits, levels), rows[0].size * (32 // bits)
  codes = np.array([unpack(words, size, bits) for words in rows], np.int64)
  signed = np.where(codes > top, top + 1 - codes, codes)  # s + 1 is the sign bit
  return (2 * codes - top if levels == "uniform" else signed).sum(axis=0)


def values_of_sums(sums, scales, *, bits, bucket_size, levels):
  """What sums of codes stand for, float32, under float32[tiles, P or 1] scales."""
  per_word, words = _geometry(bits, bucket_size)
  top = _levels(bits, levels)
  scale = np.broadcast_to(scales, (len(scales), per_word)).repeat(words)
  size = np.abs(sums)
  with np.errstate(over="ignore", invalid="ignore"):
    whole = (size // top).astype(np.float32) * scale
    part = size.astype(np.float32) * (scale * (np.float32(1) / np.float32(top)))
  value = np.where(size % top == 0, whole, part)
  return np.where(sums < 0, -value, value)


def pack_sums(sums, workers, *, bits, bucket_size, levels):
  """The sums of a share as its owner sends them in `two_shot`, uint32[rows, B]."""
  limit = workers * _levels(bits, levels)
  width = int(np.ceil(np.log2(2 * limit + 1)))
  return pack(sums + limit, width, _geometry(bits, bucket_size)[1])


def dense_encode(x, dtype, key=None):
  """The rows of a Dense payload, uint32[tiles, 128].

  Args:
    x: the leaf, of any shape.
    dtype: float32, float16 or ml_dtypes.bfloat16.
    key: uint32[2] for stochastic rounding; else the cast rounds to nearest even.
  """
  dtype = np.dtype(dtype)
  bits = 8 * dtype.itemsize
  with np.errstate(over="ignore"):
    values = as_leaf(x).astype(dtype)
  if key is not None:
    tiles = -(-values.size // (2 * DENSE_WORDS))
    lanes = random_lanes(key, tiles, bits=16, bucket_size=DENSE_WORDS)
    draws = signed_lanes(lanes.ravel()[: values.size], as_leaf(x))
    values = dense_stochastic(as_leaf(x), dtype, draws)
  return pack(values.view(f"uint{bits}"), bits, DENSE_WORDS)


def dense_stochastic(x, dtype, draws):
  """Each number as one of its two neighbors of 16 bits: a table of all is searched.

  Args:
    x: float32[n].
    dtype: float16 or ml_dtypes.bfloat16.
    draws: uint32[n], from 0 to 2^16 - 1.
  """
  with np.errstate(over="ignore"):
    cast = x.astype(dtype)
  infinity = np.array(np.inf, dtype).view(np.uint16)
  table = np.arange(infinity, dtype=np.uint16).view(dtype).astype(np.float64)
  size = np.where(np.isfinite(cast), np.abs(x), 0).astype(np.float64)
  below = np.searchsorted(table, size, "right") - 1
  above = np.minimum(below + 1, len(table) - 1)  # nothing is above the largest
  step = np.where(above > below, table[above] - table[below], 1)
  share = (size - table[below]) / step  # exact: binary64, and steps are powers of two
  up = (above > below) & (np.floor(share * 2**16) + draws >= 2**16)
  rounded = np.where(up, above, below).astype(np.uint16).view(dtype)
  return np.where(np.isfinite(cast), np.copysign(rounded, cast), cast)


def qsgd_ideal(x, uniform, *, bits, bucket_size, norm, levels, scales=None):
  """Equation 1 of Grubic et al. 2018 in float64, float64 of the shape of `x`.

  With `sign_magnitude`, section 2.3: |v| / norm is in [l / s, (l + 1) / s] and becomes
  (l + 1) / s with probability p = |v| / norm * s - l. With `uniform`, section 3.2.2:
  the same on [-norm, norm], cut into s = 2^bits - 1 intervals. A zero bucket is zero.

  The upper end is taken where `uniform >= 1 - p`, so that `uniform = (r + 0.5) / 2^16`
  makes the choice that the fixed-point rule makes with the integer r, and 0.5 rounds
  to the nearest level.

  Args:
    x: the leaf, of any shape.
    uniform: in [0, 1): a number, or an array of the shape of `x`.
    bits: the bits of a code.
    bucket_size: the elements that share a norm; None is one norm a tensor.
    norm: "max" or "l2".
    levels: "sign_magnitude" or "uniform".
    scales: float[tiles, P or 1] to use as norms.
  """
  x = np.asarray(x, np.float64)
  norms = _norms(x, bits, bucket_size, norm, scales)
  lower, p, step = _interval(x.ravel(), norms, bits, levels)
  level = lower + (np.broadcast_to(uniform, x.shape).ravel() >= 1 - p)
  if levels == "uniform":
    value = np.where(norms == 0, 0, level * step - norms)
  else:
    value = np.copysign(level * step, x.ravel())
  return value.reshape(x.shape)


def qsgd_expected_variance(x, *, bits, bucket_size, norm, levels, scales=None):
  """E || Q(x) - x ||^2 under stochastic rounding, exactly: the sum of step^2 p (1 - p).

  The arguments are those of :func:`qsgd_ideal`.
  """
  x = np.asarray(x, np.float64).ravel()
  norms = _norms(x, bits, bucket_size, norm, scales)
  _, p, step = _interval(x, norms, bits, levels)
  return float(np.sum(np.square(step) * p * (1 - p)))


def _geometry(bits, bucket_size):
  """The codes of a word, and the words of a row."""
  return 32 // bits, PER_TENSOR_WORDS if bucket_size is None else bucket_size


def _levels(bits, levels):
  if levels == "sign_magnitude" and bits >= 2:
    return 2 ** (bits - 1) - 1
  if levels == "uniform":
    return 2**bits - 1
  raise ValueError(f"no levels {levels!r} of {bits} bits.")


def _norms(x, bits, bucket_size, norm, scales):
  """The norm of each element's bucket, float64[size]."""
  per_word, words = _geometry(bits, bucket_size)
  if scales is not None:
    per_bucket = np.asarray(scales, np.float64)
    per_bucket = np.broadcast_to(per_bucket, (len(per_bucket), per_word))
    return np.repeat(per_bucket.ravel(), words)[: x.size]
  tiles = tiled(x, per_word, words)
  if bucket_size is None:
    tiles = tiles.reshape(1, 1, -1)
  order = {"max": np.inf, "l2": 2}[norm]
  per_bucket = np.linalg.norm(tiles, ord=order, axis=2) if x.size else np.zeros(0)
  return np.repeat(per_bucket.ravel(), tiles.shape[2])[: x.size]


def _interval(x, norms, bits, levels):
  """The level below each element, the probability of the next, and their distance."""
  top = _levels(bits, levels)
  safe = np.where(norms == 0, 1, norms)
  if levels == "uniform":
    position, step = (x / safe + 1) / 2 * top, 2 * norms / top
  else:
    position, step = np.abs(x) / safe * top, norms / top
  position = np.clip(position, 0, top)  # a rounded norm may be below an element
  lower = np.minimum(np.floor(position), top - 1)
  return lower, position - lower, step
