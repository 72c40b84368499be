"""Reads Explicit axes from the types of arrays, and enters maps that follow from them.

Under Explicit axes the type of an array says how it is sharded, and over which axes it
is ``unreduced``: each device holds an addend, and nothing has been communicated. Code
that works on the part of one device then enters a ``jax.shard_map`` by itself.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from gradcomp import _axes
from gradcomp._axes import AxisName
from gradcomp._closures import with_arrays
from gradcomp.exchange import pmean


def typed_spec(x: Any) -> PartitionSpec:
  """Returns the spec in the type of an array, which has Explicit axes alone."""
  return jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else PartitionSpec()


def placed_spec(x: Any) -> PartitionSpec:
  """Returns the spec of an array; if it is concrete, also over Auto axes."""
  if isinstance(x, jax.core.Tracer):
    return typed_spec(x)
  sharding = getattr(x, "sharding", None)
  return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def sharded(spec: PartitionSpec) -> frozenset[str]:
  """Returns the axes that a spec cuts an array over."""
  entries = [() if entry is None else entry for entry in _entries(spec)]
  return frozenset(
    name
    for entry in entries
    for name in ((entry,) if isinstance(entry, str) else entry)
  )


def is_spec(x: Any) -> bool:
  """Returns True for a PartitionSpec, which is a tuple to some versions of JAX.

  It is meant for ``is_leaf``.
  """
  return isinstance(x, PartitionSpec)


def reduced(spec: PartitionSpec) -> PartitionSpec:
  """Returns the spec of an array once it is no longer unreduced."""
  return PartitionSpec(*_entries(spec))


def stacked(axis_name: AxisName, spec: PartitionSpec) -> PartitionSpec:
  """Returns the spec of workers' arrays of this spec, stacked on their first axis."""
  first, *rest = _entries(spec) or (None,)
  first = () if first is None else (first,) if isinstance(first, str) else first
  names = (*_axes.names(axis_name), *first)
  return PartitionSpec(names if len(names) > 1 else names[0], *rest)


def stacked_over(axes: Sequence[str], inside: Collection[str]) -> PartitionSpec:
  """Returns the spec of arrays stacked over those axes that a map makes manual."""
  names = tuple(name for name in axes if name in inside)
  return PartitionSpec(names if len(names) > 1 else names[0] if names else None)


def _entries(spec: PartitionSpec) -> tuple[Any, ...]:
  return tuple(spec.partitions if hasattr(spec, "partitions") else spec)


def unreduced_axes(x: Any) -> frozenset[str]:
  """Returns the Explicit axes over which an array is still a sum of addends."""
  return frozenset(typed_spec(x).unreduced)


def check_stacked(residual: Any, updates: Any, axis_name: AxisName | None) -> None:
  """Raises ValueError for residuals that every device would take for its own."""
  if mesh_of(updates).size == 1:
    return
  for path, leaf in jax.tree_util.tree_leaves_with_path(residual):
    names = () if axis_name is None else _axes.names(axis_name)
    if not sharded(typed_spec(leaf)).issuperset(names):
      raise ValueError(
        f"`state.residual`{jax.tree_util.keystr(path)} must stack the parts of all "
        f"workers of {axis_name!r}, but its type says {jax.typeof(leaf)}; give "
        "axis_name= and make the state by optimizer.init under jax.set_mesh(mesh)."
      )


def mesh_of(tree: Any) -> AbstractMesh:
  """Returns the mesh in the types of a tree's arrays.

  If no array has one, it is the mesh of ``jax.set_mesh``.
  """
  for leaf in jax.tree.leaves(tree):
    mesh = jax.typeof(leaf).sharding.mesh if isinstance(leaf, jax.Array) else None
    if mesh is not None and not mesh.empty:
      return mesh
  return jax.sharding.get_abstract_mesh()


def is_explicit(mesh: AbstractMesh, axis_name: AxisName) -> bool:
  """Returns True if the mesh has the axes, and all of them are Explicit."""
  types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  names = _axes.names(axis_name)
  return all(types.get(name) == AxisType.Explicit for name in names)


