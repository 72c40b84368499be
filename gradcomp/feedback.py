"""Error feedback: what was not sent is added to what comes next."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from gradcomp import _axes, explicit
from gradcomp._axes import AxisName
from gradcomp.exchange import OwnerResiduals


class OwnerShapes(Protocol):
  """From a worker's leaves to the shapes of what it keeps as an owner."""

  def __call__(
    self,
    leaves: Sequence[jax.ShapeDtypeStruct],
    others: Sequence[tuple[str, ...]],
    workers: int | None,
  ) -> dict[str, list[tuple[int, int]]]: ...


def zero_residuals(
  params: Any, axis_name: AxisName | None, owner_shapes: OwnerShapes
) -> tuple[Any, OwnerResiduals]:
  """Zero residuals: of each leaf, float32 and at least 1-d, and of the second stage.

  Inside the map, or without any: the worker's own, shaped like the leaf. Outside it,
  under a mesh that has the axis: the global arrays, the workers' stacked on their first
  axis and sharded over it.
  """
  leaves, treedef = jax.tree.flatten(params)
  names = () if axis_name is None else _axes.names(axis_name)
  bound = _axes.bound_size(names) if names else None
  on_mesh = _axes.mesh_size(names) if names and bound is None else None
  mesh = jax.sharding.get_abstract_mesh() if on_mesh else explicit.mesh_of(leaves)
  specs = [
    explicit.placed_spec(leaf) if on_mesh else explicit.typed_spec(leaf)
    for leaf in leaves
  ]
  others = [explicit.other_axes(leaf, axis_name) for leaf in leaves]
  # The second stage is planned from what update will see: a part of a leaf where types
  # say so, but not where Auto axes cut it.
  seen = [_part(leaf, explicit.typed_spec(leaf), mesh) for leaf in leaves]
  owned = owner_shapes(seen, others, bound or on_mesh)
  parts = [_part(leaf, spec, mesh) for leaf, spec in zip(leaves, specs, strict=True)]

  def local() -> tuple[list[jax.Array], OwnerResiduals]:
    residual = [
      _zeros(part.shape or (1,), (*names, *axes))
      for part, axes in zip(parts, others, strict=True)
    ]
    return residual, {
      axes: tuple(_zeros(shape, axes.split(",")) for shape in shapes)
      for axes, shapes in owned.items()
    }

  cut = frozenset().union(*map(explicit.sharded, specs))
  if not on_mesh and not cut:
    residual, owner = local()
    return jax.tree.unflatten(treedef, residual), owner
  if on_mesh:
    specs = [explicit.stacked(names, spec) for spec in specs]
  inside = frozenset(mesh.axis_names) if on_mesh else cut
  owner_specs = {axes: explicit.stacked_over(axes.split(","), inside) for axes in owned}
  mapped = jax.shard_map(
    local,
    in_specs=(),
    out_specs=(specs, owner_specs),
    axis_names=set(inside),
    check_vma=not on_mesh,
  )
  residual, owner = jax.jit(mapped)()
  return jax.tree.unflatten(treedef, residual), owner


def _part(leaf: Any, spec: PartitionSpec, mesh: Any) -> jax.ShapeDtypeStruct:
  """One device's part of a leaf."""
  shape = getattr(leaf, "shape", ())
  if explicit.sharded(spec):
    shape = NamedSharding(mesh, spec).shard_shape(shape)
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def _zeros(shape: tuple[int, ...], axes: Sequence[str]) -> jax.Array:
  """Zeros, typed as different over those of the axes that maps have bound."""
  bound = tuple(name for name in axes if _axes.bound_size(name) is not None)
  zeros = jnp.zeros(shape, jnp.float32)
  return _axes.mark_varying(zeros, bound) if bound else zeros


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


def remainder(unsent: jax.Array, mean: jax.Array, old: jax.Array) -> jax.Array:
  """What was not sent; where that or the mean is not finite, the residual as it was.

  So a gradient that is not finite, and its whole bucket with it, is never kept, and of
  that bucket no worker counts as sent what nobody can use.
  """
  finite = jnp.isfinite(unsent) & jnp.isfinite(mean)
  return jnp.where(finite.reshape(old.shape), unsent.reshape(old.shape), old)
