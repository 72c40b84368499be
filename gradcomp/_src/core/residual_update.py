"""The next residual and momentum of a leaf, computed in the memory of the old ones."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.core import residual_storage as storage
from gradcomp._src.core.feedback import Feedback
from gradcomp._src.core.residual_storage import Int8Residual, Stored
from gradcomp._src.exchange.step import Own, OwnEntries, Reduced
from gradcomp._src.kernels.materialize import updated_in_place

Kept = tuple[Stored, jax.Array | None]  # the residual and the momentum of a leaf


@functools.partial(jax.jit, static_argnums=0)  # leaves of a shape: traced once
def remainder(
  feedback: Feedback,
  old: Kept,
  gradient: jax.Array,
  found: Reduced,
  count: jax.Array,
  key: Any,
) -> Kept:
  """Returns the new residual and momentum; old ones where the step is not finite."""
  # Where the unsent part or the mean is not finite, no worker keeps the gradient, or
  # counts its bucket as sent. `count` is the step's, see materialize.updated_in_place.
  # `key`, uint32[2], rounds to fewer bits.
  residual: Any
  keep: Any = _usable
  (residual, momentum), stored, lane = old, None, None
  mean, unsent, own, chosen = found.mean, found.unsent, found.own, found.chosen
  dtype, kind = unsent.dtype, storage.kind(residual)
  unsent = feedback.waits(unsent)
  # With `own` a CPU does not store the unsent part until the mean is there. Beside
  # entries, numbers rounded to 16 bits take less than the random bits.
  half = kind == "bfloat16" and isinstance(own, Own) and not feedback.moves
  own = own if kind == "float32" or half else None
  # Entries suit every shape, and XLA copies views of two rows.
  flat = isinstance(own, OwnEntries) or chosen is not None
  shape = (gradient.shape if flat else unsent.shape) or (1,)
  with jax.named_scope("gradcomp_residual"):
    if isinstance(residual, Int8Residual):
      wide = unsent.astype(jnp.float32).reshape(residual.codes.shape)
      new, count = _of_int8(wide, mean.reshape(wide.shape), residual, count)
      blocks, residual = residual.scales.shape[-1], None
      stored = storage.to_int8(new, storage.lanes(key, new.shape), blocks)
    elif kind == "bfloat16":
      lane, keep = storage.lanes(key, shape), _of_bfloat16

    def split(unsent: jax.Array, lane: Any) -> tuple[jax.Array, jax.Array | None]:
      return _rounded(unsent, lane), None if chosen is None else unsent

    def kept(old: Any, gradient: Any, unsent: Any, mean: Any, chosen: Any) -> Any:
      residual, momentum = old
      if residual is not None:
        residual = keep(residual, unsent[0], mean)
      if momentum is not None:
        given = gradient.reshape(mean.shape), mean, unsent[1], chosen
        momentum = _moved(feedback, momentum, *given)
      return residual, momentum

    def anew(old: Any, gradient: Any, own: Any, lane: Any, *rest: Any) -> Any:
      sent = feedback.sent(gradient.reshape(old[0].shape), old[1])
      unsent = feedback.waits(own.unsent(old[0].astype(dtype) + sent.astype(dtype)))
      return kept(old, gradient, split(unsent, lane), *rest)

    views = jax.tree.map(lambda x: x.reshape(shape), (residual, momentum))
    rest = mean.reshape(shape), chosen
    read = gradient, split(unsent.reshape(shape), lane), *rest
    once = lambda old: kept(old, *read)
    if own is not None:
      read_again = gradient, own, lane, *rest
      found, _ = updated_in_place(anew, views, count, read_again, once)
    elif all(x.shape == shape for x in jax.tree.leaves((residual, momentum))):
      found = once(views)
    else:
      found, _ = updated_in_place(kept, views, count, read)
    like = residual, momentum
    new = jax.tree.map(lambda x, old: x.reshape(old.shape), found, like)
    return new[0] if stored is None else stored, new[1]


def _moved(
  feedback: Feedback,
  old: jax.Array,
  gradient: jax.Array,
  mean: jax.Array,
  unsent: jax.Array | None,
  chosen: jax.Array | None,
) -> jax.Array:
  """Returns the new momentum, zero in chosen elements; old ones where not finite."""
  # The barrier has u' computed again, from the same numbers. Else it would take the
  # memory of a gradient from the encoding to the end of the exchange.
  added, again = lax.optimization_barrier((gradient, old))
  # A codec that sends all elements makes the mean NaN wherever one is not finite.
  finite = jnp.isfinite(mean)
  if chosen is None or unsent is None:
    return jnp.where(finite, feedback.moved(added, again), old)
  finite = finite & jnp.isfinite(unsent)
  kept = jnp.where(finite, feedback.moved(added, again), old)
  if chosen.dtype == bool:
    return jnp.where(chosen.reshape(old.shape) & finite, 0.0, kept)
  # Zeros are written one by one into the old momentum's memory, without a mask. A flat
  # view of it would be a copy.
  mean, unsent = (
    x.reshape(-1).at[chosen].get(mode="clip", wrap_negative_indices=False)
    for x in (mean, unsent)
  )
  usable = jnp.isfinite(mean) & jnp.isfinite(unsent)
  sent = kept.at[_index(jnp.where(usable, chosen, old.size), old.shape)]
  return sent.set(0.0, mode="drop", wrap_negative_indices=False)


def _index(place: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
  """Returns indices of flat positions; the array's size gives one out of bounds."""
  index = []
  for size in reversed(shape[1:]):
    index.append(lax.rem(place, jnp.int32(size)))  # soonest compiled: none is negative
    place = lax.div(place, jnp.int32(size))
  return (place, *reversed(index))


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
