"""TernGrad's rule for a plane: clips, rounds to three values, packs 2 or 1.6 bits."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.kernels.common import fixed_point, planes
from gradcomp._src.kernels.common.fixed_point import Lane
from gradcomp._src.kernels.gpu.tiles import Operand
from gradcomp._src.kernels.quantize import reference

Packing = Literal["2bit", "base3"]

_TRITS = 20  # in a word: 3**20 < 2**32
# floor(2**64 * (2**32 - 3**20) / 3**20), as two words.
_EXCESS = ((2**32 - 3**_TRITS) << 64) // 3**_TRITS
_EXCESS_HIGH, _EXCESS_LOW = _EXCESS >> 32, _EXCESS & (2**32 - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(reference.ScaledForm):
  """The options of TernGrad."""

  bits: int = 2
  packing: Packing = "2bit"

  @property
  def name(self) -> str:  # type: ignore[override]
    """Returns the name of its kernel."""
    return f"ternary_{self.packing}"

  @property
  def planes(self) -> int:
    """The number of codes in a word, and of buckets in a tile."""
    return 16 if self.packing == "2bit" else _TRITS

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(self, x: Array, factor: Array, lane: Lane, limit: Operand = None) -> Array:
    """Returns two bits, or a digit in base 3, for each element of one plane."""
    length = jnp.abs(x) if limit is None else jnp.minimum(jnp.abs(x), limit)
    fixed = (length * factor).astype(jnp.int32).astype(jnp.uint32)
    fixed = jnp.minimum(fixed, jnp.uint32(self.top))  # a NaN stays inside its bits
    magnitude = fixed_point.rounded(fixed, lane, x)
    if self.packing == "2bit":
      return jnp.where(x < 0, 3 * magnitude, magnitude)
    return jnp.where(x < 0, 1 - magnitude, 1 + magnitude)

  def pack(self, codes: Iterable[Array]) -> Array:
    """Packs two bits a code, or twenty digits in base 3: ``uint32[rows, B]``."""
    if self.packing == "2bit":
      return super().pack(codes)
    # With the digits as the number `v` below `3**20`, most significant first, the word
    # is the 32-bit fraction `floor(v * 2**32 / 3**20) + 1`, rounded up. Its digits can
    # then be read without a division, each by itself: a digit is three times the rest
    # after the point.
    value = functools.reduce(lambda value, trit: value * jnp.uint32(3) + trit, codes)
    # 2**32 / 3**20 is 1 + excess: the high word of value * excess, with its carry.
    low = value * jnp.uint32(_EXCESS_HIGH)
    carry = low + _high_word(value, _EXCESS_LOW) < low
    high = _high_word(value, _EXCESS_HIGH) + carry.astype(jnp.uint32)
    return value + high + jnp.uint32(1)


def codes(rows: Array, form: Form) -> Array:
  """Decodes ``uint32[..., rows, words]`` to -1, 0 and 1: ``int32[..., rows, P, B]``."""
  words = rows[..., : form.bucket_size]
  if form.packing == "base3":
    powers = np.array([3**k % 2**32 for k in range(_TRITS)], np.uint32)
    return _high_word(words[..., None, :] * powers[:, None], 3).astype(jnp.int32) - 1
  code = planes.unpack_planes(words, 2).astype(jnp.int32)
  return jnp.where(code == 3, -1, code)


def _high_word(x: Array, factor: int) -> Array:
  """Returns ``floor(x * factor / 2**32)`` of 32-bit numbers, in 32-bit arithmetic."""
  high, low = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
  x_high, x_low = x >> 16, x & jnp.uint32(0xFFFF)
  middle = x_high * low + ((x_low * low) >> 16)
  return x_high * high + (middle >> 16) + ((x_low * high + (middle & 0xFFFF)) >> 16)
