"""Updates of gradients that are marked as all workers' together, under Auto axes."""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from gradcomp._src.core.specs import check_stacked, state_specs
from gradcomp._src.core.state import is_rows, is_state, with_measures
from gradcomp._src.mesh.axes import (
  Axes,
  AxisName,
  automatic_axes,
  axis_names,
  manual_axes,
)
from gradcomp._src.mesh.closures import arrays_of
from gradcomp._src.mesh.per_worker import marked, of_all, unmarked
from gradcomp._src.mesh.placed import PLACED, by_leaf, shards_of
from gradcomp._src.mesh.specs import axes_in, is_spec, restrict_spec, rows_spec
from gradcomp._src.mesh.types import mesh_of

Update = Callable[..., tuple[Any, Any]]


def of_workers(
  update: Update,
  axis_name: AxisName | None,
  *,
  keeps_rows: bool = False,
  whole: bool = False,
) -> Update:
  """Wraps ``update``: it takes trees of :class:`PerWorker`, too, in a map.

  With ``keeps_rows`` it then returns such updates. With ``whole`` it sees whole leaves,
  as optimizers that take norms must, and the exchanges in it see shards.
  """

  def mapped(
    updates: Any, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[Any, Any]:
    if not whole and in_shards(updates, state):
      return _on_shards(update, updates, state, params, extra_args)
    if not of_all(updates):
      return update(updates, state, params, **extra_args)
    tree, placed_as, axes = unmarked(updates)
    _check_axes(axes, axis_name)
    arrays, with_arrays = arrays_of(extra_args)
    mesh, names = mesh_of(updates), axis_names(axes)
    workers = math.prod(mesh.shape[name] for name in names)

    _check_rows(tree, workers)
    own_shape = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    shapes, specs = jax.tree.map(own_shape, tree), placed_as
    placed = PLACED.value
    if whole:
      placed = by_leaf(shapes, jax.tree.leaves(specs, is_leaf=is_spec))
      specs = jax.tree.map(lambda _: P(), specs, is_leaf=is_spec)

    def local(rows: Any, state: Any, params: Any, arrays: Any) -> tuple[Any, Any]:
      own = jax.tree.map(lambda x: x[0], rows)
      with PLACED(placed):
        new, state = update(own, state, params, **with_arrays(arrays))
      return (jax.tree.map(lambda x: x[None], new) if keeps_rows else new), state

    on_top = functools.partial(rows_spec, axes)
    stacked = jax.tree.map(on_top, specs, is_leaf=is_spec)
    others = axes_in(specs)
    own = state_specs(state, axis_name=axes, param_specs=specs if others else None)
    of_axes = lambda spec: restrict_spec(spec, names)
    check_stacked(state, jax.tree.map(of_axes, own, is_leaf=is_spec), shapes, workers)
    new, state = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(stacked, own, None if params is None else specs, P()),
      out_specs=(stacked if keeps_rows else specs, own),
      # Over axes that shard nothing each device still sends a part of the words.
      axis_names=set(names).union(others),
    )(tree, state, params, arrays)
    return (marked(new, axes, placed_as) if keeps_rows else new), state

  return mapped


def in_shards(updates: Any, state: Any) -> bool:
  """Returns True in a train step that has the shards of gradients, and their state."""
  specs = shards_of(updates)
  return specs is not None and not _made_whole(state, automatic_axes())


def _on_shards(
  update: Update, updates: Any, state: Any, params: Any, extra_args: Any
) -> tuple[Any, Any]:
  """Calls ``update`` on the shards of a train step, in a map over their Auto axes."""
  specs, others = shards_of(updates), automatic_axes()
  # The map around this one has cut the state over the axes of the workers.
  inside = lambda spec: restrict_spec(spec, others)
  own = state_specs(state, axis_name=manual_axes(), param_specs=specs)
  own = jax.tree.map(inside, own, is_leaf=is_spec)
  arrays, with_arrays = arrays_of(extra_args)

  def local(updates: Any, state: Any, params: Any, arrays: Any) -> tuple[Any, Any]:
    return update(updates, state, params, **with_arrays(arrays))

  return jax.shard_map(
    local,
    in_specs=(specs, own, None if params is None else specs, P()),
    out_specs=(specs, own),
    axis_names=set(others),
  )(updates, state, params, arrays)


def _made_whole(state: Any, others: Collection[str]) -> bool:
  """Returns True for a state with rows of whole leaves, as ``optimizer.init`` has."""
  is_node = lambda x: is_state(x) or is_rows(x)
  keys: set[Axes] = set()
  for x in jax.tree.leaves(state, is_leaf=is_node):
    if is_state(x):
      kept = with_measures(x, None).memory or ()
      keys.update(*filter(None, (x.server_residual, *kept)))
    elif is_rows(x):
      keys.update(x.arrays)
  return bool(keys) and not any(set(axes).intersection(others) for axes in keys)


def _check_axes(axes: AxisName, axis_name: AxisName | None) -> None:
  """Raises ValueError for gradients of workers of other axes."""
  if axis_name is None or axis_names(axis_name) != axis_names(axes):
    raise ValueError(
      f"`axis_name` must name the axes of the gradients, {axes!r}, as "
      f"gradcomp.value_and_grad was given them, got {axis_name!r}."
    )


def _check_rows(tree: Any, workers: int) -> None:
  """Raises ValueError unless each array has a row for each worker."""
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    if x.shape[:1] != (workers,):
      raise ValueError(
        f"`updates`{jax.tree_util.keystr(path)} must stack the gradients of {workers} "
        f"workers on a first axis, got the shape {x.shape}; take what "
        "gradcomp.value_and_grad returns."
      )
