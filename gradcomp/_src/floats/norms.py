"""l2 norms by squares that neither overflow nor vanish."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.kernels.common.fixed_point import held

# Norms times these have squares in the range of float32: large, usual and small ones.
_FACTORS = (2.0**-80, 1.0, 2.0**80)


def norm(tree: Any) -> Array:
  """Returns the l2 norm of all leaves together, ``float32[]``."""
  # Held, or compilers square the elements before they divide.
  sizes = [jnp.abs(x).astype(jnp.float32) for x in jax.tree.leaves(tree)]
  largest = (jnp.max(x, initial=0) for x in sizes)
  top = functools.reduce(jnp.maximum, largest, jnp.float32(0))
  unit = jnp.where((top > 0) & jnp.isfinite(top), top, 1)
  total = sum((jnp.sum(jnp.square(held(x / unit))) for x in sizes), jnp.float32(0))
  return unit * jnp.sqrt(total)


def squares(length: Array) -> Array:
  """Returns the squares of a norm in three units, for a mean over the workers."""
  return jnp.square(held(length * jnp.array(_FACTORS, jnp.float32)))


def root(means: Array) -> Array:
  """Returns the root of the mean of :func:`squares`, ``[..., 3]``."""
  large, usual, small = jnp.moveaxis(means, -1, 0)
  above, below = usual > 2.0**80, usual < 2.0**-80
  mean = jnp.where(above, large, jnp.where(below, small, usual))
  unit = jnp.where(above, _FACTORS[2], jnp.where(below, _FACTORS[0], _FACTORS[1]))
  return jnp.sqrt(mean) * unit
