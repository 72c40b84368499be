"""Completes the rows of a kernel with those that the reference makes of a last tile."""

from collections.abc import Callable, Sequence

import jax

# Encodes the elements of a last, partial tile, given its row number.
Reference = Callable[[jax.Array, int], tuple[jax.Array, jax.Array | None]]


def refusal(size: int, tile: int) -> str:
  """Returns the reason why no kernel can encode an array; an empty string if one can.

  Args:
    size: elements of the array.
    tile: elements of a tile.
  """
  if tile <= size < 2**31:
    return ""
  return (
    f"a kernel's array has at least one tile, {tile} elements here, and less than "
    f"2**31, and this one has {size}"
  )


def complete(
  found: Sequence[jax.Array], x: jax.Array, tiles: int, whole: int, last: Reference
) -> tuple[jax.Array, jax.Array | None]:
  """Returns the rows and the residual of a kernel, with the last tile of the reference.

  Args:
    found: the rows of the kernel and, if it is kept, the residual. What they hold for a
      partial tile means nothing.
    x: the array, which kernels read flat and the residual is shaped like.
    tiles: the number of whole tiles.
    whole: the number of elements in these.
    last: encodes the other elements.
  """
  result, residual = found[0], found[1] if len(found) > 1 else None
  if whole < x.size:
    words, rest = last(x.reshape(-1)[whole:], tiles)
    result = jax.lax.dynamic_update_slice(result, words, (tiles, 0))
    if residual is not None and rest is not None:
      residual = jax.lax.dynamic_update_slice(residual, rest, (whole,))
  return result, None if residual is None else residual.reshape(x.shape)
