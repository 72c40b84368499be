"""Resharding of arrays, inside a map and on an Explicit mesh, also with residuals."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.floats.dtypes import narrowed
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.specs import entries, reduced_spec, stack_spec
from gradcomp._src.mesh.types import mark_varying
from gradcomp._src.parallel import options, transport
from gradcomp._src.parallel.gather_scatter import all_gather, psum_scatter
from gradcomp._src.parallel.options import Key, Wire
from gradcomp._src.parallel.psum import by_owners, owner_key, psum, total
from gradcomp._src.parallel.transport import loss_of, mine


class Transfer(NamedTuple):
  """A collective that changes the sharding of an array over some axes.

  ``"sum"`` adds up addends on all workers; ``"scatter"`` adds up each worker's part on
  it; ``"gather"`` concatenates shards.
  """

  kind: Literal["sum", "scatter", "gather"]
  axis_name: AxisName
  axis: int = 0  # of the array, that is, or will be, sharded


def transfer(x: jax.Array, move: Transfer, codec: Codec, key: Key) -> jax.Array:
  """Runs a collective on one worker, where a map binds the axes."""
  given: Any = {"axis_name": move.axis_name, "codec": codec, "key": key}
  if move.kind == "sum":
    return psum(x, **given)
  if move.kind == "scatter":
    return psum_scatter(x, axis=move.axis, **given)
  return all_gather(x, axis=move.axis, own="coded", to="invarying", **given)


def moved_with_residual(
  move: Transfer, codec: Codec, x: jax.Array, residual: jax.Array, key: Key
) -> tuple[jax.Array, jax.Array]:
  """Sends an array and its residual on one worker; returns the result and its loss.

  Where that is not finite, the new residual is the old one.
  """
  if jnp.iscomplexobj(x):
    raise TypeError(f"`x` must be real where `residual` is given, got {x.dtype}.")
  own: options.Own = "exact" if move.kind == "scatter" else "coded"
  wire = options.wire(move.axis_name, codec, own=own)
  words = options.checked_key(key, codec)
  old = mark_varying(residual.astype(jnp.float32), move.axis_name)
  corrected = mark_varying(x.astype(jnp.float32), move.axis_name) + old.reshape(x.shape)
  if move.kind == "sum":
    result, rest = narrowed(total(corrected, wire, words), x.dtype)
    unsent = _lost_in_sum(corrected, wire, words) + rest / wire.size
  elif move.kind == "scatter":
    parts = transport.split_parts(corrected, move.axis, wire.size)
    summed = transport.reduce_encoded(parts, wire, words)
    unsent = loss_of(parts, wire, words)
    result, unsent = transport.narrowed_parts(summed, unsent, x.dtype, wire, move.axis)
  else:
    shards = transport.gather_encoded(corrected, wire, words)
    shards, rest = narrowed(shards, x.dtype)
    result = transport.concat(shards, move.axis)
    unsent = loss_of(corrected[None], wire, words)[0]
    unsent = unsent + rest[lax.axis_index(move.axis_name)]
  unsent = unsent.reshape(old.shape)
  kept = jnp.where(jnp.isfinite(unsent), unsent, old).astype(residual.dtype)
  return result, kept


def _lost_in_sum(x: jax.Array, wire: Wire, key: Key) -> jax.Array:
  """Returns the rounding errors of this worker's array and of the sum that it owns."""
  worker = lax.axis_index(wire.axis_name)
  parts, own = by_owners(x, wire, key)
  unsent = loss_of(parts, wire, key)
  again = loss_of(own[None], wire, owner_key(wire, key))[0]
  # The owner sends the error of its sum in the next step, like its own.
  unsent = unsent + jnp.where(mine(worker, unsent), again, 0.0)
  return unsent.reshape(-1)[: x.size].reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Path:
  """A change from one sharding to another, on a mesh with Explicit axes."""

  move: Transfer
  codec: Codec
  source: PartitionSpec
  target: PartitionSpec
  mesh: AbstractMesh

  def run(self, x: jax.Array, key: Key) -> jax.Array:
    """Returns the array in the target sharding."""
    result = self._mapped(
      lambda x, key: transfer(x, self.move, self.codec, key),
      (self.source, PartitionSpec()),
      reduced_spec(self.target),
    )(x, key)
    return self._typed(result)

  def with_residual(
    self, x: jax.Array, residual: jax.Array, key: Key
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the array in the target sharding, and the new residual."""
    kept = reduced_spec(self.source)
    if self.move.kind != "gather":
      kept = stack_spec(self.move.axis_name, kept)
    result, residual = self._mapped(
      functools.partial(moved_with_residual, self.move, self.codec),
      (self.source, kept, PartitionSpec()),
      (reduced_spec(self.target), kept),
    )(x, residual, key)
    return self._typed(result), residual

  def pull(self, cotangent: jax.Array, key: Key) -> jax.Array:
    """Returns the cotangent of the argument; of addends it is ``reduced``."""
    names = axis_names(self.move.axis_name)
    if self.move.kind == "sum":
      return self._cast(cotangent, _reduced(self.target, names))
    if self.move.kind == "gather" and not self.target.reduced:
      return self._cast(cotangent, self.source)
    if self.move.kind == "gather":
      back = self.move._replace(kind="scatter")
      addends = PartitionSpec(*entries(self.target), unreduced=set(names))
      path = dataclasses.replace(self, move=back, source=addends, target=self.source)
    else:
      back = self.move._replace(kind="gather")
      whole = _reduced(self.source, names)
      path = dataclasses.replace(self, move=back, source=self.target, target=whole)
    return path.run(cotangent, options.folded(key, 1))

  def _mapped(self, function: Callable[..., Any], given: Any, result: Any) -> Any:
    # If types are checked, JAX lets only its own sums take addends.
    return jax.shard_map(
      function, mesh=self.mesh, in_specs=given, out_specs=result, check_vma=False
    )

  def _typed(self, x: jax.Array) -> jax.Array:
    return self._cast(x, self.target) if self.target.reduced else x

  def _cast(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.reshard(x, NamedSharding(self.mesh, spec))


def _reduced(spec: PartitionSpec, names: tuple[str, ...]) -> PartitionSpec:
  return PartitionSpec(*entries(spec), reduced=set(names))


def check_explicit(mesh: AbstractMesh) -> None:
  """Raises ValueError unless there is a mesh, with Explicit axes only."""
  if mesh.empty or any(kind != AxisType.Explicit for kind in mesh.axis_types):
    raise ValueError(
      "`x` must be inside a map that binds the axes, or lie on a mesh whose axes are "
      f"all Explicit, got {mesh.axis_names} of {mesh.axis_types}; call this inside "
      "jax.shard_map."
    )


def undifferentiated(
  function: Callable[..., Any], x: jax.Array, residual: jax.Array, key: Any
) -> Any:
  """Calls ``function(x, residual, key)``; ValueError if it is differentiated."""

  def refuse(*_: Any) -> Any:
    raise ValueError(
      "`residual` must be None where the result is differentiated, because a residual "
      "corrects what is sent after the gradient, got one of the shape "
      f"{residual.shape}."
    )

  refused = jax.custom_vjp(function)
  refused.defvjp(refuse, refuse)
  return refused(x, residual, key)