def other_axes(x: Any, axis_name: AxisName | None) -> tuple[str, ...]:
  """Returns the axes beside the data axis over which an array differs, by its type."""
  own = () if axis_name is None else _axes.names(axis_name)
  found = sharded(typed_spec(x))
  if isinstance(x, jax.Array):
    found |= _axes.varying(x)
  return tuple(sorted(found.difference(own)))


def per_device(
  function: Callable[[Any, Any], Any],
  updates: Any,
  state: Any,
  axis_name: AxisName | None,
  *,
  keeps_addends: bool,
) -> tuple[Any, Any]:
  """Calls ``function(updates, state)`` on each device's parts.

  It enters a map if the types need one.

  Args:
    function: returns ``(updates, state)`` like its arguments.
    updates: gradients, perhaps unreduced or sharded over Explicit axes.
    state: arrays.
    axis_name: the axes to reduce over, which the map binds if none has; or None.
    keeps_addends: whether the updates that ``function`` returns are as unreduced as
      those that it takes.
  """
  if _axes.is_followed():
    return updates, state
  specs = jax.tree.map(typed_spec, updates)
  leaves = jax.tree.leaves(specs, is_leaf=is_spec)
  cut = frozenset().union(*map(sharded, leaves))
  addends = axis_name is not None and _axes.bound_size(axis_name) is None
  if not addends and not cut:
    return function(updates, state)
  state_specs = jax.tree.map(typed_spec, state)
  out = specs if keeps_addends else _map_specs(reduced, specs)
  mesh = mesh_of(updates)
  outside = not _axes.manual_axes()
  # JAX 0.10 takes unreduced arrays only if all axes are manual.
  manual = set(mesh.axis_names) if addends else set(cut)
  if axis_name is not None and addends and mesh.auto_axes and not keeps_addends:
    # But then the devices along an Auto axis would all do, and send, the same.
    manual -= set(mesh.auto_axes)
    updates = _stack(updates, mesh, specs, axis_name)
    specs = _map_specs(lambda spec: _on_top(spec, axis_name), specs)
    function = _of_rows(function)
  mapped = jax.shard_map(
    function,
    mesh=mesh if outside else None,
    in_specs=(specs, state_specs),
    out_specs=(out, state_specs),
    axis_names=manual,
    # JAX allows an unreduced argument only if types are not checked.
    check_vma=not outside and _checks_types(updates),
  )
  return mapped(updates, state)


def _stack(tree: Any, mesh: AbstractMesh, specs: Any, axis_name: AxisName) -> Any:
  """Returns unreduced arrays as their addends, stacked ``[N, ...]`` over the axis."""
  return jax.shard_map(
    lambda tree: jax.tree.map(lambda x: x[None], tree),
    mesh=mesh,
    in_specs=(specs,),
    out_specs=_map_specs(lambda spec: _on_top(spec, axis_name), specs),
    check_vma=False,
  )(tree)


def _on_top(spec: PartitionSpec, axis_name: AxisName) -> PartitionSpec:
  return PartitionSpec(axis_name, *_entries(spec))


