"""The next residual and momentum of a leaf, computed in the memory of the old ones."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp._src.core import residual_storage as storage
from gradcomp._src.core.feedback import Feedback
from gradcomp._src.core.residual_storage import Int8Residual, Stored
from gradcomp._src.exchange.step import Own, OwnEntries
from gradcomp._src.kernels.materialize import updated_in_place


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Again:
  """Computes the next residual of a large leaf anew, from all that it depends on."""

  gradient: jax.Array
  own: Own | OwnEntries
  # Of the gradient plus the residual.
  dtype: np.dtype = dataclasses.field(metadata={"static": True})
  feedback: Feedback = dataclasses.field(metadata={"static": True})

  def __call__(self, old: jax.Array, momentum: jax.Array | None) -> jax.Array:
    """Returns it, given the old residual and momentum in the shape of the view."""
    sent = self.feedback.sent(self.gradient.reshape(old.shape), momentum)
    corrected = old.astype(self.dtype) + sent.astype(self.dtype)
    return self.feedback.waits(self.own.unsent(corrected))


class Left(NamedTuple):
  """The parts of a step's result that a leaf's next residual and momentum depend on."""

  mean: jax.Array
  unsent: jax.Array  # as the residual has it, in the shape of the view
  chosen: jax.Array | None  # as of exchange.step.Reduced
  again: Again | None  # computes the unsent part anew


Kept = tuple[Stored, jax.Array | None]  # the residual and the momentum of a leaf


@functools.partial(jax.jit, static_argnums=0)  # leaves of a shape: traced once
def remainder(
  feedback: Feedback,
  old: Kept,
  gradient: jax.Array,
  left: Left,
  count: jax.Array,
  key: Any,
) -> Kept:
  """Returns the new residual and momentum; old ones where the step is not finite."""
  # Where the unsent part or the mean is not finite, no worker keeps the gradient, or
  # counts its bucket as sent. `count` is the step's, see materialize.updated_in_place.
  # `key`, uint32[2], rounds to fewer bits. With `again` a CPU does not store the unsent
  # part until the mean is there.
  residual: Any
  (residual, momentum), stored = old, None
  mean, unsent, chosen, again = left
  keep: Any = _usable
  entries = again is not None and isinstance(again.own, OwnEntries)
  # Entries suit every shape, and XLA copies views of two rows.
  shape = gradient.shape if entries or chosen is not None else unsent.shape
  lane, shape = None, shape or (1,)
  with jax.named_scope("gradcomp_residual"):
    if isinstance(residual, Int8Residual):
      wide = unsent.astype(jnp.float32).reshape(residual.codes.shape)
      new, count = _of_int8(wide, mean.reshape(wide.shape), residual, count)
      blocks, residual = residual.scales.shape[-1], None
      stored = storage.to_int8(new, storage.lanes(key, new.shape), blocks)
    elif residual.dtype == jnp.bfloat16:
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

    def anew(old: Any, gradient: Any, again: Any, lane: Any, *rest: Any) -> Any:
      return kept(old, gradient, split(again(*old), lane), *rest)

    views = jax.tree.map(lambda x: x.reshape(shape), (residual, momentum))
    rest = mean.reshape(shape), chosen
    read = gradient, split(unsent.reshape(shape), lane), *rest
    once = lambda old: kept(old, *read)
    if again is not None:
      read_again = gradient, again, lane, *rest
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
