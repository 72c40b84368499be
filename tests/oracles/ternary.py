"""Computes Ternary in plain NumPy, for the library to agree with.

Two descriptions of the same quantiser, neither taken from the library:

* :func:`ternary_encode` follows docs/inside/wire-format.md bit by bit, but for the
  limit, c standard deviations, whose last bits depend on the order of additions: it is
  given;
* :func:`clip` and :func:`ternarize` are equations 9, 1 and 2 of Wen et al. 2017 in
  float64.
"""

import numpy as np

from tests.oracles import qsgd

PER_WORD = {"2bit": 16, "base3": 20}


def clip_limit(x, clip_sigmas):
  """c * sigma as float32, with sigma in float64; infinite where there is no limit."""
  leaf = qsgd.as_leaf(x).astype(np.float64)
  if clip_sigmas is None or not np.isfinite(leaf).all() or not leaf.size:
    return np.float32(np.inf)
  limit = np.float32(clip_sigmas * leaf.std())
  return limit if limit > 0 else np.float32(np.inf)


def ternary_scales(
  x, *, packing, bucket_size, scaler="clipped", limit=np.inf, scale_per_row=False
):
  """A worker's own scales, float32[tiles, P], or [tiles, 1] without buckets.

  Args:
    x: the leaf, of any shape.
    packing: "2bit" or "base3".
    bucket_size: the elements that share a scale; None is one scale a leaf.
    scaler: "clipped" or "sigma".
    limit: as :func:`clip_limit`.
    scale_per_row: with `bucket_size=None`, one scale for each row, as in later stages.
  """
  tiles = _tiles(x, packing, bucket_size)
  buckets = tiles
  if bucket_size is None:
    rows = len(tiles) if scale_per_row else 1
    buckets = tiles.reshape(rows, 1, tiles.size // rows)
  largest = np.abs(buckets).max(axis=2, initial=0)
  if scaler == "clipped":
    norms = np.minimum(largest, limit)
  elif scaler == "sigma":
    norms = np.where(np.isfinite(limit), limit, largest)
  else:
    raise ValueError(f"`scaler` must be 'clipped' or 'sigma', got {scaler!r}.")
  norms = np.where(np.isfinite(buckets).all(axis=2), norms, np.nan)
  scales = qsgd.scales_of_norms(norms)
  return np.broadcast_to(scales, (len(tiles), scales.shape[1])).copy()


def ternary_encode(
  x,
  *,
  key=None,
  packing,
  bucket_size,
  scales,
  limit=np.inf,
  rounding="stochastic",
  lanes=None,
  first_row=0,
  inline=True,
):
  """The rows that the specification asks for, uint32[tiles, B + scales].

  Where the scale is NaN the page leaves the codes open; here they are those of zero.

  Args:
    x: the leaf, of any shape.
    key: the leaf's key, two 32-bit words.
    packing: "2bit" or "base3".
    bucket_size: the elements that share a scale; None is one scale a leaf.
    scales: float32[tiles, P or 1], the worker's own or those that all share.
    limit: as :func:`clip_limit`.
    rounding: "stochastic" or "nearest".
    lanes: uint32[tiles, P, B] to use instead of :func:`random_lanes`.
    first_row: the index of the first row, for :func:`random_lanes`.
    inline: whether the scales follow the words; not where workers share them.
  """
  tiles = _tiles(x, packing, bucket_size)
  scales = np.asarray(scales, np.float32)
  expected = (len(tiles), 1 if bucket_size is None else PER_WORD[packing])
  if scales.shape != expected:
    raise ValueError(f"`scales` must have the shape {expected}, got {scales.shape}.")
  above = np.nextafter(np.float32(2**16), np.float32(np.inf))
  with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
    multiplier = np.where(scales == 0, np.float32(0), above / scales)
    product = np.minimum(np.abs(tiles), np.float32(limit)) * multiplier[:, :, None]
  product = np.where(np.isnan(product), np.float32(0), product)
  fixed = np.minimum(np.trunc(product), np.float32(2**16)).astype(np.uint32)
  if rounding == "stochastic" and lanes is None:
    lanes = random_lanes(
      key, len(tiles), packing=packing, bucket_size=bucket_size, first_row=first_row
    )
  addend = np.uint32(2**15)
  if rounding == "stochastic":
    addend = qsgd.signed_lanes(lanes, tiles)
  magnitude = ((fixed + addend) >> np.uint32(16)).astype(np.int64)
  packed = pack(np.where(tiles < 0, -magnitude, magnitude), packing)
  if not inline:
    return packed
  return np.concatenate([packed, scales.view(np.uint32)], axis=1)


def random_lanes(key, tiles, *, packing, bucket_size, first_row=0):
  """The 16-bit integers of stochastic rounding, uint32[tiles, P, B].

  Planes of a word take them in order however many there are, so the first of the 32
  planes of 1-bit codes are those of any fewer.
  """
  words = qsgd.PER_TENSOR_WORDS if bucket_size is None else bucket_size
  lanes = qsgd.random_lanes(key, tiles, bits=1, bucket_size=words, first_row=first_row)
  return lanes[:, : PER_WORD[packing]]


def pack(z, packing):
  """Integers -1, 0, 1 of int64[tiles, P, B] as words, uint32[tiles, B].

  Example:
    >>> pack(np.full([1, 20, 1], -1), "base3")  # all digits 0
    array([[1]], dtype=uint32)
  """
  words = np.zeros((z.shape[0], z.shape[2]), np.uint64)
  if packing == "2bit":
    for k in range(16):
      words |= (z[:, k] % 4).astype(np.uint64) << np.uint64(2 * k)
    return words.astype(np.uint32)
  for k in range(20):
    words = 3 * words + (z[:, k] + 1).astype(np.uint64)
  # Less than 3^20 * 2^32 < 2^64: no bit is lost.
  return ((words << np.uint64(32)) // np.uint64(3**20) + np.uint64(1)).astype(np.uint32)


def clip(g, limit):
  """Equation 9 of Wen et al. 2017, float64: f(g_i), with c * sigma for `limit`.

  Example:
    >>> clip([-3, 1, 2], 1.5)
    array([-1.5,  1. ,  1.5])
  """
  g = np.asarray(g, np.float64)
  return np.where(np.abs(g) <= limit, g, np.sign(g) * limit)


def ternarize(g, uniform, scaler=None):
  """Equations 1 and 2 of Wen et al. 2017, float64 of the shape of `g`.

  b_k is 1 with probability |g_k| / s: where `uniform >= 1 - |g_k| / s`, so that
  `uniform = (r + 0.5) / 2^16` makes the choice of the fixed-point rule with r.

  Args:
    g: the gradient, clipped already.
    uniform: in [0, 1): a number, or an array of the shape of `g`.
    scaler: s; None is max(abs(g)).

  Example:
    >>> ternarize([-4, 1, 3, 0], 0.5)
    array([-4.,  0.,  4.,  0.])
  """
  g = np.asarray(g, np.float64)
  s = np.abs(g).max() if scaler is None else scaler
  b = uniform >= 1 - np.abs(g) / s
  return s * np.sign(g) * b


def _tiles(x, packing, bucket_size):
  words = qsgd.PER_TENSOR_WORDS if bucket_size is None else bucket_size
  return qsgd.tiled(qsgd.as_leaf(x), PER_WORD[packing], words)
