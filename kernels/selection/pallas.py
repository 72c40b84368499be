"""Marks the elements of a row by a Pallas kernel, in one pass."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradcomp._src.kernels.gpu import tiles
from gradcomp._src.kernels.selection import reference
from gradcomp._src.kernels.selection.reference import LANES, TILE, WORD, RowView

_TILES = 16  # in a block, so that each thread loads 16 bytes of a plane
_STEP = 8  # planes in a round of the loop, loaded at once


def mark(
  x: RowView, threshold: Array, sign: Array | None, *, interpret: Any = False
) -> Array:
  """Marks as :func:`reference.mark` does, for one tile or more."""
  _, whole = tiles.blocks(x.size // TILE, _TILES)
  words = x.read_within(
    lambda matrix, number: _mark_tiles(
      matrix, jnp.int32(number), threshold, sign, interpret=interpret
    )
  )
  if whole < len(words):
    part = x.read(lambda x: x[whole * TILE :])
    rest = reference.mark(RowView([part[None]], jnp.int32(0)), threshold, sign)
    words = lax.dynamic_update_slice(words, rest.reshape(-1, LANES), (whole, 0))
  return words.reshape(-1)


# It is jitted so that it is traced once for all matrices of a shape.
@functools.partial(jax.jit, static_argnames="interpret")
def _mark_tiles(
  matrix: Array, number: Array, threshold: Array, sign: Array | None, *, interpret: Any
) -> Array:
  """Returns the words of a row, ``uint32[tiles, 32]``, with room for the rest."""
  several, size = matrix.shape
  rows, whole = tiles.blocks(size // TILE, _TILES)
  view = whole, WORD, LANES
  scalars = [y.reshape(1) for y in (number, threshold, sign) if y is not None]
  if interpret:
    matrix = matrix[number, : whole * TILE].reshape(view)

  def kernel(program: Array, x_ref: Any, *refs: Any) -> None:
    number, limit, *own = (ref[0] for ref in refs[:-1])
    if not interpret:
      # A known number allows loads of 16 bytes for every size.
      number = number if several > 1 else 0
      x_ref = x_ref.at[number, : whole * TILE].reshape(view)
    block = tiles.Block(([x_ref], refs[-1], None), program, rows, vector, interpret)

    def add_planes(step: Array, words: Array) -> Array:
      for plane in [step * _STEP + k for k in range(_STEP)]:
        order = reference.magnitudes(block.plane(plane), *own)
        bit = jnp.uint32(1) << plane.astype(jnp.uint32)
        words = words | jnp.where(order >= limit, bit, jnp.uint32(0))
      return words

    none = block.placed(jnp.zeros(block.shape, jnp.uint32))
    block.put(lax.fori_loop(jnp.int32(0), jnp.int32(WORD // _STEP), add_planes, none))

  vector = math.gcd(4, size if several > 1 else 4)
  out = [tiles.typed(matrix, (-(-size // TILE), LANES), jnp.uint32)]
  inputs = [matrix, *scalars]
  (words,) = tiles.run(kernel, whole // rows, inputs, out, "mark", interpret)
  return words
