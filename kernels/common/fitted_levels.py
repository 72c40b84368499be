"""Fitted levels: fits levels to the gradients, and encodes with them, plane by plane.

The steps are a histogram, a dynamic program, and rounding. See
docs/inside/wire-format.md for the rule. Levels are multiples of 1/256 of the scale, the
same on both sides of zero. The last level is 1.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.kernels.common.fixed_point import (
  FRACTION,
  Lane,
  rounded,
  rounding_lanes,
  signed,
)
from gradcomp._src.kernels.common.piecewise_linear import Line, coordinate, to_units
from gradcomp._src.kernels.common.planes import (
  float_words,
  floats,
  pack_planes,
  planes_per_word,
  stacked,
  tile_segments,
  unpack_planes,
)
from gradcomp._src.kernels.common.scales import Norm, norms, scales

BINS = 256
_SAMPLED = 128  # buckets of a leaf that are counted, at most
MOST_COUNTED = 1 << 16  # elements of a leaf that are counted, at most
_WEIGHT = (1 << 13) - BINS  # the sum that counts are cut to, with room for rounding
_NEVER = np.uint32(1 << 31)  # the cost of a step that leads to no higher edge


def first_levels(bits: int) -> jax.Array:
  """Returns equally spaced levels above zero: ``float32[2**(bits - 1)]``.

  Example:
    >>> first_levels(2) * 3
    Array([0.99609375, 3.        ], dtype=float32)
  """
  count = 2 ** (bits - 1)
  places = np.round(BINS * (np.arange(count) + 0.5) / (count - 0.5))
  return jnp.asarray(places / BINS, jnp.float32)


def histogram(
  x: jax.Array, *, bucket_size: int, scale: jax.Array | None, norm: Norm
) -> jax.Array:
  """Counts the normalized magnitudes of a sample in 256 bins: ``int32[256]``.

  The sample is up to 128 whole buckets, evenly spaced, and no more than 2**16 elements.
  An array that is shorter than a bucket counts as one. Elements whose scale is 0 or NaN
  are not counted. The scale is ``float32[]``, or None for each bucket's ``norm``.

  Example:
    >>> x = jnp.array([1.0, -2.0])
    >>> counts = histogram(x, bucket_size=32, scale=None, norm="max")
    >>> counts.nonzero()[0].tolist()
    [128, 255]
  """
  if not x.size:
    return jnp.zeros(BINS, jnp.int32)
  whole = max(1, x.size // bucket_size)
  size = min(x.size, bucket_size)
  count = min(whole, _SAMPLED, max(1, MOST_COUNTED // size))
  picked = np.arange(count) * whole // count
  sample = x[: whole * size].reshape(whole, size)[picked]
  if scale is None:
    scale = scales(norms(sample, norm))[:, None]
  sample = sample[:, :MOST_COUNTED]
  valid = jnp.broadcast_to(scale > 0, sample.shape)  # neither zero nor NaN
  place = jnp.abs(sample) * (np.float32(BINS) / scale)
  place = jnp.minimum(jnp.where(valid, place, 0.0).astype(jnp.int32), BINS - 1)
  return jnp.zeros(BINS, jnp.int32).at[place].add(valid.astype(jnp.int32))


def fit(counts: jax.Array, levels: jax.Array) -> jax.Array:
  r"""Returns the levels that minimize the variance of stochastic rounding.

  A magnitude :math:`\mu` between neighboring levels :math:`a \le \mu \le b` has the
  variance :math:`(b - \mu)(\mu - a)`. One below the first level :math:`l` has
  :math:`l^2 - \mu^2`, since its neighbors are :math:`\pm l`. A dynamic program over
  the 257 edges of the bins finds the least sum. It takes magnitudes to be in the middle
  of their bins, and rounds counts to one in 7936 of all.

  Counts are added over all workers. Without any, ``levels`` come back.

  References:
    Zhang et al., `ZipML <https://arxiv.org/abs/1611.05402>`_, 2017, section 3
  """
  # Sums of integers have the same value in any order. These are four times the
  # variances, and stay below 2**31 because counts are cut to a total below 2**13.
  total = jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)
  weight = jnp.round(counts * (np.float32(_WEIGHT) / total)).astype(jnp.uint32)
  edge = np.arange(BINS + 1)
  twice = 2 * np.arange(BINS) + 1  # the middle of a bin
  below = np.maximum(2 * edge[:, None] - twice, 0).astype(np.uint32)  # [edge, bin]
  above = np.maximum(twice - 2 * edge[:, None], 0).astype(np.uint32)
  around = np.maximum((2 * edge[:, None]) ** 2 - twice**2, 0).astype(np.uint32)
  cost = jnp.where(edge[:, None] < edge, jnp.dot(above * weight, below.T), _NEVER)
  least = jnp.dot(around, weight)
  arrived = []
  for _ in range(levels.size - 1):
    totals = least[:, None] + cost
    arrived.append(jnp.argmin(totals, axis=0))
    least = jnp.minimum(jnp.min(totals, axis=0), _NEVER - 1)
  places = [jnp.int32(BINS)]
  for source in reversed(arrived):
    places.append(source[places[-1]].astype(jnp.int32))
  fitted = jnp.stack(places[::-1]).astype(jnp.float32) / BINS
  return jnp.where(jnp.any(counts > 0), fitted, levels)


def _lines(levels: jax.Array) -> list[Line]:
  """Returns the lines from magnitudes to coordinates, which count codes from zero.

  The first level is half a code above zero.
  """
  places = (levels * BINS).astype(jnp.int32)
  unit = 1 << FRACTION
  lines = [Line(np.float32(0), np.float32(BINS // 2) / places[0], np.int32(0))]
  for i in range(levels.size - 1):
    distance = places[i + 1] - places[i]
    offset = i * unit + unit // 2 - places[i] * unit // distance
    lines.append(Line(levels[i] * unit, np.float32(BINS) / distance, offset))
  return lines


def encode_rows(
  x: jax.Array,
  scale: jax.Array,
  levels: jax.Array,
  dither: jax.Array | None,
  *,
  bits: int,
  bucket_size: int,
) -> jax.Array:
  """Encodes a flat array as rows of words, scales and ``L = 2**(bits - 1)`` levels.

  Scales are ``float32[rows, 1]`` or ``float32[rows, P]``, the dither is ``uint32[3]``
  or None to round to nearest, and the rows ``uint32[rows, B + scales + L]``.
  """
  planes = planes_per_word(bits)
  lines = _lines(levels)
  rows = []
  for tiles in tile_segments(x, planes, bucket_size):
    count = tiles.shape[0]
    own = tiles.rows_of(scale)
    factor = jnp.broadcast_to(to_units(own), (count, planes))
    lanes = rounding_lanes(dither, tiles.shape, planes, first_row=tiles.first_row)
    codes = [
      _round(plane, factor[:, k : k + 1], lanes[k], lines)
      for k, plane in enumerate(tiles.planes)
    ]
    words = pack_planes(codes, bits)
    row_levels = jnp.broadcast_to(levels, (count, levels.size))
    rows.append([words, float_words(own), float_words(row_levels)])
  return stacked(rows, bucket_size + scale.shape[1] + levels.size)


def _round(x: jax.Array, factor: jax.Array, lane: Lane, lines: list[Line]) -> jax.Array:
  """Returns the codes of one plane, which count levels from the lowest negative one."""
  limit = jnp.uint32((2 * len(lines) - 1) << (FRACTION - 1))
  fixed = jnp.minimum(coordinate(jnp.abs(x) * factor, lines), limit)
  return rounded(jnp.where(x < 0, limit - fixed, limit + fixed), lane)


def decode_rows(rows: jax.Array, *, bits: int, bucket_size: int) -> jax.Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, P, B]``."""
  count = 2 ** (bits - 1)
  code = unpack_planes(rows[..., :bucket_size], bits).astype(jnp.int32)
  scale = floats(rows[..., bucket_size:-count])[..., None]
  levels = floats(rows[..., -count:])
  negative = code < count
  number = jnp.where(negative, count - 1 - code, code - count)
  level = levels[..., :1, None]
  for i in range(1, count):
    level = jnp.where(number >= i, levels[..., i : i + 1, None], level)
  return signed(level * scale, jnp.where(negative, jnp.uint32(1 << 31), jnp.uint32(0)))
