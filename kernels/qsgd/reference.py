"""QSGD's inner loops in jnp: rounds to equal levels, and packs, over planes.

See docs/inside/wire-format.md for the rule.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.kernels.common.fixed_point import (
  FRACTION,
  Lane,
  rounded,
  rounded_with_sign,
  rounding_lanes,
  sign_bit,
  signed,
  top_multiplier,
)
from gradcomp._src.kernels.common.planes import (
  Segment,
  float_words,
  floats,
  less,
  pack_planes,
  planes_per_word,
  stack_rows,
  unpack_planes,
)
from gradcomp._src.kernels.common.scales import bucket_norms, scales

Levels = Literal["sign_magnitude", "uniform"]


def intervals(bits: int, levels: Levels) -> int:
  """Returns ``s``: equal intervals on [0, norm], or on [-norm, norm] for ``uniform``.

  Example:
    >>> intervals(4, "sign_magnitude"), intervals(4, "uniform")
    (7, 15)
  """
  return 2 ** (bits - 1) - 1 if levels == "sign_magnitude" else 2**bits - 1


def encode_rows(
  x: jax.Array,
  scale: jax.Array | None,
  dither: jax.Array | None,
  *,
  bits: int,
  bucket_size: int,
  levels: Levels,
  inline: bool,
  keep: bool = False,
  first_row: int = 0,
) -> tuple[jax.Array, jax.Array | None]:
  """Encodes an array as rows of words and scales.

  Args:
    x: ``float32`` of any shape.
    scale: ``float32[rows, 1]`` or ``float32[rows, P]``; None for the largest magnitude
      of each bucket.
    dither: ``uint32[3]`` for stochastic rounding, None for nearest.
    bits: the width of a code.
    bucket_size: elements a bucket, ``B``.
    levels: where the levels are.
    inline: whether the scales follow the words of a row.
    keep: whether to return the residual, which needs the scales to be inline.
    first_row: the number of the first row, which the random numbers depend on.

  Returns:
    The rows, ``uint32[rows, B + scales]``, or ``uint32[rows, B]`` if the scales are not
    inline; and the residual, in the shape of ``x``, or None.
  """
  planes = planes_per_word(bits)
  flat = x.reshape(-1)
  if scale is None:
    scale = scales(bucket_norms(flat, planes, bucket_size, "max"))

  def encode(segment: Segment) -> list[jax.Array]:
    row_scale = segment.rows_of(scale)
    multiplier = top_multiplier(limit(bits, levels), row_scale)
    multiplier = jnp.broadcast_to(multiplier, (segment.shape[0], planes))
    row = first_row + segment.first_row
    lanes = rounding_lanes(dither, segment.shape, planes, first_row=row)
    codes = [
      code(plane, multiplier[:, k : k + 1], lanes[k], bits, levels)
      for k, plane in enumerate(segment.planes)
    ]
    words = pack_planes(codes, bits)
    return [words, float_words(row_scale)] if inline else [words]

  row_words = bucket_size + inline * scale.shape[1]
  rows = stack_rows(flat, planes, bucket_size, row_words, encode)
  if not keep:
    return rows, None
  sent = decode_rows(rows, bits=bits, bucket_size=bucket_size, levels=levels)
  return rows, less(x, sent)


def limit(bits: int, levels: Levels) -> int:
  """Returns the largest distance from zero in fixed point.

  It is ``s`` for ``sign_magnitude``, and ``s / 2`` for ``uniform``, which has intervals
  on both sides of zero.
  """
  fraction = FRACTION if levels == "sign_magnitude" else FRACTION - 1
  return intervals(bits, levels) << fraction


@functools.partial(jax.jit, static_argnums=(3, 4), inline=True)
def code(
  x: jax.Array, multiplier: jax.Array, lane: Lane, bits: int, levels: Levels
) -> jax.Array:
  """Returns the codes of one plane.

  The clamp also keeps a NaN's code inside its own bits.
  """
  top = jnp.uint32(limit(bits, levels))
  fixed = (jnp.abs(x) * multiplier).astype(jnp.int32).astype(jnp.uint32)
  fixed = jnp.minimum(fixed, top)
  if levels == "sign_magnitude":
    return rounded_with_sign(fixed, lane, x, bits)
  return rounded(jnp.where(x < 0, top - fixed, top + fixed), lane)


def decode_rows(
  rows: jax.Array, *, bits: int, bucket_size: int, levels: Levels
) -> jax.Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, P, B]``."""
  codes = unpack_planes(rows[..., :bucket_size], bits)
  return value(codes, floats(rows[..., bucket_size:])[..., None], bits, levels)


@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def value(codes: jax.Array, scale: jax.Array, bits: int, levels: Levels) -> jax.Array:
  """Returns the values of codes: ``float32`` in the shape of ``codes``.

  The value of the top level is the scale itself, not s rounded steps.
  """
  s = intervals(bits, levels)
  if levels == "sign_magnitude":
    magnitude = (codes & jnp.uint32(s)).astype(jnp.int32)
    sign = (codes >> (bits - 1)) << 31
  else:
    code = 2 * codes.astype(jnp.int32) - s
    magnitude = jnp.abs(code)
    sign = sign_bit(code)
  step = scale * np.float32(1 / s)
  length = jnp.where(magnitude == s, scale, magnitude.astype(jnp.float32) * step)
  return signed(length, sign)


def signed_codes(
  rows: jax.Array, *, bits: int, bucket_size: int, levels: Levels
) -> jax.Array:
  """Unpacks the codes of rows to integers from ``-s`` to ``s``, which add up.

  ``uint32[..., rows, words]`` become ``int32[..., rows, P, B]``.
  """
  s = intervals(bits, levels)
  codes = unpack_planes(rows[..., :bucket_size], bits).astype(jnp.int32)
  if levels == "uniform":
    return 2 * codes - s
  magnitude = codes & s
  return jnp.where(codes > s, -magnitude, magnitude)


def from_signed_codes(codes: jax.Array, scale: jax.Array, s: int) -> jax.Array:
  """Returns the values of sums of codes; whole multiples of the scale are exact.

  Sums are ``int32[..., rows, P, B]``, scales ``float32[rows, P]`` or ``[rows, 1]``, and
  ``s`` is the code of the scale.
  """
  magnitude = jnp.abs(codes)
  scale = scale[..., None]
  inverse = np.float32(1 / s)
  # The number of whole scales, without an integer division. It is off by less than a
  # half as long as there are fewer than 2**21 of them, that is workers.
  as_float = magnitude.astype(jnp.float32)
  whole = jnp.round(as_float * inverse)
  is_whole = whole.astype(jnp.int32) * s == magnitude
  value = jnp.where(is_whole, whole * scale, as_float * (scale * inverse))
  return signed(value, sign_bit(codes))
