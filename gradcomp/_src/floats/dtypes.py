"""Ranges of floats narrower than float32, and casts to them."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike


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
