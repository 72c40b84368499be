"""The border: gradients as users have them become a worker's own, and means go back.

They come typed as addends, marked as those of all workers under Auto axes, as shards of
a train step, or as one worker's own in a map of the user's; in boxes, with leaves that
are not trained, and complex.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from gradcomp._src.core import state as states
from gradcomp._src.core.first_state import check_residual_types
from gradcomp._src.core.inputs import like_complex, pairs, update_dtypes
from gradcomp._src.core.specs import check_stacked, state_specs
from gradcomp._src.mesh import param_specs, trees, types
from gradcomp._src.mesh.axes import (
  Axes,
  AxisName,
  automatic_axes,
  axis_names,
  manual_axes,
)
from gradcomp._src.mesh.closures import arrays_of
from gradcomp._src.mesh.per_worker import marked, of_all, unmarked
from gradcomp._src.mesh.place import place
from gradcomp._src.mesh.shard_maps import per_device
from gradcomp._src.mesh.specs import axes_in, entries, is_spec, restrict_spec

Update = Callable[..., tuple[Any, Any]]


def on_workers(  # noqa: PLR0913 - facts of a core, by keyword
  init: Callable[[Any], Any],
  core: Update,
  axis_name: AxisName | None,
  *,
  keeps: bool = False,
  local: bool = False,
  reads: bool = False,
  real: bool = True,
  whole: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Makes a transformation of a core that sees one worker's real arrays, in each place.

  It is ``core(across, grads, state)``, also of ``params, extra_args`` if it ``reads``
  them. With ``keeps`` it returns each worker's own; ``local`` cores send nothing. It
  sees complex arrays as pairs if ``real``, and for ``whole`` see :func:`of_workers`.
  """

  def own(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    averaged = None if keeps else params
    reals = _in_pairs(grads) if real else grads
    across = place(reals, axis_name, params=averaged, local=local)
    if across.is_sum:
      for x in states.states_in(state):
        check_residual_types(x.residual, reals, across.axes)
    dtypes = update_dtypes(reals, averaged if across.is_sum else None)
    step = functools.partial(core, across._replace(dtypes=dtypes))
    given = (params, extra_args) if reads else ()
    kept: Any = {"keeps_addends": keeps, "given": given}
    new, state = per_device(step, reals, state, across.axes, **kept)
    return (jax.tree.map(like_complex, new, grads) if real else new), state

  return any_tree(init, own, of_workers(own, axis_name, keeps_rows=keeps, whole=whole))


def any_tree(
  init_fn: Callable[[Any], Any], update_fn: Update, mapped: Update | None = None
) -> optax.GradientTransformationExtraArgs:
  """Wraps functions of arrays of floats so that they take trees as libraries have them.

  Parameters that are not trained reach them as None, as in the gradients. ``update``
  sees the array of each box, and returns the boxes that it was given. ``mapped`` takes
  gradients that need a map over workers.
  """

  def init(params: Any) -> Any:
    params = trees.trainable(params)
    with types.under_mesh_of(params):
      return init_fn(params)

  def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    given = [*map(trees.unboxed, (updates, state, trees.trainable(params)))]
    # No call of `mapped` elsewhere, so that a kernel is not deeper below an update.
    call = update_fn
    if mapped and (of_all(given[0]) or step_shards(*given[:2]) is not None):
      call = mapped
    new, kept = call(*given, **extra_args)
    return trees.boxed_like(updates, new), trees.boxed_like(state, kept)

  return optax.GradientTransformationExtraArgs(init, update)


def _in_pairs(grads: Any) -> Any:
  """Returns :func:`pairs` of gradients; TypeError for leaves that are no floats."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    name = f"`updates`{jax.tree_util.keystr(path)}"
    if not hasattr(leaf, "dtype"):
      raise TypeError(f"{name} must be an array, got {leaf!r}; use jnp.asarray.")
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      raise TypeError(
        f"{name} must have a real or complex float dtype, got {leaf.dtype}."
      )
  return jax.tree.map(pairs, grads)


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
    tree, axes, placed = updates, None, param_specs.PLACED.value
    if of_all(updates):
      tree, placed_as, axes = unmarked(updates)
      workers = _check_rows(tree, axes, axis_name, types.mesh_of(updates))
      shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
      specs = placed_as
      if whole:
        placed = param_specs.by_leaf(shapes, jax.tree.leaves(specs, is_leaf=is_spec))
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
      places = each(lambda spec: P(axes, *entries(spec)), specs)
    arrays, with_arrays = arrays_of(extra_args)

    def local(grads: Any, state: Any, params: Any, arrays: Any) -> tuple[Any, Any]:
      grads = jax.tree.map(lambda x: x[0], grads) if axes else grads
      with param_specs.PLACED(placed):
        new, state = update(grads, state, params, **with_arrays(arrays))
      return (jax.tree.map(lambda x: x[None], new) if keeps else new), state

    new, state = jax.shard_map(
      local,
      mesh=None if axes is None else types.mesh_of(updates),
      in_specs=(places, own, None if params is None else specs, P()),
      out_specs=(places if keeps else specs, own),
      axis_names=set(names),
    )(tree, state, params, arrays)
    return (marked(new, axes, placed_as) if axes and keeps else new), state

  return mapped


def step_shards(updates: Any, state: Any) -> Any:
  """Returns the specs of a step's gradients if the state has shards, else None."""
  specs, others = param_specs.shards_of(updates), automatic_axes()
  if specs is None:
    return None
  is_node = lambda x: states.is_state(x) or states.is_rows(x)
  keys: set[Axes] = set()
  for x in jax.tree.leaves(state, is_leaf=is_node):
    if states.is_state(x):
      keys.update(*filter(None, (x.server_residual, *(x.memory or ()))))
    elif states.is_rows(x):
      keys.update(x.arrays)
  # ``optimizer.init`` makes rows of whole leaves.
  made_whole = keys and not any(set(axes).intersection(others) for axes in keys)
  return None if made_whole else specs


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
