"""Readers of arrays' types (sharded, unreduced, varying), and casts to them.

An array is ``unreduced`` over Explicit axes where each device holds an addend.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from gradcomp._src.mesh import specs
from gradcomp._src.mesh.axes import AxisName, axis_names, bound_size
from gradcomp._src.mesh.per_worker import with_rows


def typed_spec(x: Any) -> PartitionSpec:
  """Returns the spec in the type of an array, which has Explicit axes only."""
  return jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else PartitionSpec()


def placed_spec(x: Any) -> PartitionSpec:
  """Returns the spec of an array; if it is concrete, also over Auto axes."""
  if isinstance(x, jax.core.Tracer):
    return typed_spec(x)
  sharding = getattr(x, "sharding", None)
  return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def is_traced(tree: Any) -> bool:
  """Returns True for arrays inside of a transformed function."""
  return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def unreduced_axes(tree: Any) -> frozenset[str]:
  """Returns the Explicit axes over which arrays are still sums of addends."""
  return frozenset().union(*(typed_spec(x).unreduced for x in jax.tree.leaves(tree)))


def sharded_over(tree: Any) -> frozenset[str]:
  """Returns the Explicit axes that shard any array of a tree."""
  return specs.axes_in(jax.tree.map(typed_spec, tree))


def typed_specs(tree: Any, axis_name: AxisName) -> Any:
  """Returns the specs in arrays' types, of these axes only; None for other leaves."""
  own = lambda x: specs.restrict_spec(typed_spec(x), axis_names(axis_name))
  return jax.tree.map(lambda x: own(x) if isinstance(x, jax.Array) else None, tree)


def varying_axes(x: Any) -> frozenset[str]:
  """Returns the manual axes over which ``x`` varies by its type."""
  if not isinstance(x, jax.Array):
    return frozenset()
  return frozenset(jax.typeof(x).manual_axis_type.varying)


def other_axes(x: Any, axis_name: AxisName | None) -> tuple[str, ...]:
  """Returns the axes but ``axis_name`` over which an array differs by its type."""
  own = () if axis_name is None else axis_names(axis_name)
  found = specs.axes_in(typed_spec(x)) | varying_axes(x)
  return tuple(sorted(found.difference(own)))


def mesh_of(tree: Any) -> AbstractMesh:
  """Returns the mesh in the types of a tree's arrays, or of ``jax.set_mesh``."""
  for leaf in jax.tree.leaves(with_rows(tree)):
    mesh = jax.typeof(leaf).sharding.mesh if isinstance(leaf, jax.Array) else None
    if mesh is not None and not mesh.empty:
      return mesh
  return jax.sharding.get_abstract_mesh()


def under_mesh_of(tree: Any) -> AbstractContextManager[Any]:
  """Sets the mesh that concrete arrays lie on, if none is set."""
  arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
  placed = [x.sharding for x in arrays if not is_traced(x)]
  meshes: set[Any] = {x.mesh for x in placed if isinstance(x, NamedSharding)}
  if len(meshes) == 1 and jax.sharding.get_abstract_mesh().empty:
    with contextlib.suppress(ValueError):  # where JAX traces, it can set none
      return jax.set_mesh(*meshes)
  return contextlib.nullcontext()


def around(
  tree: Any, axis_name: AxisName, mesh: Mesh | AbstractMesh | None = None
) -> tuple[Any, AxisType | None]:
  """Returns the mesh of a call, and the type of axes: Manual in maps, None if mixed."""
  context = jax.sharding.get_abstract_mesh()
  mesh = mesh_of(tree) if mesh is None else mesh
  mesh = context if context.manual_axes else mesh  # a map in another has its mesh
  if bound_size(axis_name) is not None:
    return mesh, AxisType.Manual
  types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  kinds = {types.get(name) for name in axis_names(axis_name)}
  return mesh, kinds.pop() if len(kinds) == 1 else None


def is_typed(axis_name: AxisName) -> bool:
  """Returns True if the enclosing map types arrays as varying (``check_vma=True``)."""
  return axis_names(axis_name)[0] in varying_axes(lax.axis_index(axis_name))


def mark_varying(tree: Any, axis_name: AxisName | None, *like: Any) -> Any:
  """Types leaves as varying over axes, and over the axes of ``like``."""
  names = (axis_name,) if isinstance(axis_name, str) else axis_name or ()
  more = frozenset[str]().union(*map(varying_axes, like)).difference(names)
  names = (*names, *sorted(more))
  if not names or not is_typed(names):
    return tree

  def mark(x: jax.Array) -> jax.Array:
    varying = varying_axes(x)
    missing = tuple(name for name in names if name not in varying)
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(mark, tree)


def put(tree: Any, mesh: Mesh | AbstractMesh, axis_name: AxisName, spec: Any) -> Any:
  """Reshards arrays to a spec of axes, where types say how they are sharded."""
  if around(tree, axis_name, mesh)[1] != AxisType.Explicit:
    return tree
  return jax.reshard(tree, NamedSharding(mesh, spec))


def zeros(x: jax.Array) -> jax.Array:
  """Returns zeros like ``x`` that are equal on all workers."""
  spec, own = specs.entries(typed_spec(x)), jnp.zeros(x.shape, x.dtype)
  if not any(spec):
    return own
  return jax.reshard(own, NamedSharding(mesh_of(x), PartitionSpec(*spec)))


def mark_reduced(tree: Any, axis_name: AxisName) -> Any:
  """Types arrays so that gradients with respect to them are unreduced over the axes."""
  names = set(axis_names(axis_name))

  def mark(x: jax.Array) -> jax.Array:
    spec = PartitionSpec(*specs.entries(typed_spec(x)), reduced=names)
    return jax.reshard(x, NamedSharding(mesh_of(x), spec))

  return jax.tree.map(mark, tree)
