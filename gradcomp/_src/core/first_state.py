"""Creation and checks of the parts of a state that differ between workers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradcomp._src.checks import see
from gradcomp._src.core.specs import made_on_mesh
from gradcomp._src.mesh import types
from gradcomp._src.mesh.axes import Axes, AxisName, UnboundAxisError, axis_names, count
from gradcomp._src.mesh.place import GATHER_FIRST
from gradcomp._src.mesh.specs import axes_in, shard_shape, stack_spec, stacked_over
from gradcomp._src.mesh.study import studied_axes

Own = tuple[dict[Axes, Any], ...]  # arrays by the axes that stack them
_Shape = tuple[int, ...]


def first_state(
  params: Any,
  axis_name: AxisName | None,
  firsts: dict[str, Callable[[_Shape], Any]],
  own_arrays: Callable[..., Callable[[jax.Array], Own]],
  seed: jax.Array,
) -> tuple[dict[str, Any], Own]:
  """Creates the trees like leaves, by ``firsts``, and others, that differ by worker."""
  leaves, treedef = jax.tree.flatten(params)
  names = () if axis_name is None else axis_names(axis_name)
  workers, is_bound = count(names) if names else (None, False)
  on_mesh = workers is not None and not is_bound
  mesh = jax.sharding.get_abstract_mesh() if on_mesh else types.mesh_of(leaves)
  specs = [*map(types.placed_spec if on_mesh else types.typed_spec, leaves)]
  others = [types.other_axes(leaf, axis_name) for leaf in leaves]
  # It returns a maker, by the seed, of a worker's arrays that are not like leaves.
  # The second stage is planned from the shapes that update will see: a shard of a leaf
  # if it is typed so, but a whole leaf if Auto axes shard it.
  seen = [_part(leaf, types.typed_spec(leaf), mesh) for leaf in leaves]
  make = own_arrays(jax.tree.unflatten(treedef, seen), others, workers)
  parts = [_part(leaf, spec, mesh) for leaf, spec in zip(leaves, specs, strict=True)]
  places = [(x.shape or (1,), (*names, *y)) for x, y in zip(parts, others, strict=True)]

  def typed(tree: Any, axes: Axes) -> Any:
    known = tuple(x for x in axes if workers is not None or x not in names)
    return types.mark_varying(tree, known)

  def local(seed: jax.Array) -> tuple[dict[str, Any], Own]:
    each = lambda first: [typed(first(shape), axes) for shape, axes in places]
    like = lambda first: jax.tree.unflatten(treedef, each(first))
    own = lambda part: {axes: typed(tree, axes) for axes, tree in part.items()}
    return jax.tree.map(like, firsts), tuple(map(own, make(seed)))

  cut = axes_in(specs)
  if not on_mesh and not cut:
    return local(seed)
  if on_mesh:
    specs = [stack_spec(names, spec) for spec in specs]
  inside = frozenset(mesh.axis_names) if on_mesh else cut
  parts_of = jax.eval_shape(make, seed)
  own_specs = tuple({axes: stacked_over(axes, inside) for axes in x} for x in parts_of)
  mapped = jax.shard_map(
    local,
    in_specs=PartitionSpec(),
    out_specs=(dict.fromkeys(firsts, jax.tree.unflatten(treedef, specs)), own_specs),
    axis_names=set(inside),
    check_vma=not on_mesh,
  )
  return jax.jit(mapped)(seed)


def make_own(
  make: Callable[[Any], Any],
  tree: Any,
  axis_name: AxisName,
  unknown: str,
  in_specs: Any = PartitionSpec(),  # noqa: B008 - it is constant
) -> Any:
  """Calls ``make(tree)`` in the map, or on the mesh for global arrays."""
  names = axis_names(axis_name)
  workers, is_bound = count(studied_axes(names) or names)
  if is_bound:
    return make(tree)
  if workers is None:
    raise UnboundAxisError(
      f"`axis_name` must be an axis that init can count, and {axis_name!r} is not "
      f"bound here: it is unknown {unknown}; call optimizer.init under "
      "jax.set_mesh(mesh), or inside the map; where a program copies one state to its "
      "workers, give it gradcomp.wrappers.replicable("
      f"optimizer, axis_name={axis_name!r}, workers=N).",
      axis_name,
    )
  inside = (*names, *sorted(axes_in(in_specs).difference(names)))
  given: Any = {"in_specs": (in_specs,), "axis_names": {*inside}, "check_vma": False}
  return made_on_mesh(make, tree, functools.partial(jax.shard_map, **given), inside)


def first_estimate(params: Any, axis_name: AxisName | None) -> Any:
  """Creates zeros like the parameters, of at least one axis, equal on all workers."""
  zeros = lambda x: jnp.zeros_like(x, jnp.float32).reshape(jnp.shape(x) or (1,))
  own = set() if axis_name is None else axis_names(axis_name)
  others = lambda x: tuple(sorted(types.varying_axes(x).difference(own)))
  return jax.tree.map(lambda x: types.mark_varying(zeros(x), others(x)), params)


def _part(leaf: Any, spec: PartitionSpec, mesh: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape of one device's shard of a leaf."""
  shape = shard_shape(getattr(leaf, "shape", ()), spec, mesh)
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def check_own(
  name: str, tree: Any, updates: Any, axis_name: AxisName | None, workers: int
) -> None:
  """Raises ValueError for a worker's own tree that is not like its gradient."""

  def check(path: Any, update: jax.Array, leaf: jax.Array) -> None:
    shape = update.shape or (1,)
    if leaf.shape == shape:
      return
    count = stacked_for(leaf.shape, shape, workers)
    made = f": as if made for {count} worker{'s' * (count != 1)}, not for {workers}"
    raise ValueError(
      f"`state.{name}`{jax.tree_util.keystr(path)} must have the shape of its "
      f"gradient, {shape} here, got {leaf.shape}{made if count else ''}; inside a "
      "map, pass the state through with gradcomp.state_specs, and make it by "
      "optimizer.init inside the map or under jax.set_mesh(mesh)."
      f"{_parts(shape, leaf.shape, axis_name)}"
      f"{see('must-have-the-shape-of-its-gradient')}"
    )

  if tree is not None:
    jax.tree_util.tree_map_with_path(check, updates, tree)


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
