"""Maps over devices, entered where the types of arrays require one.

Code for one device's shard enters a ``jax.shard_map`` by itself where an array is
typed as sharded, or unreduced, over Explicit axes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradcomp._src.mesh.axes import (
  AxisName,
  axis_names,
  bound_size,
  manual_axes,
)
from gradcomp._src.mesh.closures import arrays_of
from gradcomp._src.mesh.specs import (
  entries,
  is_spec,
  on_top,
  reduced_spec,
  sharded_axes,
)
from gradcomp._src.mesh.study import is_followed
from gradcomp._src.mesh.types import mesh_of, typed_spec, varying_axes


def per_device(
  function: Callable[..., tuple[Any, Any]],
  updates: Any,
  state: Any,
  axis_name: AxisName | None,
  *,
  keeps_addends: bool,
  given: tuple[Any, ...] = (),
) -> tuple[Any, Any]:
  """Calls ``function(updates, state, *given)`` on each device's shards.

  ``jax.vmap`` around it goes into that map. Gradients may be unreduced, or sharded over
  Explicit axes. The map binds ``axis_name``, the axes to reduce over, if no other does.
  With ``keeps_addends`` results are as unreduced as ``updates``. ``given`` are trees,
  of arrays and of others, that are only read.
  """
  if is_followed():
    return updates, state
  cut = frozenset().union(*map(sharded_axes, map(typed_spec, jax.tree.leaves(updates))))
  addends = axis_name is not None and bound_size(axis_name) is None
  if not addends and not cut:
    return function(updates, state, *given)
  arrays, with_arrays = arrays_of(given)
  over = _Over(axis_name, cut, addends, keeps_addends)

  def on_device(updates: Any, state: Any, arrays: list[Any]) -> tuple[Any, Any]:
    return function(updates, state, *with_arrays(arrays))

  def whole(updates: Any, state: Any, arrays: list[Any]) -> tuple[Any, Any]:
    return _mapped(on_device, updates, state, arrays, over)

  if not addends:
    return whole(updates, state, arrays)

  def of_each(size: int, is_batched: Any, *args: Any) -> Any:
    ahead = lambda x, known: x if known else _ahead(x, size)
    updates, state, arrays = jax.tree.map(ahead, args, tuple(is_batched))
    result = per_device(
      jax.vmap(on_device),
      updates,
      state,
      axis_name,
      keeps_addends=keeps_addends,
      given=(arrays,),
    )
    return result, jax.tree.map(lambda _: True, result)

  return _with_rule(whole, of_each)(updates, state, arrays)


class _Over(NamedTuple):
  """The axes of a map: of the workers, of the shards, and of its addends."""

  axis_name: AxisName | None
  cut: frozenset[str]
  addends: bool
  keeps_addends: bool


def _mapped(
  function: Callable[..., tuple[Any, Any]],
  updates: Any,
  state: Any,
  arrays: list[Any],
  over: _Over,
) -> tuple[Any, Any]:
  """Calls ``function(updates, state, arrays)`` in a map over the axes of the types."""
  specs, state_specs, array_specs = jax.tree.map(typed_spec, (updates, state, arrays))
  out = specs if over.keeps_addends else _map_specs(reduced_spec, specs)
  mesh = mesh_of(updates)
  outside = not manual_axes()
  # JAX 0.10 takes unreduced arrays only if all axes are manual.
  manual = set(mesh.axis_names) if over.addends else set(over.cut)
  name = over.axis_name
  if name is not None and over.addends and mesh.auto_axes and not over.keeps_addends:
    # But then all devices along an Auto axis would compute and send equal arrays.
    manual -= set(mesh.auto_axes)
    stacked = _map_specs(lambda spec: on_top(name, spec), specs)
    add_axis = lambda tree: jax.tree.map(lambda x: x[None], tree)
    updates = jax.shard_map(
      add_axis, mesh=mesh, in_specs=(specs,), out_specs=stacked, check_vma=False
    )(updates)
    specs, of_worker = stacked, function
    function = lambda rows, *args: of_worker(jax.tree.map(lambda x: x[0], rows), *args)
  return jax.shard_map(
    function,
    mesh=mesh if outside else None,
    in_specs=(specs, state_specs, array_specs),
    out_specs=(out, state_specs),
    axis_names=manual,
    # JAX allows an unreduced argument only if types are not checked.
    check_vma=not outside and any(map(varying_axes, jax.tree.leaves(updates))),
  )(updates, state, arrays)


def map_addends(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
  """Applies a linear function to an array, or to each device's addend of it.

  It may add or drop last axes that are not sharded.
  """
  spec = typed_spec(x)
  if not spec.unreduced:
    return function(x)
  rank = jax.eval_shape(function, jax.ShapeDtypeStruct(x.shape, x.dtype)).ndim
  mapped = jax.shard_map(
    function,
    mesh=None if manual_axes() else mesh_of(x),
    in_specs=spec,
    out_specs=PartitionSpec(*entries(spec)[:rank], unreduced=spec.unreduced),
    check_vma=False,
  )
  of_each = lambda size, is_batched, x: (map_addends(jax.vmap(function), x), True)
  return _linear(mapped, of_each)(x)


def unreduce(tree: Any, axis_name: AxisName) -> Any:
  """Turns workers' addends, stacked ``[N, ...]`` over the axis, into unreduced ones."""
  mesh = mesh_of(tree)
  names = set(axis_names(axis_name))
  if mesh.size == 1:  # JAX has no unreduced arrays on one device
    return jax.tree.map(lambda x: x[0], tree)

  def drop(at: int, tree: Any) -> Any:
    def spec(x: jax.Array) -> PartitionSpec:
      found = [*entries(typed_spec(x))]
      del found[at : at + 1]
      return PartitionSpec(*found, unreduced=names)

    return jax.shard_map(
      lambda tree: jax.tree.map(lambda x: jnp.squeeze(x, at), tree),
      mesh=mesh,
      in_specs=(jax.tree.map(typed_spec, tree),),
      out_specs=jax.tree.map(spec, tree),
      check_vma=False,
    )(tree)

  def of_each(size: int, is_batched: Any, tree: Any) -> Any:
    ahead = lambda x, known: x if known else _ahead(x, size)
    result = drop(1, jax.tree.map(ahead, tree, is_batched[0]))
    return result, jax.tree.map(lambda _: True, result)

  return _linear(functools.partial(drop, 0), of_each)(tree)


def _with_rule(function: Callable[..., Any], rule: Callable[..., Any]) -> Any:
  """Returns a function with its own rule for ``jax.vmap``."""
  # JAX 0.10 to 0.12 has no rule for maps with unreduced arrays.
  result = jax.custom_batching.custom_vmap(function)
  result.def_vmap(rule)
  return result


def _linear(function: Callable[[Any], Any], rule: Callable[..., Any]) -> Any:
  """Returns a linear function with such a rule, which JAX may differentiate."""
  result = jax.custom_jvp(_with_rule(function, rule))
  result.defjvp(lambda primals, tangents: (result(*primals), function(*tangents)))
  return result


def _ahead(x: jax.Array, size: int) -> jax.Array:
  """Broadcasts an array along a new first axis, with any sharding."""
  spec = typed_spec(x)
  return jax.shard_map(
    lambda x: jnp.broadcast_to(x, (size, *x.shape)),
    mesh=mesh_of(x),
    in_specs=spec,
    out_specs=PartitionSpec(None, *entries(spec), unreduced=spec.unreduced),
    check_vma=False,
  )(x)


def _map_specs(function: Callable[[PartitionSpec], Any], specs: Any) -> Any:
  return jax.tree.map(function, specs, is_leaf=is_spec)
