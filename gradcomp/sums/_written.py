"""Computes values that a CPU writes down before anything reads them."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

_Arrays = TypeVar("_Arrays")


def written(function: Callable[[jax.Array], _Arrays], rows: jax.Array) -> _Arrays:
  """Returns ``function(rows)``, which a CPU writes down before anything reads it.

  Else XLA fuses what computes an element into what reads it, and computes it anew for
  each of its readers: a word is read by its elements, and an element by its word and by
  what encoding it loses. XLA drops an optimization barrier before it fuses, but not a
  condition of which it does not know that it never holds: no word has more than 32
  bits.

  Args:
    function: returns arrays.
    rows: ``uint32`` of any shape.

  Example:
    >>> written(lambda rows: rows + 1, jnp.zeros((1, 2), jnp.uint32))
    Array([[1, 1]], dtype=uint32)
  """
  if not rows.size:
    return function(rows)

  def condition(rows: jax.Array) -> _Arrays:
    first = rows[(0,) * rows.ndim]

    def nothing(rows: jax.Array) -> _Arrays:
      zero = first ^ first  # of the type of the words, which differ between workers
      like = jax.eval_shape(function, rows)
      blank = lambda x: jnp.broadcast_to(zero.astype(x.dtype), x.shape)
      return jax.tree.map(blank, like)

    return jax.lax.cond(jax.lax.population_count(first) > 32, nothing, function, rows)

  return jax.lax.platform_dependent(rows, cpu=condition, default=function)
