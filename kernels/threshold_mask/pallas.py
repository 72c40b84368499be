"""Marks elements by a Pallas kernel, and counts the marks of each tile, in one pass."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common.row_view import RowView
from gradcomp._src.kernels.compaction.reference import LANES, TILE, WORD
from gradcomp._src.kernels.gpu import tiles
from gradcomp._src.kernels.threshold_mask import reference

_TILES = 16  # in a block, so that each thread loads 16 bytes of a plane
_STEP = 8  # planes in a round of the loop, whose loads are all under way at once


def mark(
  x: RowView, threshold: Array, sign: Array | None, *, interpret: Any = False
) -> tuple[Array, Array]:
  """Marks as :func:`reference.mark` does, for one tile or more."""
  _, whole = tiles.blocks(x.size // TILE, _TILES)
  words, counts = x.read_within(
    lambda matrix, number: _mark_tiles(
      matrix, jnp.int32(number), threshold, sign, interpret=interpret
    )
  )
  count = counts.sum(dtype=jnp.int32)
  if whole < len(words):
    part = x.read(lambda x: x[whole * TILE :])
    rest, found = reference.mark(RowView([part[None]], jnp.int32(0)), threshold, sign)
    words = lax.dynamic_update_slice(words, rest.reshape(-1, LANES), (whole, 0))
    count = count + found
  return words.reshape(-1), count


# It is jitted so that it is traced once for all matrices of a shape.
@functools.partial(jax.jit, static_argnames="interpret")
def _mark_tiles(
  matrix: Array, number: Array, threshold: Array, sign: Array | None, *, interpret: Any
) -> tuple[Array, Array]:
  """Returns the words of a row, with room for the rest, and counts of tiles."""
  several, size = matrix.shape
  rows, whole = tiles.blocks(size // TILE, _TILES)
  view = whole, WORD, LANES
  scalars = [y.reshape(1) for y in (number, threshold, sign) if y is not None]
  if interpret:
    matrix = matrix[number, : whole * TILE].reshape(view)

  def kernel(program: Array, x_ref: Any, *refs: Any) -> None:
    words_ref, counts_ref = refs[len(scalars) :]
    number, limit, *own = (ref[0] for ref in refs[: len(scalars)])
    if not interpret:
      # A known number allows loads of 16 bytes for every size.
      number = number if several > 1 else 0
      x_ref = x_ref.at[number, : whole * TILE].reshape(view)
    block = tiles.Block(([x_ref], words_ref, None), program, rows, vector, interpret)

    def add_planes(step: Array, words: Array) -> Array:
      for plane in [step * _STEP + k for k in range(_STEP)]:
        order = reference.magnitudes(block.plane(plane), *own)
        bit = jnp.uint32(1) << plane.astype(jnp.uint32)
        words = words | jnp.where(order >= limit, bit, jnp.uint32(0))
      return words

    none = block.placed(jnp.zeros(block.shape, jnp.uint32))
    words = lax.fori_loop(jnp.int32(0), jnp.int32(WORD // _STEP), add_planes, none)
    block.put(words)
    block.write(counts_ref, _population_count(words).sum(axis=1, dtype=jnp.int32))

  vector = math.gcd(4, size if several > 1 else 4)
  shapes = [((-(-size // TILE), LANES), jnp.uint32), ((whole,), jnp.int32)]
  out = [tiles.typed(matrix, shape, dtype) for shape, dtype in shapes]
  inputs = [matrix, *scalars]
  words, counts = tiles.run(kernel, whole // rows, inputs, out, "mark", interpret)
  return words, counts


def _population_count(words: Array) -> Array:
  """Counts the set bits of each word: ``int32``."""
  # Pallas lowers no instruction for it.
  pairs = words - ((words >> 1) & np.uint32(0x55555555))
  fours = (pairs & np.uint32(0x33333333)) + ((pairs >> 2) & np.uint32(0x33333333))
  bytes_ = (fours + (fours >> 4)) & np.uint32(0x0F0F0F0F)
  return ((bytes_ * np.uint32(0x01010101)) >> 24).astype(jnp.int32)
