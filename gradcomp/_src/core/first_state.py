"""Creation and checks of the parts of a state that differ between workers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gradcomp._src.checks import see
from gradcomp._src.mesh import types
from gradcomp._src.mesh.axes import Axes, AxisName, axis_names, bound_size, mesh_size
from gradcomp._src.mesh.place import GATHER_FIRST
from gradcomp._src.mesh.specs import axes_in, sharded_axes, stack_spec, stacked_over

Own = dict[Axes, Any]  # arrays by the axes that stack them
_Shape = tuple[int, ...]

# Of the shapes of leaves, the other axes of each, and the number of workers: a function
# of the seed, ``uint32[2]``, that makes a worker's arrays that are not like leaves.
OwnArrays = Callable[
  [Sequence[jax.ShapeDtypeStruct], Sequence[tuple[str, ...]], int | None],
  Callable[[jax.Array], Own],
]


def first_state(
  params: Any,
  axis_name: AxisName | None,
  firsts: Sequence[Callable[[_Shape], Any]],
  own_arrays: OwnArrays,
  seed: jax.Array,
) -> tuple[list[Any], Own]:
  """Creates the trees like leaves, and other arrays, that differ between workers.

  Outside of the map, under a mesh that has the axis, they are stacked on their first
  axis, and sharded over it. Each of ``firsts`` makes arrays of a leaf, from a shape.
  """
  leaves, treedef = jax.tree.flatten(params)
  names = () if axis_name is None else axis_names(axis_name)
  bound = bound_size(names) if names else None
  on_mesh = mesh_size(names) if names and bound is None else None
  mesh = jax.sharding.get_abstract_mesh() if on_mesh else types.mesh_of(leaves)
  specs = [*map(types.placed_spec if on_mesh else types.typed_spec, leaves)]
  others = [types.other_axes(leaf, axis_name) for leaf in leaves]
  # The second stage is planned from the shapes that update will see: a shard of a leaf
  # if it is typed so, but a whole leaf if Auto axes shard it.
  seen = [_part(leaf, types.typed_spec(leaf), mesh) for leaf in leaves]
  make = own_arrays(seen, others, bound or on_mesh)
  parts = [_part(leaf, spec, mesh) for leaf, spec in zip(leaves, specs, strict=True)]

  def local(seed: jax.Array) -> tuple[list[list[Any]], Own]:
    pairs = zip(parts, others, strict=True)
    places = [(x.shape or (1,), (*names, *y)) for x, y in pairs]
    like = [[_typed(first(shape), axes) for shape, axes in places] for first in firsts]
    return like, {axes: _typed(tree, axes) for axes, tree in make(seed).items()}

  cut = axes_in(specs)
  if not on_mesh and not cut:
    like, own = local(seed)
    return [jax.tree.unflatten(treedef, tree) for tree in like], own
  if on_mesh:
    specs = [stack_spec(names, spec) for spec in specs]
  inside = frozenset(mesh.axis_names) if on_mesh else cut
  own_specs = {axes: stacked_over(axes, inside) for axes in jax.eval_shape(make, seed)}
  mapped = jax.shard_map(
    local,
    in_specs=PartitionSpec(),
    out_specs=([specs] * len(firsts), own_specs),
    axis_names=set(inside),
    check_vma=not on_mesh,
  )
  like, own = jax.jit(mapped)(seed)
  return [jax.tree.unflatten(treedef, tree) for tree in like], own


def first_estimate(params: Any, axis_name: AxisName | None) -> Any:
  """Creates zeros like the parameters, of at least one axis, equal on all workers."""

  def first(leaf: Any) -> jax.Array:
    zeros = jnp.zeros_like(leaf, jnp.float32).reshape(jnp.shape(leaf) or (1,))
    return _typed(zeros, types.other_axes(leaf, axis_name))

  return jax.tree.map(first, params)


def _part(leaf: Any, spec: PartitionSpec, mesh: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape of one device's shard of a leaf."""
  shape = getattr(leaf, "shape", ())
  if sharded_axes(spec):
    shape = NamedSharding(mesh, spec).shard_shape(shape)
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def _typed(tree: Any, axes: Sequence[str]) -> Any:
  """Types arrays as varying over the axes that maps have bound."""
  bound = tuple(name for name in axes if bound_size(name) is not None)
  return types.mark_varying(tree, bound) if bound else tree


def check_own(
  name: str, tree: Any, updates: Any, axis_name: AxisName | None, workers: int
) -> None:
  """Raises ValueError for a worker's own tree that is not like its gradient."""

  def check(path: Any, update: jax.Array, leaf: jax.Array) -> None:
    shape = update.shape or (1,)
    if leaf.shape != shape:
      raise ValueError(
        f"`state.{name}`{jax.tree_util.keystr(path)} must have the shape of its "
        f"gradient, {shape} here, got {leaf.shape}"
        f"{_made_for(leaf.shape, shape, workers)}; inside a map, pass the state "
        "through with gradcomp.state_specs, and make it by optimizer.init inside the "
        f"map or under jax.set_mesh(mesh).{_parts(shape, leaf.shape, axis_name)}"
        f"{see('must-have-the-shape-of-its-gradient')}"
      )

  if tree is not None:
    jax.tree_util.tree_map_with_path(check, updates, tree)


def check_residual_types(stored: Any, updates: Any, axis_name: AxisName | None) -> None:
  """Raises ValueError for residuals that every device would take for its own."""
  if types.mesh_of(updates).size == 1:
    return
  names = () if axis_name is None else axis_names(axis_name)
  for path, leaf in jax.tree_util.tree_leaves_with_path(stored):
    if not sharded_axes(types.typed_spec(leaf)).issuperset(names):
      raise ValueError(
        f"`state.residual`{jax.tree_util.keystr(path)} must stack the parts of all "
        f"workers of {axis_name!r}, but its type says {jax.typeof(leaf)}; give "
        "axis_name= and make the state by optimizer.init under jax.set_mesh(mesh)."
      )


def _parts(part: _Shape, whole: _Shape, axis_name: AxisName | None) -> str:
  """Returns the cure for a gradient with the shape of a shard of its residual."""
  if len(part) != len(whole) or axis_name is None:
    return ""
  longer = [(a, b) for a, b in zip(part, whole, strict=True) if a != b]
  if len(longer) != 1 or not longer[0][0] or longer[0][1] % longer[0][0]:
    return ""
  return (
    f" If the gradient is that of a part of the parameter, sharded over {axis_name!r}, "
    f"{GATHER_FIRST}. If it is sharded over another axis, make the state by "
    "gradcomp.init_state."
  )


def stacked_for(got: _Shape, expected: _Shape, workers: int) -> int | None:
  """Returns the workers that an array of shape ``got`` was stacked for, or None."""
  if not got or not expected or got[1:] != expected[1:] or not expected[0]:
    return None
  count, rest = divmod(workers * got[0], expected[0])
  return None if rest or count in (0, workers) else count


def _made_for(got: _Shape, expected: _Shape, workers: int) -> str:
  count = stacked_for(got, expected, workers)
  several = "" if count == 1 else "s"
  return f": as if made for {count} worker{several}, not for {workers}" if count else ""
