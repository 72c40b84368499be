"""Makes the next residual of what was not sent, where the old one lies."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.core.residual_storage import (
  Int8Residual,
  Stored,
  lanes,
  read,
  to_bfloat16,
  to_int8,
)
from gradcomp._src.kernels.materialize import rewritten

# Of an old residual, and of a 1.0 that ``materialize.rewritten`` gives.
_Keep = Callable[[jax.Array, jax.Array], jax.Array]


def remainder(
  unsent: jax.Array,
  mean: jax.Array,
  old: Stored,
  count: jax.Array,
  key: Callable[[], jax.Array],
) -> tuple[Stored, jax.Array]:
  """Returns the new residual: what was not sent, or the old one if that is not finite.

  The old one also stays where the mean is not finite. So a gradient that is not finite,
  and its whole bucket with it, is never kept. And of that bucket no worker counts as
  sent what nobody can use.

  Args:
    unsent: what was not sent, in any shape of as many elements.
    mean: the mean of all workers, float32.
    old: the residual of the last step. The new one is stored in the same way.
    count: the number of the step, ``int32[]``.
    key: makes the key that residuals of fewer bits are rounded with, ``uint32[2]``.

  Returns:
    The residual, and a count for what is to be written next, see
    ``materialize.rewritten``.
  """

  with jax.named_scope("gradcomp_residual"):
    if isinstance(old, Int8Residual):
      wide = unsent.astype(jnp.float32).reshape(old.codes.shape)
      new, count = _of_int8(wide, mean.reshape(wide.shape), old, count)
      blocks = old.scales.shape[-1]
      return to_int8(new, lanes(key(), new.shape), blocks), count
    usable = mean.reshape(unsent.shape)
    if old.dtype == jnp.bfloat16:
      keep = _of_bfloat16(unsent, usable, lanes(key(), unsent.shape))
    else:
      keep = _of_floats(unsent, usable)
    if unsent.shape == old.shape:
      return keep(old, jnp.float32(1.0)), count
    new, count = rewritten(keep, old.reshape(unsent.shape), count)
    return new.reshape(old.shape), count


def _of_floats(unsent: jax.Array, mean: jax.Array) -> _Keep:
  """Returns what :func:`remainder` does to the old residual."""

  def keep(old: jax.Array, one: jax.Array) -> jax.Array:
    finite = jnp.isfinite(unsent * one) & jnp.isfinite(mean * one)
    return jnp.where(finite, unsent.astype(old.dtype), old)

  return keep


def _of_bfloat16(unsent: jax.Array, mean: jax.Array, lane: jax.Array) -> _Keep:
  """Returns what :func:`remainder` does to the old residual in ``bfloat16``.

  The new one is rounded before there is a mean, so that half as much waits for that. It
  waits as integers, for a CPU would write it down as floats of 32 bits.
  """
  rounded = to_bfloat16(unsent.astype(jnp.float32), lane)
  rounded = jnp.where(jnp.isfinite(unsent), rounded, jnp.bfloat16(jnp.inf))
  waits = lax.bitcast_convert_type(rounded, jnp.uint16)
  most = jnp.uint16(0x7F80)  # the exponent of what is not finite

  def keep(old: jax.Array, one: jax.Array) -> jax.Array:
    new = waits * one.astype(jnp.uint16)
    finite = ((new & most) != most) & jnp.isfinite(mean * one)
    bits = jnp.where(finite, new, lax.bitcast_convert_type(old, jnp.uint16))
    return lax.bitcast_convert_type(bits, jnp.bfloat16)

  return keep


def _of_int8(
  unsent: jax.Array, mean: jax.Array, old: Int8Residual, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns what :func:`remainder` does as floats, where a CPU has what was not sent.

  They are written once, for the two that read them: a scale and its codes.
  """

  def keep(unsent: jax.Array, one: jax.Array) -> jax.Array:
    kept = read(old._replace(codes=old.codes * one.astype(jnp.int8)))
    finite = jnp.isfinite(unsent) & jnp.isfinite(mean * one)
    return jnp.where(finite, unsent, kept)

  return rewritten(keep, unsent, count)
