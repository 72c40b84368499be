"""Asks JAX about the data axis: whether it is bound here, and whether it is typed.

The spellings here are those of JAX 0.10.2 to 0.12. What differs among versions, or
between pmap, vmap and shard_map, stays in this file.
"""

import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh

# One axis, or several that are reduced together, as jax.lax.psum takes them.
AxisName = str | tuple[str, ...]

# Where explain traces update, these are bound: (between, inside), or the first alone.
# They stand for the axes that a transformation takes from the types of gradients.
EXPLAINED = ("gradcomp_between", "gradcomp_inside")

# Where allow_frozen looks which gradients are read, this is bound.
FOLLOWED = "gradcomp_followed"


class UnboundAxisError(ValueError):
  """An axis is not bound; says which are needed."""

  def __init__(self, message: str, axis_name: AxisName):
    super().__init__(message)
    self.axis_name = axis_name


def names(axis_name: AxisName) -> tuple[str, ...]:
  """Returns the axes as a tuple.

  Raises:
    ValueError: ``axis_name`` names no axis, or one twice.
  """
  result = axis_name if isinstance(axis_name, tuple) else (axis_name,)
  named = all(isinstance(name, str) for name in result)
  if not result or not named or len(set(result)) < len(result):
    raise ValueError(
      f"`axis_name` must be the name of an axis or a tuple of different ones, got "
      f"{axis_name!r}."
    )
  return result


def bound_size(axis_name: AxisName) -> int | None:
  """Returns the number of workers on axes of enclosing maps; None if one is unbound."""
  try:
    return math.prod(lax.axis_size(name) for name in names(axis_name))
  except NameError:
    return None


def is_explained() -> bool:
  """Returns True where explain traces, and nothing runs.

  JAX knows the bound axes of each trace that it keeps, and takes none of elsewhere.
  """
  return bound_size(EXPLAINED[0]) is not None


def is_followed() -> bool:
  """Returns True where transformations give gradients back as they are."""
  return bound_size(FOLLOWED) is not None


def or_explained(axis_name: AxisName | None) -> AxisName | None:
  """Returns the axes; where none are named, those of explain if it traces."""
  if axis_name is not None or not is_explained():
    return axis_name
  return EXPLAINED if bound_size(EXPLAINED) else EXPLAINED[0]


def mesh_size(axis_name: AxisName) -> int | None:
  """Returns the number of workers on axes of the mesh of ``jax.set_mesh``, or None.

  It is None if the mesh lacks one of the axes, or if there is no mesh.
  """
  shape = jax.sharding.get_abstract_mesh().shape
  if any(name not in shape for name in names(axis_name)):
    return None
  return math.prod(shape[name] for name in names(axis_name))


def require_size(axis_name: AxisName, mesh: AbstractMesh | None = None) -> int:
  """Returns the number of workers on the axes.

  Args:
    axis_name: the axes.
    mesh: the mesh in the types of the arrays, whose axes the error names; by default
      that of ``jax.set_mesh`` or of the enclosing map.

  Raises:
    UnboundAxisError: an axis is not bound.
  """
  size = bound_size(axis_name)
  if size is None:
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    raise UnboundAxisError(
      f"`axis_name` must be an axis of the enclosing jax.shard_map, jax.pmap or "
      f"jax.vmap, and {axis_name!r} is not bound here; {_cure(axis_name, mesh)}or pass "
      "axis_name=None to compress on one device.",
      axis_name,
    )
  return size


def _cure(axis_name: AxisName, mesh: AbstractMesh) -> str:
  """Returns what binds the axes, or the axes that there are instead."""
  cure = "call this inside one (or use gradcomp.make_train_step), "
  if not mesh.axis_names:
    return f"{cure}or in plain jax.jit under jax.set_mesh(jax.make_mesh(...)), "
  if not set(names(axis_name)).issubset(mesh.axis_names):
    return f"the axes of the mesh are {mesh.axis_names}: name one of these, "
  return (
    f"{cure}or make the mesh with Explicit axes: jax.make_mesh(shape, "
    f"{mesh.axis_names}, (jax.sharding.AxisType.Explicit,) * {len(mesh.axis_names)}), "
  )


def varying(x: jax.Array) -> frozenset[str]:
  """Returns the manual axes over which ``x`` differs, as its type says."""
  return frozenset(jax.typeof(x).manual_axis_type.varying)


def is_typed(axis_name: AxisName) -> bool:
  """Returns True if the enclosing map tracks what varies.

  ``jax.shard_map`` with ``check_vma=True`` does.
  """
  return names(axis_name)[0] in varying(lax.axis_index(axis_name))


def mark_varying(tree: Any, axis_name: AxisName) -> Any:
  """Types every leaf as varying over the axes, if types are tracked."""
  if not is_typed(axis_name):
    return tree

  def mark(x: jax.Array) -> jax.Array:
    missing = tuple(name for name in names(axis_name) if name not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(mark, tree)


def automatic(axis_name: AxisName) -> dict[str, int]:
  """Returns the Auto axes beside these ones of an enclosing shard_map, and their sizes.

  Along them JAX decides by itself which device holds what. Under pmap and vmap there
  are none.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not set(names(axis_name)).issubset(mesh.manual_axes):
    return {}
  return {name: mesh.shape[name] for name in mesh.auto_axes if mesh.shape[name] > 1}


def manual_axes() -> tuple[str, ...]:
  """Returns the mesh axes that an enclosing shard_map or pmap has made manual."""
  return tuple(jax.sharding.get_abstract_mesh().manual_axes)
