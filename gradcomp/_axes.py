"""What JAX knows of the data axis where we are: bound or not, typed or not.

The spellings here are those of JAX 0.10.2 to 0.12; what differs among versions, or
between pmap, vmap and shard_map, stays in this file.
"""

from typing import Any

import jax
from jax import lax


def bound_size(axis_name: str) -> int | None:
  """The number of workers on an axis of the enclosing map, None where it is unbound."""
  try:
    return lax.axis_size(axis_name)
  except NameError:
    return None


def require_size(axis_name: str) -> int:
  """The number of workers on the axis; ValueError where it is unbound."""
  if not isinstance(axis_name, str):
    raise ValueError(f"`axis_name` must be the name of one axis, got {axis_name!r}.")
  size = bound_size(axis_name)
  if size is None:
    raise ValueError(
      f"`axis_name` must be an axis of the enclosing jax.shard_map, jax.pmap or "
      f"jax.vmap, and {axis_name!r} is not bound here; call this inside one (or use "
      "gradcomp.make_train_step), or pass axis_name=None to compress on one device."
    )
  return size


def varying(x: jax.Array) -> frozenset[str]:
  """The manual axes over which the type of ``x`` says that it differs."""
  return frozenset(jax.typeof(x).manual_axis_type.varying)


def is_typed(axis_name: str) -> bool:
  """Whether the enclosing map tracks what varies: shard_map with check_vma=True."""
  return axis_name in varying(lax.axis_index(axis_name))


def mark_varying(tree: Any, axis_name: str) -> Any:
  """Types every leaf as varying over the axis where types are tracked."""
  if not is_typed(axis_name):
    return tree

  def mark(x: jax.Array) -> jax.Array:
    return x if axis_name in varying(x) else lax.pcast(x, axis_name, to="varying")

  return jax.tree.map(mark, tree)


def manual_axes() -> tuple[str, ...]:
  """Mesh axes that an enclosing shard_map or pmap has made manual."""
  return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def maps_outside(axis_name: str) -> bool:
  """Whether ``jax.set_mesh`` has a mesh with the axis and no map has bound it yet."""
  in_mesh = axis_name in jax.sharding.get_abstract_mesh().axis_names
  return in_mesh and bound_size(axis_name) is None
