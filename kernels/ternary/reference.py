"""TernGrad's inner loops in jnp: clips, rounds to three values, packs in 2 or 1.6 bits.

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
  rounding_lanes,
  top_multiplier,
)
from gradcomp._src.kernels.common.planes import (
  Segment,
  float_words,
  pack_planes,
  stack_rows,
  unpack_planes,
)

Packing = Literal["2bit", "base3"]

TOP = 1 << FRACTION  # the scale, in fixed point

_TRITS = 20  # in a word: 3**20 < 2**32
# floor(2**64 * (2**32 - 3**20) / 3**20), as two words.
_EXCESS = ((2**32 - 3**_TRITS) << 64) // 3**_TRITS
_EXCESS_HIGH, _EXCESS_LOW = _EXCESS >> 32, _EXCESS & (2**32 - 1)


def planes(packing: Packing) -> int:
  """Returns the number of codes in a word, and of buckets in a tile.

  Example:
    >>> planes("2bit"), planes("base3")
    (16, 20)
  """
  return 16 if packing == "2bit" else _TRITS


def encode_rows(
  x: jax.Array,
  scale: jax.Array,
  limit: jax.Array,
  dither: jax.Array | None,
  *,
  packing: Packing,
  bucket_size: int,
  inline: bool,
  first_row: int = 0,
) -> jax.Array:
  """Clips and rounds a flat array to ``-scale``, 0 or ``scale``.

  Args:
    x: ``float32[n]``.
    scale: ``float32[rows, 1]`` or ``float32[rows, P]``.
    limit: ``float32[]``, the magnitude that values are clipped to; infinity clips none.
    dither: ``uint32[3]`` for stochastic rounding, None for nearest.
    packing: how codes become words.
    bucket_size: elements a bucket, ``B``.
    inline: whether the scales follow the words of a row.
    first_row: the number of the first row, which the random numbers depend on.

  Returns:
    ``uint32[rows, B + scales]``, or ``uint32[rows, B]`` if the scales are not inline.
  """
  count = planes(packing)

  def encode(segment: Segment) -> list[jax.Array]:
    row_scale = segment.rows_of(scale)
    multiplier = top_multiplier(TOP, row_scale)
    multiplier = jnp.broadcast_to(multiplier, (segment.shape[0], count))
    row = first_row + segment.first_row
    lanes = rounding_lanes(dither, segment.shape, count, first_row=row)
    digits = [
      code(plane, limit, multiplier[:, k : k + 1], lanes[k], packing)
      for k, plane in enumerate(segment.planes)
    ]
    words = pack(digits, packing)
    return [words, float_words(row_scale)] if inline else [words]

  row_words = bucket_size + inline * scale.shape[1]
  return stack_rows(x, count, bucket_size, row_words, encode)


@functools.partial(jax.jit, static_argnums=4, inline=True)
def code(
  x: jax.Array, limit: jax.Array, factor: jax.Array, lane: Lane, packing: Packing
) -> jax.Array:
  """Returns two bits, or a digit in base 3, for each element of one plane.

  The clamp also keeps the code of a NaN inside its own bits.
  """
  fixed = (jnp.minimum(jnp.abs(x), limit) * factor).astype(jnp.int32)
  fixed = jnp.minimum(fixed.astype(jnp.uint32), jnp.uint32(TOP))
  magnitude = rounded(fixed, lane, x)
  if packing == "2bit":
    return jnp.where(x < 0, 3 * magnitude, magnitude)
  return jnp.where(x < 0, 1 - magnitude, 1 + magnitude)


def pack(digits: list[jax.Array], packing: Packing) -> jax.Array:
  """Packs one array of codes a plane into words: ``uint32[rows, B]``."""
  return pack_planes(digits, 2) if packing == "2bit" else pack_trits(digits)


def codes(rows: jax.Array, *, packing: Packing, bucket_size: int) -> jax.Array:
  """Decodes ``uint32[..., rows, words]`` to -1, 0 and 1: ``int32[..., rows, P, B]``."""
  words = rows[..., :bucket_size]
  if packing == "base3":
    return unpack_trits(words).astype(jnp.int32) - 1
  code = unpack_planes(words, 2).astype(jnp.int32)
  return jnp.where(code == 3, -1, code)


def pack_trits(trits: list[jax.Array]) -> jax.Array:
  """Packs twenty arrays of digits in base 3 into one 32-bit fraction, rounded up.

  With the digits as the number ``v`` below ``3**20``, most significant first, the word
  is ``floor(v * 2**32 / 3**20) + 1``. Its digits can then be read without a division,
  each by itself: a digit is three times the rest behind the point.

  Example:
    >>> word = pack_trits([jnp.uint32(k % 3) for k in range(20)])
    >>> unpack_trits(word[None])[:7, 0].tolist()
    [0, 1, 2, 0, 1, 2, 0]
  """
  value = trits[0]
  for trit in trits[1:]:
    value = value * jnp.uint32(3) + trit
  # 2**32 / 3**20 is 1 + excess: the high word of value * excess, with its carry.
  low = value * jnp.uint32(_EXCESS_HIGH)
  carry = low + _high_word(value, _EXCESS_LOW) < low
  high = _high_word(value, _EXCESS_HIGH) + carry.astype(jnp.uint32)
  return value + high + jnp.uint32(1)


def unpack_trits(words: jax.Array) -> jax.Array:
  """Unpacks the words of :func:`pack_trits`: ``uint32[..., B]`` to ``[..., 20, B]``."""
  powers = np.array([3**k % 2**32 for k in range(_TRITS)], np.uint32)
  return _high_word(words[..., None, :] * powers[:, None], 3)


def _high_word(x: jax.Array, factor: int) -> jax.Array:
  """Returns ``floor(x * factor / 2**32)`` of 32-bit numbers, in 32-bit arithmetic."""
  high, low = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
  x_high, x_low = x >> 16, x & jnp.uint32(0xFFFF)
  middle = x_high * low + ((x_low * low) >> 16)
  return x_high * high + (middle >> 16) + ((x_low * high + (middle & 0xFFFF)) >> 16)
