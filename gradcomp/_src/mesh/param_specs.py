"""Specs of parameters over other axes than the workers': given, or read from arrays.

No type has them in the trace of a train step: a context does, by the path and the shape
of each leaf. It is a part of the keys of JAX's caches, as a study is.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from gradcomp._src.mesh.axes import AxisName, automatic_axes, axis_names
from gradcomp._src.mesh.place import check_whole
from gradcomp._src.mesh.specs import axes_in, is_spec, restrict_spec
from gradcomp._src.mesh.trees import unboxed
from gradcomp._src.mesh.types import is_traced, mesh_of, placed_spec

_SHARDINGS = "jax.tree.map(lambda x: x.sharding, params)"

# ``with PLACED(by_leaf(params, specs)):`` in a trace.
PLACED: Any = jax.make_user_context(None)


def specs_of(given: Any, axis_name: AxisName) -> Any:
  """Returns ``param_specs``, specs or shardings, as specs; errors for bad ones."""

  def spec(path: Any, x: Any) -> PartitionSpec:
    if is_spec(x):
      return x
    if isinstance(x, NamedSharding):
      return x.spec
    if isinstance(x, Sharding) and x.is_fully_replicated:
      return PartitionSpec()
    raise TypeError(
      f"`param_specs`{jax.tree_util.keystr(path)} must be a jax.P or a "
      f"jax.NamedSharding, got {x!r}; take those of the parameters: {_SHARDINGS}."
    )

  specs = jax.tree_util.tree_map_with_path(spec, given, is_leaf=is_spec)
  check_whole("param_specs", specs, axis_name)
  return specs


def specs_like(
  params: Any, given: Any, axis_name: AxisName, mesh: Mesh | AbstractMesh | None = None
) -> Any:
  """Returns a spec for each parameter: of ``param_specs``, or for None as they lie."""
  if given is None:
    mesh = mesh_of(params) if mesh is None else mesh
    others = [x for x in mesh.auto_axes if mesh.shape[x] > 1]
    hidden = tuple(x for x in others if x not in axis_names(axis_name))
    if hidden and is_traced(params):
      raise ValueError(
        f"`param_specs` must give the sharding of the parameters over the Auto axes "
        f"{hidden}, which types do not show, got None: whole gradients would be "
        f"gathered over these axes. Pass {_SHARDINGS}, taken outside of jax.jit; or "
        "jax.P() for parameters that every device has whole."
      )
    given = jax.tree.map(placed_spec, params)
  specs = specs_of(given, axis_name)
  try:
    return jax.tree.broadcast(specs, params, is_leaf=is_spec)
  except ValueError as error:
    raise ValueError(
      "`param_specs` must be one spec, or a tree of specs like the parameters, "
      f"{jax.tree.structure(params)}, got {specs}; take those of the parameters: "
      f"{_SHARDINGS}."
    ) from error


def specs_over(params: Any, axes: Collection[str]) -> tuple[PartitionSpec, ...] | None:
  """Returns the spec of each array; None if these axes shard none of them."""
  specs = tuple(placed_spec(x) for x in jax.tree.leaves(params))
  return specs if axes_in(specs).intersection(axes) else None


def by_leaf(params: Any, specs: Sequence[PartitionSpec]) -> Any:
  """Returns the specs by leaf, for :data:`PLACED`."""
  leaves = jax.tree_util.tree_leaves_with_path(unboxed(params))
  return tuple(map(_name, *zip(*leaves, strict=True))), tuple(specs)


def shards_of(grads: Any) -> tuple[Any, Collection[str]]:
  """Returns specs of a step's gradients, None if none cut, and Auto axes in no map."""
  if PLACED.value is None:
    return None, ()
  known, axes = dict(zip(*PLACED.value, strict=True)), automatic_axes()
  own = lambda path, x: known.get(_name(path, x), PartitionSpec())
  spec = lambda path, x: restrict_spec(own(path, x), axes)
  specs = jax.tree_util.tree_map_with_path(spec, grads)
  return specs if axes_in(specs) else None, axes


def _name(path: Any, x: Any) -> tuple[str, tuple[int, ...]]:
  return jax.tree_util.keystr(path), x.shape
