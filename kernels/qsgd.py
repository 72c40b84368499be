"""QSGD's inner loops: scale, stochastic rounding and packing in one pass over planes.

Rounding is in fixed point: one float product, then integers. Whatever compiles this,
on whatever device, agrees on every code. See docs/wire-format.md for the rule.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp.kernels.planes import (
  pack_planes,
  planes_per_word,
  tile_segments,
  unpack_planes,
)
from gradcomp.kernels.threefry import random_lanes

Levels = Literal["sign_magnitude", "uniform"]
Norm = Literal["max", "l2"]

# Below the smallest normal number a norm counts as zero (CPUs flush subnormals), and
# a scale is at least 2**-96, so that its reciprocal times 2**31 is finite.
_SMALLEST_NORMAL = np.float32(2.0**-126)
_SMALLEST_SCALE = np.float32(2.0**-96)
_FRACTION = 16  # bits behind the point of a fixed-point level


def intervals(bits: int, levels: Levels) -> int:
  """``s``: equal intervals on [0, norm], or on [-norm, norm] for ``uniform``.

  Example:
    >>> intervals(4, "sign_magnitude"), intervals(4, "uniform")
    (7, 15)
  """
  return 2 ** (bits - 1) - 1 if levels == "sign_magnitude" else 2**bits - 1


def norms(x: jax.Array, norm: Norm) -> jax.Array:
  """The norm over the last axis, NaN where anything in it is not finite.

  The maximum is taken by one variadic reduction of maximum and minimum, because
  XLA:CPU's library call for a plain maximum drops NaN (seen in 0.10.2 and 0.12.0).
  The l2 norm is scaled by the maximum, so that squares neither overflow nor vanish,
  and is cut to the largest finite number, which is still at least the maximum.

  Args:
    x: ``float32[..., n]``.
    norm: ``"max"`` or ``"l2"``.

  Returns:
    ``float32[...]``.

  Example:
    >>> norms(jnp.array([[3., -4.], [0., jnp.inf]]), "l2")
    Array([ 5., nan], dtype=float32)
  """
  high, low = jax.lax.reduce(
    (x, x),
    (jnp.float32(-jnp.inf), jnp.float32(jnp.inf)),
    lambda a, b: (jnp.maximum(a[0], b[0]), jnp.minimum(a[1], b[1])),
    (x.ndim - 1,),
  )
  largest = jnp.maximum(high, -low)
  largest = jnp.where(jnp.isfinite(largest), largest, jnp.nan)
  if norm == "max":
    return largest
  unit = x / jnp.where(largest == 0, 1.0, largest)[..., None]
  length = largest * jnp.sqrt(_sum_of_squares(unit))
  return jnp.minimum(length, jnp.finfo(jnp.float32).max)


def _sum_of_squares(x: jax.Array) -> jax.Array:
  """Over the last axis, in one order everywhere: halves are added until one is left.

  A reduction would add in an order that depends on the shape around it, so that a
  worker emulated by vmap would not get the bits of a real one. The maximum with zero
  keeps compilers from contracting a product and a sum in some places and not others.
  """
  total = jnp.maximum(x * x, 0.0)
  while (size := total.shape[-1]) > 1:
    if size % 2:
      total = jnp.pad(total, [(0, 0)] * (total.ndim - 1) + [(0, 1)])
    half = total.shape[-1] // 2
    total = total[..., :half] + total[..., half:]
  return total[..., 0]


def scales(norm: jax.Array) -> jax.Array:
  """What travels: the norm, 0 if it is subnormal, else at least ``2**-96``."""
  return jnp.where(norm < _SMALLEST_NORMAL, 0.0, jnp.maximum(norm, _SMALLEST_SCALE))


def encode_rows(
  x: jax.Array,
  *,
  bits: int,
  bucket_size: int,
  norm: Norm,
  levels: Levels,
  key: jax.Array | None,
  scale: jax.Array | None = None,
  inline: bool = True,
) -> jax.Array:
  """Encodes a flat array as rows of words and scales.

  Args:
    x: ``float32[n]``.
    bits: width of a code.
    bucket_size: elements a bucket, ``B``.
    norm: what a bucket's scale is.
    levels: where the levels are.
    key: ``uint32[2]`` for stochastic rounding, None for nearest.
    scale: ``float32[rows, 1]`` or ``float32[rows, P]``, instead of the norms.
    inline: whether the scales follow the words of a row.

  Returns:
    ``uint32[rows, B + P]``; ``uint32[rows, B + 1]`` with one scale a row; and
    ``uint32[rows, B]`` if they are not inline.
  """
  planes = planes_per_word(bits)
  parts = []
  for first_row, buckets, plane_list in tile_segments(x, planes, bucket_size):
    rows = plane_list[0].shape[0]
    if scale is None:
      row_scale = scales(norms(buckets, norm))[: rows * planes].reshape(rows, planes)
    else:
      row_scale = scale[first_row : first_row + rows]
    lanes: Sequence[jax.Array | int] = [1 << (_FRACTION - 1)] * planes
    if key is not None:
      lanes = random_lanes(key, (rows, bucket_size), planes, first_row=first_row)
    multiplier = jnp.broadcast_to(_multiplier(row_scale, bits, levels), (rows, planes))
    codes = [
      _round(plane, multiplier[:, k : k + 1], lanes[k], bits, levels)
      for k, plane in enumerate(plane_list)
    ]
    words = pack_planes(codes, bits)
    if inline:
      scale_words = jax.lax.bitcast_convert_type(row_scale, jnp.uint32)
      words = jnp.concatenate([words, scale_words], axis=1)
    parts.append(words)
  if not parts:
    scale_count = planes if scale is None else scale.shape[1]
    return jnp.zeros((0, bucket_size + inline * scale_count), jnp.uint32)
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _limit(bits: int, levels: Levels) -> int:
  """The largest distance from zero in fixed point: ``s``, or ``s / 2`` a side."""
  fraction = _FRACTION if levels == "sign_magnitude" else _FRACTION - 1
  return intervals(bits, levels) << fraction


def _multiplier(scale: jax.Array, bits: int, levels: Levels) -> jax.Array:
  """From values to fixed point. One step above the limit, so that the largest element
  reaches the top level in spite of two roundings; the clamp removes the excess."""
  numerator = np.nextafter(np.float32(_limit(bits, levels)), np.float32(np.inf))
  return jnp.where(scale == 0, 0.0, numerator / scale)


def _round(
  x: jax.Array,
  multiplier: jax.Array,
  lane: jax.Array | int,
  bits: int,
  levels: Levels,
) -> jax.Array:
  """Codes of one plane. The clamp also keeps a NaN's code inside its own bits."""
  limit = jnp.uint32(_limit(bits, levels))
  fixed = (jnp.abs(x) * multiplier).astype(jnp.int32).astype(jnp.uint32)
  fixed = jnp.minimum(fixed, limit)
  if levels == "sign_magnitude":
    sign = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 31
    return ((fixed + jnp.uint32(lane)) >> _FRACTION) | (sign << (bits - 1))
  fixed = jnp.where(x < 0, limit - fixed, limit + fixed)
  return (fixed + jnp.uint32(lane)) >> _FRACTION


