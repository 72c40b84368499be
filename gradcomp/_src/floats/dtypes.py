"""Ranges of floats narrower than float32, and casts to them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def has_smaller_range(dtype: DTypeLike) -> bool:
  """Returns True for floats that overflow, or underflow, where float32 does not.

  Example:
    >>> [has_smaller_range(x) for x in (jnp.float16, jnp.bfloat16, jnp.float64)]
    [True, False, False]
  """
  return bool(jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp)


def limit_of(dtype: DTypeLike) -> float | None:
  """Returns the largest number of a narrow type; None for types with float32's range.

  Example:
    >>> limit_of(jnp.float16), limit_of(jnp.bfloat16)
    (65504.0, None)
  """
  return float(jnp.finfo(dtype).max) if has_smaller_range(dtype) else None


def addend_dtype(dtype: DTypeLike) -> np.dtype:
  """Returns a dtype with the range for 1/N of each number of ``dtype``.

  Example:
    >>> addend_dtype(jnp.float16), addend_dtype(jnp.bfloat16)
    (dtype('float32'), dtype(bfloat16))
  """
  return np.dtype(jnp.float32 if has_smaller_range(dtype) else dtype)


def is_narrow(x: jax.Array) -> bool:
  """Returns True for an array of floats of fewer bits than float32.

  Example:
    >>> is_narrow(jnp.ones(2, jnp.bfloat16)), is_narrow(jnp.ones(2, jnp.int8))
    (True, False)
  """
  dtype = jnp.result_type(x)
  return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def widened(x: jax.Array) -> jax.Array:
  """Returns an array of narrow floats as float32, any other unchanged.

  Example:
    >>> widened(jnp.ones(1, jnp.float16)), widened(jnp.ones(1, jnp.int8))
    (Array([1.], dtype=float32), Array([1], dtype=int8))
  """
  return x.astype(jnp.float32) if is_narrow(x) else x


def narrowed(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
  """Casts an array, and returns the rounding error, too.

  Numbers that are too large become the largest number. Infinity and NaN stay, with the
  error NaN. A dtype with the same bits or more has the error 0.

  Example:
    >>> [x.tolist() for x in narrowed(jnp.array([70000.0, 1.0]), jnp.float16)]
    [[65504.0, 1.0], [4496.0, 0.0]]
  """
  if jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
    return x.astype(dtype), jnp.zeros_like(x)
  narrow = within(x, dtype).astype(dtype)
  return narrow, x - narrow.astype(x.dtype)


def within(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Clips finite numbers to the range of a narrower dtype.

  Example:
    >>> within(jnp.array([70000.0, jnp.inf]), jnp.float16).tolist()
    [65504.0, inf]
  """
  if jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
    return x
  most = float(jnp.finfo(dtype).max)
  return jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x)
