"""A kernel has whole tiles; the reference encodes the last one where it is not."""

from collections.abc import Callable, Sequence

import jax

# Encodes a last, partial tile, whose row has the number given.
Reference = Callable[[jax.Array, int], tuple[jax.Array, jax.Array | None]]


def refusal(size: int, tile: int) -> str:
  """Why there is no kernel for an array of so many elements; empty if there is one."""
  if tile <= size < 2**31:
    return ""
  return (
    f"a kernel's array has at least one tile, {tile} elements here, and less than "
    f"2**31, and this one has {size}"
  )


def complete(
  found: Sequence[jax.Array], x: jax.Array, tiles: int, whole: int, last: Reference
) -> tuple[jax.Array, jax.Array | None]:
  """What a kernel made of whole tiles, with what the reference makes of the rest.

  Args:
    found: the rows and, where it is kept, the residual; the last tile's mean nothing.
    x: ``float32[n]``.
    tiles: how many are whole.
    whole: their elements.
    last: encodes the others.
  """
  result, residual = found[0], found[1] if len(found) > 1 else None
  if whole < x.size:
    words, rest = last(x[whole:], tiles)
    result = jax.lax.dynamic_update_slice(result, words, (tiles, 0))
    if residual is not None and rest is not None:
      residual = jax.lax.dynamic_update_slice(residual, rest, (whole,))
  return result, residual
