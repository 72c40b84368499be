"""The next residual, computed from the unsent part in the memory of the old one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.core.residual_storage import (
  Int8Residual,
  Stored,
  lanes,
  read_residual,
  to_bfloat16,
  to_int8,
)
from gradcomp._src.kernels.materialize import updated_in_place

# Of an old residual, and of a 1.0 that ``materialize.updated_in_place`` gives.
_Keep = Callable[[jax.Array, jax.Array], jax.Array]


def remainder(
  unsent: jax.Array,
  mean: jax.Array,
  old: Stored,
  count: jax.Array,
  key: Callable[[], jax.Array],
) -> tuple[Stored, jax.Array]:
  """Returns the new residual: the unsent part, or the old residual if not finite.

  The old one also stays where the mean is not finite. So a gradient that is not finite,
  and its whole bucket with it, is never kept, and no worker counts that bucket as sent.

  Args:
    unsent: the unsent part, in any shape with the leaf's elements.
    mean: the mean of all workers, float32.
    old: the residual of the last step. The new one has its storage format.
    count: the number of the step, ``int32[]``. It is returned for the next array to be
      written, see ``materialize.updated_in_place``.
    key: makes the key for the rounding to fewer bits, ``uint32[2]``.
  """
  draws = isinstance(old, Int8Residual) or old.dtype == jnp.bfloat16
  return _remainder(unsent, mean, old, count, key() if draws else None)


@jax.jit  # leaves of a shape: traced once
def _remainder(
  unsent: jax.Array,
  mean: jax.Array,
  old: Stored,
  count: jax.Array,
  key: Any,  # uint32[2], or None where nothing is rounded
) -> tuple[Stored, jax.Array]:
  with jax.named_scope("gradcomp_residual"):
    if isinstance(old, Int8Residual):
      wide = unsent.astype(jnp.float32).reshape(old.codes.shape)
      new, count = _of_int8(wide, mean.reshape(wide.shape), old, count)
      blocks = old.scales.shape[-1]
      return to_int8(new, lanes(key, new.shape), blocks), count
    usable = mean.reshape(unsent.shape)
    if old.dtype == jnp.bfloat16:
      keep = _of_bfloat16(unsent, usable, lanes(key, unsent.shape))
    else:
      keep = _of_floats(unsent, usable)
    if unsent.shape == old.shape:
      return keep(old, jnp.float32(1.0)), count
    new, count = updated_in_place(keep, old.reshape(unsent.shape), count)
    return new.reshape(old.shape), count


def _of_floats(unsent: jax.Array, mean: jax.Array) -> _Keep:
  """Computes the new residual in float32 in the memory of the old one."""

  def keep(old: jax.Array, one: jax.Array) -> jax.Array:
    finite = jnp.isfinite(unsent * one) & jnp.isfinite(mean * one)
    return jnp.where(finite, unsent.astype(old.dtype), old)

  return keep


def _of_bfloat16(unsent: jax.Array, mean: jax.Array, lane: jax.Array) -> _Keep:
  """Computes the new residual in ``bfloat16`` in the memory of the old one."""
  # Rounded before the mean arrives, so that half the bytes are held until then. They
  # are held as integers: a CPU would materialize them as floats of 32 bits.
  rounded = to_bfloat16(unsent.astype(jnp.float32), lane)
  rounded = jnp.where(jnp.isfinite(unsent), rounded, jnp.bfloat16(jnp.inf))
  waits = lax.bitcast_convert_type(rounded, jnp.uint16)
  most = jnp.uint16(0x7F80)  # the exponent of infinity and NaN

  def keep(old: jax.Array, one: jax.Array) -> jax.Array:
    new = waits * one.astype(jnp.uint16)
    finite = ((new & most) != most) & jnp.isfinite(mean * one)
    bits = jnp.where(finite, new, lax.bitcast_convert_type(old, jnp.uint16))
    return lax.bitcast_convert_type(bits, jnp.bfloat16)

  return keep


def _of_int8(
  unsent: jax.Array, mean: jax.Array, old: Int8Residual, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes the new residual in float32, before it is rounded to int8."""

  def keep(unsent: jax.Array, one: jax.Array) -> jax.Array:
    kept = read_residual(old._replace(codes=old.codes * one.astype(jnp.int8)))
    finite = jnp.isfinite(unsent) & jnp.isfinite(mean * one)
    return jnp.where(finite, unsent, kept)

  # In the unsent part's memory on CPU: materialized once for both readers, the scale
  # and the codes.
  return updated_in_place(keep, unsent, count)
