"""The row format of block-wise selection: places, codes and values of entries.

See docs/inside/wire-format.md for the rule. Reference and kernel share all of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.kernels.common.fixed_point import (
  Divide,
  divide,
  sign_bit,
  signed,
)
from gradcomp._src.kernels.common.planes import floats, planes_per_word
from gradcomp._src.kernels.quantize import qsgd

WORDS = 32  # of codes in a row, for each entry of a block
SMALL = 0.375  # the smaller magnitude of a 2-bit value, in scales
_LIMITS = np.float32(SMALL / 2), np.float32((1 + SMALL) / 2)
_LEVELS = qsgd.Form(bits=8, bucket_size=WORDS)  # of an 8-bit value


@dataclasses.dataclass(frozen=True)
class Form:
  """The row format of block-wise selection, from the codec's hyperparameters."""

  block_size: int  # elements a block, B, a power of two
  count: int  # entries a block
  value_bits: int  # 2, 8 or 32
  keep: bool = False  # whether the encoder returns the residual

  @property
  def place_bits(self) -> int:
    """The bits of a place in a block."""
    return self.block_size.bit_length() - 1

  @property
  def scaled(self) -> bool:
    """Whether rows have a scale, and a code holds a value; else 32 bits hold it."""
    return self.value_bits < 32

  @property
  def code_bits(self) -> int:
    """The bits of the place and the value of an element."""
    return self.place_bits + (self.value_bits if self.scaled else 0)

  @property
  def planes(self) -> int:
    """The number of codes that share a word."""
    return planes_per_word(self.code_bits)

  @property
  def blocks(self) -> int:
    """The number of blocks in a tile."""
    return self.planes * WORDS

  @property
  def bucket_size(self) -> int:
    """The number of elements of a plane of a tile."""
    return WORDS * self.block_size

  @property
  def tile_size(self) -> int:
    """The number of elements in a tile."""
    return self.blocks * self.block_size

  @property
  def entry_words(self) -> int:
    """The number of words in a row for one entry of each of its blocks."""
    return WORDS + (0 if self.scaled else self.blocks)

  @property
  def row_words(self) -> int:
    """The number of words in a row: its entries, and its scale."""
    return self.count * self.entry_words + self.scaled


def keys(x: jax.Array, form: Form) -> jax.Array:
  """Returns a sort key for each element of ``float32[m, B]``; the largest are sent.

  From the highest bit on it holds ``31 - log2(B)`` bits of the magnitude, the number of
  elements behind it in its block, and its sign.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  behind = (form.block_size - 1) - jax.lax.broadcasted_iota(jnp.uint32, x.shape, 1)
  magnitude = (bits << 1) & np.uint32(2**32 - 2 * form.block_size)
  return magnitude | (behind << 1) | (bits >> 31)


def behind_of(key: jax.Array, form: Form) -> jax.Array:
  """Returns the number of elements that lie behind a key's element in its block."""
  return (key >> 1) & np.uint32(form.block_size - 1)


def cut_value(key: jax.Array, form: Form) -> jax.Array:
  """Returns the value of a key's element, with its lowest bits cleared."""
  magnitude = (key >> 1) & np.uint32(2**31 - form.block_size)
  return floats(magnitude | (key << 31))


def code(
  behind: jax.Array,
  value: jax.Array,
  scale: jax.Array,
  form: Form,
  divide: Divide = divide,
) -> jax.Array:
  """Returns the codes of entries under their scales; 0 sends nothing.

  The code 0 would stand for the smaller magnitude, positive, at the end of a block.
  There the nearest of zero and the larger magnitude is sent.
  """
  if form.value_bits == 8:
    level = _LEVELS.code(value, _LEVELS.factor(scale, divide), None)
    some = level & _LEVELS.intervals > 0
    return jnp.where((scale > 0) & some, (behind << 8) | level, 0)
  magnitude, negative = jnp.abs(value), sign_bit(value) >> 31
  nothing = (behind | negative) == 0
  low, high = (scale * limit for limit in _LIMITS)
  large = magnitude >= jnp.where(nothing, scale * np.float32(0.5), high)
  found = (behind << 2) | (negative << 1) | large.astype(jnp.uint32)
  return jnp.where((scale > 0) & (magnitude >= low), found, jnp.uint32(0))


def values(codes: jax.Array, scale: jax.Array, form: Form) -> jax.Array:
  """Returns the values of codes under their scales; NaN under a scale of NaN."""
  if form.value_bits == 8:
    return _LEVELS.value(codes & np.uint32(0xFF), scale)
  small = scale * np.float32(SMALL)
  magnitude = jnp.where(codes & 1 == 1, scale, small)
  value = signed(magnitude, (codes >> 1) << 31)
  return jnp.where(codes == 0, scale * 0, value)


def behind_of_code(codes: jax.Array, form: Form) -> jax.Array:
  """Returns the number of elements that lie behind a code's element in its block."""
  place = codes >> form.value_bits if form.scaled else codes
  return place & np.uint32(form.block_size - 1)
