"""TernGrad's rule for a plane: clips, rounds to three values, packs in 2 or 1.6 bits.

See docs/inside/wire-format.md for the rule.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.kernels.common.fixed_point import (
  FRACTION,
  Divide,
  Lane,
  divide,
  rounded,
  top_multiplier,
)
from gradcomp._src.kernels.common.planes import unpack_planes
from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.quantize import pallas, reference
from gradcomp._src.kernels.quantize.form import ScaledForm

Packing = Literal["2bit", "base3"]

_TOP = 1 << FRACTION  # the scale, in fixed point

_TRITS = 20  # in a word: 3**20 < 2**32
# floor(2**64 * (2**32 - 3**20) / 3**20), as two words.
_EXCESS = ((2**32 - 3**_TRITS) << 64) // 3**_TRITS
_EXCESS_HIGH, _EXCESS_LOW = _EXCESS >> 32, _EXCESS & (2**32 - 1)


encode_rows = dispatch.encoder(reference, pallas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(ScaledForm):
  """The options of TernGrad."""

  bits: int = 2
  packing: Packing = "2bit"

  name: ClassVar[str] = "ternary"

  @property
  def planes(self) -> int:
    """The number of codes in a word, and of buckets in a tile.

    Example:
      >>> [Form(bucket_size=32, packing=x).planes for x in ("2bit", "base3")]
      [16, 20]
    """
    return 16 if self.packing == "2bit" else _TRITS

  def factor(self, scale: jax.Array, divide: Divide = divide) -> jax.Array:
    """Returns :func:`top_multiplier`."""
    return top_multiplier(_TOP, scale, divide)

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(
    self, x: jax.Array, factor: jax.Array, lane: Lane, limit: jax.Array | None = None
  ) -> jax.Array:
    """Returns two bits, or a digit in base 3, for each element of one plane."""
    length = jnp.abs(x) if limit is None else jnp.minimum(jnp.abs(x), limit)
    fixed = (length * factor).astype(jnp.int32).astype(jnp.uint32)
    fixed = jnp.minimum(fixed, jnp.uint32(_TOP))  # which keeps a NaN inside its bits
    magnitude = rounded(fixed, lane, x)
    if self.packing == "2bit":
      return jnp.where(x < 0, 3 * magnitude, magnitude)
    return jnp.where(x < 0, 1 - magnitude, 1 + magnitude)

  def pack(self, codes: Sequence[jax.Array]) -> jax.Array:
    """Packs two bits a code, or digits in base 3: ``uint32[rows, B]``."""
    return pack_trits(codes) if self.packing == "base3" else super().pack(codes)


def codes(rows: jax.Array, form: Form) -> jax.Array:
  """Decodes ``uint32[..., rows, words]`` to -1, 0 and 1: ``int32[..., rows, P, B]``."""
  words = rows[..., : form.bucket_size]
  if form.packing == "base3":
    return unpack_trits(words).astype(jnp.int32) - 1
  code = unpack_planes(words, 2).astype(jnp.int32)
  return jnp.where(code == 3, -1, code)


def pack_trits(trits: Sequence[jax.Array]) -> jax.Array:
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