def _of_rows(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
  """Returns the function of the one row that a device has of stacked updates."""
  return lambda rows, state: function(jax.tree.map(lambda x: x[0], rows), state)


def map_addends(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
  """Applies a linear function to an array, or to each device's addend of it.

  It may add or drop last axes, which nothing cuts.
  """
  spec = typed_spec(x)
  if not spec.unreduced:
    return function(x)
  rank = jax.eval_shape(function, jax.ShapeDtypeStruct(x.shape, x.dtype)).ndim
  return jax.shard_map(
    function,
    mesh=None if _axes.manual_axes() else mesh_of(x),
    in_specs=spec,
    out_specs=PartitionSpec(*_entries(spec)[:rank], unreduced=spec.unreduced),
    check_vma=False,
  )(x)


def _map_specs(function: Callable[[PartitionSpec], Any], specs: Any) -> Any:
  return jax.tree.map(function, specs, is_leaf=is_spec)


def _checks_types(tree: Any) -> bool:
  """Returns True if the enclosing map tracks what varies."""
  return any(_axes.varying(leaf) for leaf in jax.tree.leaves(tree))


def addends(
  loss_fn: Callable[..., Any],
  gradients_of: Callable[..., Callable[..., tuple[Any, Any]]],
  axis_name: AxisName,
  *args: Any,
  **kwargs: Any,
) -> tuple[Any, Any]:
  """Runs ``gradients_of(loss_fn)(*args, **kwargs)`` on each worker's arguments.

  Arrays of the mesh that the loss closes over become arguments.

  Args:
    loss_fn: returns the worker's loss.
    gradients_of: makes of it a function that returns the value and the gradients.
    axis_name: the axes over which arguments are cut, as their types say.
    *args: arrays, and anything else as it is.
    **kwargs: arrays, and anything else as it is.

  Returns:
    The mean of the values, and the gradients divided by N, unreduced over the axes.
  """
  leaves, treedef = jax.tree.flatten((args, kwargs))
  given = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
  names = _axes.names(axis_name)

  def enter(bind: Callable[[Sequence[Any]], Any], closed_over: list[Any]) -> Any:
    arrays = [*given, *closed_over]

    def local(*arrays: jax.Array) -> tuple[Any, Any]:
      parts = iter(arrays)
      own = [next(parts) if isinstance(x, jax.Array) else x for x in leaves]
      args, kwargs = jax.tree.unflatten(treedef, own)
      value, grads = gradients_of(bind(tuple(parts)))(*args, **kwargs)
      share = 1 / _axes.require_size(axis_name)
      grads = jax.tree.map(lambda g: (g * share)[None], grads)
      return pmean(value, axis_name), grads

    return jax.shard_map(
      local,
      mesh=mesh_of(arrays),
      in_specs=tuple(restricted(typed_spec(x), names) for x in arrays),
      out_specs=(PartitionSpec(), PartitionSpec(axis_name)),
      axis_names=set(names),
      check_vma=False,
    )(*arrays)

  value, stack = with_arrays(loss_fn, enter)
  return value, unreduce(stack, axis_name)


def restricted(spec: PartitionSpec, names: tuple[str, ...]) -> PartitionSpec:
  """Returns a spec without other axes than these."""

  def kept(entry: Any) -> Any:
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    own = tuple(name for name in axes if name in names)
    return own if len(own) > 1 else own[0] if own else None

  return PartitionSpec(*map(kept, _entries(spec)))


def mark_reduced(tree: Any, axis_name: AxisName) -> Any:
  """Types arrays so that gradients with respect to them are unreduced over the axes."""
  names = set(_axes.names(axis_name))

  def mark(x: jax.Array) -> jax.Array:
    spec = PartitionSpec(*_entries(typed_spec(x)), reduced=names)
    return jax.reshard(x, NamedSharding(mesh_of(x), spec))

  return jax.tree.map(mark, tree)


def unreduce(tree: Any, axis_name: AxisName) -> Any:
  """Turns workers' addends, stacked ``[N, ...]`` over the axis, into unreduced ones."""
  mesh = mesh_of(tree)
  names = set(_axes.names(axis_name))
  if mesh.size == 1:  # JAX has no unreduced arrays on one device
    return jax.tree.map(lambda x: x[0], tree)

  def spec(x: jax.Array) -> PartitionSpec:
    return PartitionSpec(*_entries(typed_spec(x))[1:], unreduced=names)

  return jax.shard_map(
    lambda tree: jax.tree.map(lambda x: x[0], tree),
    mesh=mesh,
    in_specs=(jax.tree.map(typed_spec, tree),),
    out_specs=jax.tree.map(spec, tree),
    check_vma=False,
  )(tree)
