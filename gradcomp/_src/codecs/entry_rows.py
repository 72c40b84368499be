"""The layout of a sparse row: counts by block, positions in the block, and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gradcomp._src.codecs.entry_values import (
  Quantize,
  decode_values,
  encode_values,
  is_negative,
  value_words,
)
from gradcomp._src.kernels.common import sparse


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
