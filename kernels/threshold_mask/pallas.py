"""Marks elements by a Pallas kernel, and counts the marks of each tile, in one pass.

A row of a matrix is read where it lies. The reference marks the last, partial tile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.kernels.common.magnitudes import magnitudes
from gradcomp._src.kernels.common.row_view import RowView
from gradcomp._src.kernels.compaction import LANES, TILE, WORD
from gradcomp._src.kernels.compaction.pallas import population_count
from gradcomp._src.kernels.gpu import triton_tiles
from gradcomp._src.kernels.threshold_mask import reference

_TILES = 16  # in a block, so that each thread of four warps loads 16 bytes of a plane
_STEP = 8  # planes in a round of the loop, whose loads are all under way at once


def mark(
  x: RowView,
  threshold: jax.Array,
  sign: jax.Array | None,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Marks as :func:`reference.mark` does, for one tile or more."""
  tiles = x.size // TILE
  words, counts = x.read_within(
    lambda matrix, number: _mark_tiles(
      matrix, jnp.int32(number), threshold, sign, interpret=interpret
    )
  )
  count = counts.sum(dtype=jnp.int32)
  if tiles < len(words):
    part = x.read(lambda x: x[tiles * TILE :])
    rest, found = reference.mark(RowView([part[None]], jnp.int32(0)), threshold, sign)
    words = lax.dynamic_update_slice(words, rest.reshape(1, LANES), (tiles, 0))
    count = count + found
  return words.reshape(-1), count


# It is jitted so that it is traced once for all matrices of a shape.
@functools.partial(jax.jit, static_argnames="interpret")
def _mark_tiles(
  matrix: jax.Array,
  number: jax.Array,
  threshold: jax.Array,
  sign: jax.Array | None,
  *,
  interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns the words of a row, with room for a partial tile, and counts of tiles."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  size = matrix.shape[1]
  tiles = size // TILE
  rows = min(_TILES, 1 << (tiles.bit_length() - 1))
  shape = rows, LANES
  scalars = [y.reshape(1) for y in (number, threshold, sign) if y is not None]

  def kernel(x_ref: Any, *refs: Any) -> None:
    words_ref, counts_ref = refs[len(scalars) :]
    number, limit, *own = (ref[0] for ref in refs[: len(scalars)])
    if matrix.shape[0] == 1:  # a known number allows loads of 16 bytes for every size
      number = jnp.int32(0)
    # The last block is the last tiles. The block before marks some of them as well.
    first = jnp.minimum(pl.program_id(0) * rows, tiles - rows)
    tile = first + lax.broadcasted_iota(jnp.int32, shape, 0)
    start = tile * TILE + lax.broadcasted_iota(jnp.int32, shape, 1)

    def add_planes(step: jax.Array, words: jax.Array) -> jax.Array:
      for plane in [step * _STEP + k for k in range(_STEP)]:
        order = magnitudes(x_ref[number, start + plane * LANES], *own)
        bit = jnp.uint32(1) << plane.astype(jnp.uint32)
        words = words | jnp.where(order >= limit, bit, jnp.uint32(0))
      return words

    none = jnp.zeros(shape, jnp.uint32)
    steps = jnp.int32(WORD // _STEP)
    words = lax.fori_loop(jnp.int32(0), steps, add_planes, none)
    words_ref[pl.ds(first, rows), :] = words
    # These are counts of tiles, not of the block: a tile in two blocks counts once.
    counts = population_count(words).sum(axis=1, dtype=jnp.int32)
    counts_ref[pl.ds(first, rows)] = counts

  out = [((-(-size // TILE), LANES), jnp.uint32), ((tiles,), jnp.int32)]
  return pl.pallas_call(
    kernel,
    out_shape=[triton_tiles.typed(matrix, shape, dtype) for shape, dtype in out],
    grid=(-(-tiles // rows),),
    compiler_params=triton.CompilerParams(num_warps=4),
    interpret=interpret,
    name="mark",
  )(matrix, *scalars)