def decode_rows(
  rows: jax.Array, *, bits: int, bucket_size: int, levels: Levels
) -> jax.Array:
  """The values of rows: ``uint32[..., rows, words]`` to ``float32[..., rows, P, B]``.

  The top level is the scale itself, not ``s`` rounded steps. The sign is set last, by
  a bit operation, so that no compiler contracts the product with a following addition:
  sums of decoded values have the same bits everywhere.
  """
  s = intervals(bits, levels)
  codes = unpack_planes(rows[..., :bucket_size], bits)
  scale = jax.lax.bitcast_convert_type(rows[..., bucket_size:], jnp.float32)[..., None]
  if levels == "sign_magnitude":
    magnitude = (codes & jnp.uint32(s)).astype(jnp.int32)
    sign = (codes >> (bits - 1)) << 31
  else:
    signed = 2 * codes.astype(jnp.int32) - s
    magnitude = jnp.abs(signed)
    sign = jax.lax.bitcast_convert_type(signed, jnp.uint32) & jnp.uint32(1 << 31)
  step = scale * np.float32(1 / s)
  value = jnp.where(magnitude == s, scale, magnitude.astype(jnp.float32) * step)
  return _signed(value, sign)


def signed_codes(
  rows: jax.Array, *, bits: int, bucket_size: int, levels: Levels
) -> jax.Array:
  """The codes of rows as integers from ``-s`` to ``s``, which add up.

  Args:
    rows: ``uint32[..., rows, words]``.
    bits: width of a code.
    bucket_size: elements a bucket, ``B``.
    levels: where the levels are.

  Returns:
    ``int32[..., rows, P, B]``.
  """
  s = intervals(bits, levels)
  codes = unpack_planes(rows[..., :bucket_size], bits).astype(jnp.int32)
  if levels == "uniform":
    return 2 * codes - s
  magnitude = codes & s
  return jnp.where(codes > s, -magnitude, magnitude)


def from_signed_codes(codes: jax.Array, scale: jax.Array, s: int) -> jax.Array:
  """The values of sums of codes; whole multiples of the scale are exact.

  Args:
    codes: ``int32[..., rows, P, B]``, of one worker or added over several.
    scale: ``float32[rows, P]`` or ``float32[rows, 1]``.
    s: the code whose value is the scale.

  Returns:
    ``float32[..., rows, P, B]``.
  """
  magnitude = jnp.abs(codes)
  scale = scale[..., None]
  inverse = np.float32(1 / s)
  # How many whole scales, without an integer division: off by less than a half as long
  # as they are fewer than 2**21, which is to say workers.
  as_float = magnitude.astype(jnp.float32)
  whole = jnp.round(as_float * inverse)
  is_whole = whole.astype(jnp.int32) * s == magnitude
  value = jnp.where(is_whole, whole * scale, as_float * (scale * inverse))
  sign = jax.lax.bitcast_convert_type(codes, jnp.uint32) & jnp.uint32(1 << 31)
  return _signed(value, sign)


def _signed(value: jax.Array, sign: jax.Array) -> jax.Array:
  value_bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
  return jax.lax.bitcast_convert_type(value_bits | sign, jnp.float32)
