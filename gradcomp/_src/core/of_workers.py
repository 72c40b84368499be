"""Updates of gradients that are marked as all workers' together, under Auto axes."""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import AbstractMesh
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
from gradcomp._src.mesh.param_specs import PLACED, by_leaf, shards_of
from gradcomp._src.mesh.per_worker import marked, of_all, unmarked
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
    tree, axes, placed = updates, None, PLACED.value
    if of_all(updates):
      tree, placed_as, axes = unmarked(updates)
      workers = _check_rows(tree, axes, axis_name, mesh_of(updates))
      shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
      specs = placed_as
      if whole:
        placed = by_leaf(shapes, jax.tree.leaves(specs, is_leaf=is_spec))
        specs = jax.tree.map(lambda _: P(), specs, is_leaf=is_spec)
      # Over axes that shard nothing each device still sends a part of the words.
      names = axes_in(specs).union(axis_names(axes))
    elif not whole and (specs := step_shards(updates, state)) is not None:
      # The map around this one has cut the state over the axes of the workers.
      names = frozenset(automatic_axes())
    else:
      return update(updates, state, params, **extra_args)

    each = functools.partial(jax.tree.map, is_leaf=is_spec)
    cut = specs if axes_in(specs) else None
    own = state_specs(state, axis_name=axes or manual_axes(), param_specs=cut)
    own = each(lambda spec: restrict_spec(spec, names), own)
    places, keeps = specs, keeps_rows and axes is not None
    if axes is not None:
      of_axes = lambda spec: restrict_spec(spec, axis_names(axes))
      check_stacked(state, each(of_axes, own), shapes, workers)
      places = each(functools.partial(rows_spec, axes), specs)
    arrays, with_arrays = arrays_of(extra_args)

    def local(grads: Any, state: Any, params: Any, arrays: Any) -> tuple[Any, Any]:
      grads = jax.tree.map(lambda x: x[0], grads) if axes else grads
      with PLACED(placed):
        new, state = update(grads, state, params, **with_arrays(arrays))
      return (jax.tree.map(lambda x: x[None], new) if keeps else new), state

    new, state = jax.shard_map(
      local,
      mesh=None if axes is None else mesh_of(updates),
      in_specs=(places, own, None if params is None else specs, P()),
      out_specs=(places if keeps else specs, own),
      axis_names=set(names),
    )(tree, state, params, arrays)
    return (marked(new, axes, placed_as) if axes and keeps else new), state

  return mapped


def step_shards(updates: Any, state: Any) -> Any:
  """Returns the specs of a step's gradients if the state has shards, else None."""
  specs = shards_of(updates)
  whole = specs is None or _made_whole(state, automatic_axes())
  return None if whole else specs


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


def _check_rows(
  rows: Any, axes: AxisName, axis_name: AxisName | None, mesh: AbstractMesh
) -> int:
  """Returns the number of workers; ValueError for rows of others."""
  if axis_name is None or axis_names(axis_name) != axis_names(axes):
    raise ValueError(
      f"`axis_name` must name the axes of the gradients, {axes!r}, as "
      f"gradcomp.value_and_grad was given them, got {axis_name!r}."
    )
  workers = math.prod(mesh.shape[name] for name in axis_names(axes))
  for path, x in jax.tree_util.tree_leaves_with_path(rows):
    if x.shape[:1] != (workers,):
      raise ValueError(
        f"`updates`{jax.tree_util.keystr(path)} must stack the gradients of {workers} "
        f"workers on a first axis, got the shape {x.shape}; take what "
        "gradcomp.value_and_grad returns."
      )
  return workers
