"""The next residual, computed from the unsent part in the memory of the old one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp._src.core import residual_storage as storage
from gradcomp._src.core.residual_storage import Int8Residual, Stored
from gradcomp._src.exchange.step import Own
from gradcomp._src.kernels.materialize import updated_in_place


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("gradient", "own"),
  meta_fields=("dtype", "waits"),
)
@dataclasses.dataclass(frozen=True)
class Again:
  """Computes the next residual of a large leaf anew, from all that it depends on."""

  gradient: jax.Array
  own: Own
  dtype: np.dtype  # of the gradient plus the residual
  waits: Callable[[jax.Array], jax.Array]  # of the feedback

  def __call__(self, old: jax.Array) -> jax.Array:
    """Returns it, given the old residual in the shape of the view."""
    wide = self.gradient.reshape(old.shape).astype(self.dtype)
    return self.waits(self.own.unsent(old.astype(wide.dtype) + wide))


def _remainder(
  unsent: jax.Array,
  mean: jax.Array,
  old: Stored,
  count: jax.Array,
  key: Any,
  again: Again | None,
) -> tuple[Stored, jax.Array]:
  """Returns the new residual: the unsent part, or the old residual if not finite.

  The old one also stays where the mean is not finite. So a gradient that is not finite,
  and its whole bucket with it, is never kept, and no worker counts that bucket as sent.
  The step's ``count`` comes back for the next array, see
  ``materialize.updated_in_place``, and ``key``, ``uint32[2]``, is for the rounding to
  fewer bits, or None. With ``again`` a CPU does not store the unsent part until the
  mean is there.
  """
  with jax.named_scope("gradcomp_residual"):
    if isinstance(old, Int8Residual):
      wide = unsent.astype(jnp.float32).reshape(old.codes.shape)
      new, count = _of_int8(wide, mean.reshape(wide.shape), old, count)
      blocks = old.scales.shape[-1]
      return storage.to_int8(new, storage.lanes(key, new.shape), blocks), count
    lane = storage.lanes(key, unsent.shape) if old.dtype == jnp.bfloat16 else None
    keep = _usable if lane is None else _of_bfloat16
    usable = mean.reshape(unsent.shape)
    once = lambda old: keep(old, _rounded(unsent, lane), usable)
    if unsent.shape == old.shape:
      return once(old), count
    flat = old.reshape(unsent.shape), count
    if again is None:
      new, count = updated_in_place(keep, *flat, (_rounded(unsent, lane), usable))
    else:
      anew = lambda old, x, lane, mean: keep(old, _rounded(x(old), lane), mean)
      new, count = updated_in_place(anew, *flat, (again, lane, usable), once)
    return new.reshape(old.shape), count


remainder = jax.jit(_remainder)  # leaves of a shape: traced once


def _usable(old: jax.Array, unsent: jax.Array, mean: jax.Array) -> jax.Array:
  """Returns the unsent part where it and the mean are finite, else the old residual."""
  finite = jnp.isfinite(unsent) & jnp.isfinite(mean)
  return jnp.where(finite, unsent.astype(old.dtype), old)


def _rounded(unsent: jax.Array, lane: jax.Array | None) -> jax.Array:
  """Returns the unsent part; in ``bfloat16``, with a lane, as integers ``uint16``."""
  if lane is None:
    return unsent
  # Rounded before the mean arrives, so that half the bytes are held until then. They
  # are held as integers: a CPU would materialize them as floats of 32 bits.
  rounded = storage.to_bfloat16(unsent.astype(jnp.float32), lane)
  rounded = jnp.where(jnp.isfinite(unsent), rounded, jnp.bfloat16(jnp.inf))
  return lax.bitcast_convert_type(rounded, jnp.uint16)


def _of_bfloat16(old: jax.Array, new: jax.Array, mean: jax.Array) -> jax.Array:
  """Returns the new residual in ``bfloat16``, where it and the mean are finite."""
  most = jnp.uint16(0x7F80)  # the exponent of infinity and NaN
  finite = ((new & most) != most) & jnp.isfinite(mean)
  bits = jnp.where(finite, new, lax.bitcast_convert_type(old, jnp.uint16))
  return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _of_int8(
  unsent: jax.Array, mean: jax.Array, old: Int8Residual, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes the new residual in float32, before it is rounded to int8."""
  # In the unsent part's memory on CPU: materialized once for both readers, the scale
  # and the codes.
  keep = lambda new, old, mean: _usable(storage.read_residual(old), new, mean)
  return updated_in_place(keep, unsent, count, (old, mean))
