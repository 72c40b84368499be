"""Lists set bits by a Pallas kernel: each program lists a block of words.

Sums over the blocks in front of a block say where its list starts, so that the order
does not depend on which program runs first. Within a block, each round lists the lowest
bit that each word has left. Few bits are set: one or two rounds do.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp._src.kernels.compaction.reference import LANES, WORD
from gradcomp._src.kernels.gpu import triton_tiles

_TILES = 16  # in a block: 16 bytes of words for each thread of four warps


def positions(
  words: jax.Array, capacity: int, size: int, *, interpret: bool = False
) -> jax.Array:
  """Lists as :func:`reference.positions` does, for one tile or more."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  tiles = words.size // LANES
  rows = min(_TILES, 1 << (tiles.bit_length() - 1))
  block = rows * LANES
  starts, total = _starts(words, block)

  def kernel(words_ref: Any, starts_ref: Any, out_ref: Any) -> None:
    # The last block is the last words. The block before lists some of them as well.
    first = jnp.minimum(pl.program_id(0) * rows, tiles - rows) * LANES
    place = first + lax.iota(jnp.int32, block)
    words = words_ref[place]
    counts = population_count(words)
    slot = starts_ref[pl.program_id(0)] + jnp.cumsum(counts) - counts
    lane = place & (LANES - 1)
    element = (place - lane) * WORD + lane

    def put(_: jax.Array, left: tuple[jax.Array, jax.Array]) -> tuple:
      words, slot = left
      lowest = words & (~words + 1)
      bit = _exponent(lowest)
      triton.store(
        out_ref.at[slot], element + bit * LANES, mask=(words != 0) & (slot < capacity)
      )
      return words ^ lowest, slot + 1

    lax.fori_loop(jnp.int32(0), counts.max(), put, (words, slot))

  found = pl.pallas_call(
    kernel,
    out_shape=triton_tiles.typed(words, (capacity,), jnp.int32),
    grid=(starts.size,),
    compiler_params=triton.CompilerParams(num_warps=4),
    interpret=interpret,
    name="list_positions",
  )(words, starts)
  # No program writes the slots behind the last set bit.
  return jnp.where(lax.iota(jnp.int32, capacity) < total, found, size)


def population_count(words: jax.Array) -> jax.Array:
  """Counts the set bits of each word: ``int32``.

  Example:
    >>> population_count(jnp.uint32(0b10110)).item()
    3
  """
  # XLA's Triton compiler knows no instruction for it.
  pairs = words - ((words >> 1) & np.uint32(0x55555555))
  fours = (pairs & np.uint32(0x33333333)) + ((pairs >> 2) & np.uint32(0x33333333))
  bytes_ = (fours + (fours >> 4)) & np.uint32(0x0F0F0F0F)
  return ((bytes_ * np.uint32(0x01010101)) >> 24).astype(jnp.int32)


def _exponent(power: jax.Array) -> jax.Array:
  """Returns the exponent of a power of two, ``int32``, from its float."""
  # No instruction counts trailing zeros, either.
  bits = lax.bitcast_convert_type(power.astype(jnp.float32), jnp.int32)
  return (bits >> 23) - 127


def _starts(words: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
  """Counts the set bits in front of each block, ``int32[blocks]``, and in all words."""
  whole = words.size // block * block
  counts = lax.population_count(words).astype(jnp.int32)
  sums = counts[:whole].reshape(-1, block).sum(1, dtype=jnp.int32)
  ends = jnp.cumsum(sums, dtype=jnp.int32)
  if whole == words.size:
    return ends - sums, ends[-1]
  total = ends[-1] + counts[whole:].sum(dtype=jnp.int32)
  last = total - counts[-block:].sum(dtype=jnp.int32)
  return jnp.concatenate([ends - sums, last[None]]), total
