"""Joins the rows of a kernel with the reference's row of a last, partial tile."""

from collections.abc import Callable, Sequence

import jax

# Encodes the elements of a last, partial tile, given its row number.
Reference = Callable[[jax.Array, int], tuple[jax.Array, jax.Array | None]]


def refusal(size: int, tile: int) -> str:
  """Returns the reason why no kernel can encode ``size`` elements; "" if one can."""
  if tile <= size < 2**31:
    return ""
  return (
    f"a kernel's array has at least one tile, {tile} elements here, and less than "
    f"2**31, and this one has {size}"
  )


def complete(
  found: Sequence[jax.Array], x: jax.Array, tiles: int, whole: int, last: Reference
) -> tuple[jax.Array, jax.Array | None]:
  """Returns the rows and the residual of a kernel, with the reference's last tile.

  ``found`` holds the rows and, if it is kept, the residual. Both are undefined for a
  partial tile, which ``last`` encodes: the elements behind the first ``whole``.
  """
  result, residual = found[0], found[1] if len(found) > 1 else None
  if whole < x.size:
    words, rest = last(x.reshape(-1)[whole:], tiles)
    result = jax.lax.dynamic_update_slice(result, words, (tiles, 0))
    if residual is not None and rest is not None:
      residual = jax.lax.dynamic_update_slice(residual, rest, (whole,))
  return result, None if residual is None else residual.reshape(x.shape)
