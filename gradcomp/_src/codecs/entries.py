"""Rows of sparse entries: counts, positions and packed values."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gradcomp._src.kernels.common import sparse
from gradcomp._src.kernels.common.scales import sum_by_halves

Quantize = Literal["asq", "mean"]


def value_words(quantize: Quantize | None, dtype: DTypeLike, slots: int) -> int:
  """Returns the number of words that hold the values of ``slots`` entries."""
  if quantize is not None:
    return 1 if quantize == "asq" else 2
  return slots if np.dtype(dtype).itemsize == 4 else sparse.half_words(slots)


def encode_values(
  values: jax.Array, used: jax.Array, quantize: Quantize | None, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
  """Packs a row's values into words, and returns these and the decoded values.

  Values are ``float32[slots]``, 0 in slots that are not used. ``quantize`` is ``"asq"``
  for one mean, ``"mean"`` for one of each sign, or None. Values that are no means are
  cast to ``dtype``; a finite one never becomes infinite.
  """
  if quantize is None and np.dtype(dtype).itemsize == 4:
    return _float_words(values), values
  if quantize is None:
    most = float(jnp.finfo(dtype).max)
    cut = jnp.where(jnp.isfinite(values), jnp.clip(values, -most, most), values)
    narrow = cut.astype(dtype)
    return _float_words(narrow), narrow.astype(jnp.float32)
  if quantize == "asq":
    mean = _mean(values, used)
    return _float_words(mean[None]), jnp.where(used, mean, 0.0)
  negative = is_negative(values)
  means = [
    _mean(jnp.where(own, values, 0.0), own & used) for own in (~negative, negative)
  ]
  sent = jnp.where(negative, means[1], means[0])
  return _float_words(jnp.stack(means)), jnp.where(used, sent, 0.0)


def decode_values(
  words: jax.Array, negative: jax.Array, quantize: Quantize | None, dtype: DTypeLike
) -> jax.Array:
  """Unpacks a row's values: ``float32[slots]``, undefined in unused slots.

  ``negative`` chooses among the means of both signs: ``bool[slots]``.
  """
  slots = negative.size
  if quantize is None and np.dtype(dtype).itemsize == 2:
    narrow = sparse.unpack_halves(words, slots).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(narrow, dtype).astype(jnp.float32)
  floats = jax.lax.bitcast_convert_type(words, jnp.float32)
  if quantize == "asq":
    return jnp.broadcast_to(floats, (slots,))
  return floats if quantize is None else jnp.where(negative, floats[1], floats[0])


def is_negative(values: jax.Array) -> jax.Array:
  """Returns True where the sign bit is set, also of zeros and NaN."""
  return jax.lax.bitcast_convert_type(values, jnp.uint32) >> 31 == 1


def _mean(values: jax.Array, used: jax.Array) -> jax.Array:
  """Returns the mean of the used values, added in one order in every mode."""
  count = jnp.maximum(used.sum(dtype=jnp.int32), 1).astype(jnp.float32)
  # A power of two first, so that no sum overflows. No compiler changes such products,
  # because they are exact.
  scale = 2.0 ** -values.size.bit_length()
  return sum_by_halves(values * np.float32(scale)) / count * np.float32(1 / scale)


def _float_words(values: jax.Array) -> jax.Array:
  if values.dtype == jnp.float32:
    return jax.lax.bitcast_convert_type(values, jnp.uint32)
  narrow = jax.lax.bitcast_convert_type(values, jnp.uint16)
  return sparse.pack_halves(narrow.astype(jnp.uint32))


class EntryRow(NamedTuple):
  """Packs and unpacks the entries of a row of ``size`` elements.

  A row holds the number of entries up to the end of each block, the place of each entry
  in its block, and the values. Unused slots have the position ``size`` and the value 0.
  """

  size: int
  slots: int
  quantize: Quantize | None
  value_dtype: DTypeLike

  @property
  def words(self) -> int:
    """The number of words in a row."""
    values = value_words(self.quantize, self.value_dtype, self.slots)
    return self._blocks + sparse.half_words(self.slots) + values

  def encode(
    self, positions: jax.Array, values: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Packs positions, block by block, and values: ``int32`` and ``float32[slots]``.

    Returns:
      ``uint32[words]``, and the values that these decode to, ``float32[slots]``.
    """
    used = positions < self.size
    code = jnp.where(used, positions % self._block, 0).astype(jnp.uint32)
    if self.quantize == "mean":
      code = code | (is_negative(values).astype(jnp.uint32) * self._block)
    tail, sent = encode_values(values, used, self.quantize, self.value_dtype)
    ends = sparse.block_ends(positions, self.size, self._block)
    return jnp.concatenate([ends, sparse.pack_halves(code), tail]), sent

  def decode(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unpacks ``uint32[words]`` to ``int32`` positions and ``float32`` values."""
    ends, rest = row[: self._blocks], row[self._blocks :]
    half = sparse.half_words(self.slots)
    code = sparse.unpack_halves(rest[:half], self.slots)
    slot = jnp.arange(self.slots, dtype=jnp.int32)
    used = slot < ends[-1].astype(jnp.int32)
    within = (code % self._block).astype(jnp.int32)
    positions = sparse.slot_blocks(ends, self.slots) * self._block + within
    negative = code >= self._block
    values = decode_values(rest[half:], negative, self.quantize, self.value_dtype)
    return jnp.where(used, positions, self.size), jnp.where(used, values, 0.0)

  def used(self, rows: jax.Array) -> jax.Array:
    """Counts the entries of each row, ``uint32[..., words]``: ``int32[...]``."""
    return rows[..., self._blocks - 1].astype(jnp.int32)

  @property
  def _block(self) -> int:
    """The elements of a block; with ``"mean"``, one of 16 bits is the sign."""
    return sparse.BLOCK // 2 if self.quantize == "mean" else sparse.BLOCK

  @property
  def _blocks(self) -> int:
    return -(-self.size // self._block)
