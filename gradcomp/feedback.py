"""Error feedback: what a worker did not send is added to its next gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from gradcomp import _axes


def zero_residual(params: Any, axis_name: str | None) -> Any:
  """Zero residuals, float32 and at least 1-d.

  Inside the map, or without any: the worker's own, shaped like the leaf. Outside it,
  under a mesh that has the axis: the global arrays, the workers' stacked on their first
  axis and sharded over it.
  """

  def local() -> Any:
    zeros = jax.tree.map(
      lambda leaf: jnp.zeros(getattr(leaf, "shape", ()) or (1,), jnp.float32), params
    )
    if axis_name is None or _axes.bound_size(axis_name) is None:
      return zeros
    return _axes.mark_varying(zeros, axis_name)

  if axis_name is None or not _axes.maps_outside(axis_name):
    return local()
  per_worker = PartitionSpec(axis_name)
  return jax.jit(jax.shard_map(local, in_specs=(), out_specs=per_worker))()


def correct(updates: Any, residual: Any) -> Any:
  """The gradient plus the residual, in float32; the gradient alone without one."""
  if residual is None:
    return optax.tree.cast(updates, jnp.float32)

  def add(path: Any, update: jax.Array, leaf: jax.Array) -> jax.Array:
    if leaf.shape != (update.shape or (1,)):
      raise ValueError(
        f"`state.residual`{jax.tree_util.keystr(path)} must have the gradient's shape "
        f"{update.shape or (1,)} here, got {leaf.shape}; inside a map, pass the state "
        "through with gradcomp.state_specs, and make it by optimizer.init inside the "
        "map or under jax.set_mesh(mesh)."
      )
    return update.astype(jnp.float32) + leaf.reshape(update.shape)

  return jax.tree_util.tree_map_with_path(add, updates, residual)


def remainder(corrected: Any, sent: Any, residual: Any) -> Any:
  """What was not sent; where that is not finite, the residual as it was.

  So a gradient that is not finite, and its whole bucket with it, is never kept.
  """

  def subtract(kept: jax.Array, gone: jax.Array, old: jax.Array) -> jax.Array:
    rest = (kept - gone).reshape(old.shape)
    return jnp.where(jnp.isfinite(rest), rest, old)

  return jax.tree.map(subtract, corrected, sent, residual)
