"""Sum, scatter and gather of one worker's array, with or without a residual."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.floats.dtypes import narrowed
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.types import mark_varying
from gradcomp._src.parallel.all_gather import all_gather
from gradcomp._src.parallel.options import Own, Wire, checked_key, wire
from gradcomp._src.parallel.psum import by_owners, owner_key, psum, total
from gradcomp._src.parallel.psum_scatter import psum_scatter
from gradcomp._src.parallel.transport import (
  concat,
  gather_encoded,
  loss_of,
  mine,
  narrowed_parts,
  reduce_encoded,
  split_parts,
)


class Transfer(NamedTuple):
  """A collective that changes the sharding of an array over some axes.

  Attributes:
    kind: ``"sum"`` adds up addends on all workers; ``"scatter"`` adds up each worker's
      part on it; ``"gather"`` concatenates shards.
    axis_name: the axes of the workers.
    axis: the array axis that is, or will be, sharded.
  """

  kind: Literal["sum", "scatter", "gather"]
  axis_name: AxisName
  axis: int = 0


def transfer(
  x: jax.Array, move: Transfer, codec: Codec, key: jax.Array | None
) -> jax.Array:
  """Runs a collective on one worker, where a map binds the axes."""
  if move.kind == "sum":
    return psum(x, axis_name=move.axis_name, codec=codec, key=key)
  if move.kind == "scatter":
    return psum_scatter(
      x, axis_name=move.axis_name, codec=codec, axis=move.axis, key=key
    )
  return all_gather(
    x,
    axis_name=move.axis_name,
    codec=codec,
    axis=move.axis,
    own="coded",
    to="invarying",
    key=key,
  )


def moved_with_residual(
  move: Transfer,
  codec: Codec,
  x: jax.Array,
  residual: jax.Array,
  key: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Runs a collective on one worker; returns the result and the new residual.

  The residual is added to the array. The new one is the rounding error of both, and of
  the cast of the result to the array's dtype. Where that is not finite, it is the old
  one.
  """
  if jnp.iscomplexobj(x):
    raise TypeError(f"`x` must be real where `residual` is given, got {x.dtype}.")
  own: Own = "exact" if move.kind == "scatter" else "coded"
  options = wire(move.axis_name, codec, own=own)
  words = checked_key(key, codec)
  old = mark_varying(residual.astype(jnp.float32), move.axis_name)
  corrected = mark_varying(x.astype(jnp.float32), move.axis_name) + old.reshape(x.shape)
  if move.kind == "sum":
    result, rest = narrowed(total(corrected, options, words), x.dtype)
    unsent = _lost_in_sum(corrected, options, words) + rest / options.size
  elif move.kind == "scatter":
    parts = split_parts(corrected, move.axis, options.size)
    summed, unsent = (
      reduce_encoded(parts, options, words),
      loss_of(parts, options, words),
    )
    result, unsent = narrowed_parts(summed, unsent, x.dtype, options)
    unsent = concat(unsent, move.axis)
  else:
    shards, rest = narrowed(gather_encoded(corrected, options, words), x.dtype)
    result = concat(shards, move.axis)
    unsent = loss_of(corrected[None], options, words)[0]
    unsent = unsent + rest[lax.axis_index(move.axis_name)]
  unsent = unsent.reshape(old.shape)
  kept = jnp.where(jnp.isfinite(unsent), unsent, old).astype(residual.dtype)
  return result, kept


def _lost_in_sum(x: jax.Array, wire: Wire, key: jax.Array | None) -> jax.Array:
  """Returns the rounding errors of this worker's array and of the sum that it owns."""
  worker = lax.axis_index(wire.axis_name)
  parts, own = by_owners(x, wire, key)
  unsent = loss_of(parts, wire, key)
  again = loss_of(own[None], wire, owner_key(wire, key))[0]
  # The owner sends the error of its sum in the next step, like its own.
  unsent = unsent + jnp.where(mine(worker, unsent), again, 0.0)
  return unsent.reshape(-1)[: x.size].reshape(x.shape)
