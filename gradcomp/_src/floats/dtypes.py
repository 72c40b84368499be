"""Ranges of floats: casts to narrow ones, and norms that no square overflows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from gradcomp._src.kernels.common.fixed_point import held

# Norms times these have squares in the range of float32: large, usual and small ones.
_FACTORS = (2.0**-80, 1.0, 2.0**80)


def has_smaller_range(dtype: DTypeLike) -> bool:
  """Returns True for floats that overflow, or underflow, where float32 does not."""
  return bool(jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp)


def limit_of(dtype: DTypeLike) -> float | None:
  """Returns a narrow type's largest number; None for types with float32's range."""
  return float(jnp.finfo(dtype).max) if has_smaller_range(dtype) else None


def addend_dtype(dtype: DTypeLike) -> np.dtype:
  """Returns a dtype with the range for 1/N of each number of ``dtype``."""
  return np.dtype(jnp.float32 if has_smaller_range(dtype) else dtype)


def is_narrow(x: Array) -> bool:
  """Returns True for an array of floats of fewer bits than float32."""
  dtype = jnp.result_type(x)
  return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def widened(x: Array) -> Array:
  """Returns an array of narrow floats as float32, any other unchanged."""
  return x.astype(jnp.float32) if is_narrow(x) else x


def narrowed(x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
  """Casts an array, and returns the rounding error, too."""
  # Numbers that are too large become the largest number. Others stay, with the error
  # NaN.
  if jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
    return x.astype(dtype), jnp.zeros_like(x)
  narrow = fitted(x, dtype)
  return narrow, x - narrow.astype(x.dtype)


def fitted(x: Array, dtype: DTypeLike) -> Array:
  """Casts an array; finite numbers that are too large become the largest number."""
  return within(x, dtype).astype(dtype)


def within(x: Array, dtype: DTypeLike) -> Array:
  """Clips finite numbers to the range of a narrower dtype."""
  if jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
    return x
  most = float(jnp.finfo(dtype).max)
  return jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x)


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
