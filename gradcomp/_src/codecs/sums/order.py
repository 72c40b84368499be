"""Sums in one order, so that every worker, mode and device gets the same bits."""

from collections.abc import Callable
from typing import Any

import jax

# More payloads than this are added in a loop, which bounds the compile time.
UNROLLED = 16


def in_order(
  step: Callable[[Any, Any], Any], count: int, first: Any, unrolled: int = UNROLLED
) -> Any:
  """Returns ``step(count - 1, ... step(2, step(1, first)))``; a loop if it is long."""
  if count > unrolled:
    return jax.lax.fori_loop(1, count, step, first)
  for k in range(1, count):
    first = step(k, first)
  return first


def sum_in_order(
  decode: Callable[[jax.Array], jax.Array], rows: jax.Array
) -> jax.Array:
  """Returns ``decode(rows[0]) + decode(rows[1]) + ...``."""
  # A short sum is written out, so that XLA fuses decoding and adding into one pass.
  return in_order(
    lambda k, total: total + decode(rows[k]), rows.shape[0], decode(rows[0])
  )


def cutter(tiles: jax.Array) -> Callable[[int, int], jax.Array]:
  """Returns a decoder that slices tiles, for tiles that are not encoded."""
  return lambda start, stop: tiles[start:stop]
