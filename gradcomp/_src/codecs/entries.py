"""Rows of sparse entries: counts, positions and packed values."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.kernels.common import sparse
from gradcomp._src.kernels.common.scales import sum_by_halves

Quantize = Literal["asq", "mean"]


def _is_negative(values: Array) -> Array:
  """Returns True where the sign bit is set, also of zeros and NaN."""
  return jax.lax.bitcast_convert_type(values, jnp.uint32) >> 31 == 1


def _mean(values: Array, used: Array) -> Array:
  """Returns the mean of the used values, added in one order in every mode."""
  count = jnp.maximum(used.sum(dtype=jnp.int32), 1).astype(jnp.float32)
  # A power of two first, so that no sum overflows. No compiler changes such products,
  # because they are exact.
  scale = 2.0 ** -values.size.bit_length()
  return sum_by_halves(values * np.float32(scale)) / count * np.float32(1 / scale)


def _float_words(values: Array) -> Array:
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
    halves = sparse.half_words(self.slots)
    values = self.slots if np.dtype(self.value_dtype).itemsize == 4 else halves
    means = {None: values, "asq": 1, "mean": 2}
    return self._blocks + halves + means[self.quantize]

  def encode(self, positions: Array, values: Array) -> tuple[Array, Array]:
    """Packs positions and values of slots; returns words and decoded values."""
    used = positions < self.size
    code = jnp.where(used, positions % self._block, 0).astype(jnp.uint32)
    if self.quantize == "mean":
      code = code | (_is_negative(values).astype(jnp.uint32) * self._block)
    tail, sent = self._encode_values(values, used)
    ends = sparse.block_ends(positions, self.size, self._block)
    return jnp.concatenate([ends, sparse.pack_halves(code), tail]), sent

  def _encode_values(self, values: Array, used: Array) -> tuple[Array, Array]:
    """Packs values; returns words and decoded values."""
    if self.quantize is None:
      narrow = fitted(values, self.value_dtype)
      return _float_words(narrow), narrow.astype(jnp.float32)
    if self.quantize == "asq":
      mean = _mean(values, used)
      return _float_words(mean[None]), jnp.where(used, mean, 0.0)
    negative = _is_negative(values)
    both = (~negative, negative)
    means = [_mean(jnp.where(own, values, 0.0), own & used) for own in both]
    sent = jnp.where(negative, means[1], means[0])
    return _float_words(jnp.stack(means)), jnp.where(used, sent, 0.0)

  def decode(self, row: Array) -> tuple[Array, Array]:
    """Unpacks ``uint32[words]`` to ``int32`` positions and ``float32`` values."""
    ends, rest = row[: self._blocks], row[self._blocks :]
    half = sparse.half_words(self.slots)
    code = sparse.unpack_halves(rest[:half], self.slots)
    used = jnp.arange(self.slots, dtype=jnp.int32) < ends[-1].astype(jnp.int32)
    within = (code % self._block).astype(jnp.int32)
    positions = sparse.slot_blocks(ends, self.slots) * self._block + within
    negative = code >= self._block
    values = self._decode_values(rest[half:], negative)
    return jnp.where(used, positions, self.size), jnp.where(used, values, 0.0)

  def _decode_values(self, words: Array, negative: Array) -> Array:
    """Unpacks values, undefined in unused slots; ``negative`` chooses among means."""
    if self.quantize is None and np.dtype(self.value_dtype).itemsize == 2:
      narrow = sparse.unpack_halves(words, self.slots).astype(jnp.uint16)
      floats = jax.lax.bitcast_convert_type(narrow, self.value_dtype)
      return floats.astype(jnp.float32)
    floats = jax.lax.bitcast_convert_type(words, jnp.float32)
    if self.quantize == "mean":
      return jnp.where(negative, floats[1], floats[0])
    return jnp.broadcast_to(floats, (self.slots,))

  def used(self, rows: Array) -> Array:
    """Counts the entries of each row, ``uint32[..., words]``: ``int32[...]``."""
    return rows[..., self._blocks - 1].astype(jnp.int32)

  @property
  def _block(self) -> int:
    """The elements of a block; with ``"mean"``, one of 16 bits is the sign."""
    return sparse.BLOCK // 2 if self.quantize == "mean" else sparse.BLOCK

  @property
  def _blocks(self) -> int:
    return -(-self.size // self._block)
