"""The border: turns gradients as users have them into a worker's own, and means back.

They come typed as addends, marked as those of all workers under Auto axes, as shards of
a train step, or as one worker's own; in boxes, with untrained leaves, and complex.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from gradcomp._src.core import state as states
from gradcomp._src.core.specs import check_stacked, state_specs
from gradcomp._src.floats.dtypes import addend_dtype
from gradcomp._src.mesh import axes as mesh_axes
from gradcomp._src.mesh import shard_maps, trees, types
from gradcomp._src.mesh.axes import (
  AxisName,
  axes_in,
  axis_names,
  is_spec,
)


def on_workers(  # noqa: PLR0913 - facts of a core, by keyword
  init: Callable[[Any], Any],
  core: shard_maps.Update,
  axis_name: AxisName | None,
  *,
  keeps: bool = False,
  local: bool = False,
  reads: bool = False,
  whole: bool = False,
  enters: bool = True,
  filled: Callable[..., Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Makes a transformation of a core that sees one worker's real arrays, in each place.

  It calls ``core(across, grads, state)``, with ``params, extra_args`` too if it
  ``reads`` them. With ``keeps`` it returns each worker's own; ``local`` cores send
  nothing. Complex arrays are pairs but for ``whole`` ones. Unless it ``enters`` their
  map, it sees addends as they are. For ``whole`` and ``filled`` see :func:`_in_map`.
  """

  def own(grads: Any, state: Any, params: Any, **extra_args: Any) -> Any:
    averaged = None if keeps else params
    reals = grads if whole else _in_pairs(grads)
    across = types.place(reals, axis_name, params=averaged, local=local)
    if across.is_sum and across.axes:
      mesh, names = types.mesh_of(reals), axis_names(across.axes)
      state = filled(state, mesh) if filled else state
      stored = [x.residual for x in states.states_in(state)] if mesh.size > 1 else []
      for path, leaf in jax.tree_util.tree_leaves_with_path(stored):
        if not types.sharded_over(leaf).issuperset(names):
          raise ValueError(
            f"`state.residual`{jax.tree_util.keystr(path[1:])} must stack the parts of "
            f"all workers of {across.axes!r}, got the type {jax.typeof(leaf)}; give "
            "axis_name= and make the state by optimizer.init under jax.set_mesh(mesh)."
          )

    # The parameter's, if addends are wider, because its dtype does not hold an Nth.
    def dtype_of(gradient: Any, param: Any) -> np.dtype:
      wide, narrow = map(jnp.result_type, (gradient, param))
      return narrow if wide == addend_dtype(narrow) else wide

    likes = averaged if across.is_sum and averaged is not None else reals
    dtypes = jax.tree.leaves(jax.tree.map(dtype_of, reals, likes))
    across = across._replace(dtypes=dtypes)
    given = (params, extra_args) if reads else ()
    sums = jax.tree.map(lambda x: bool(types.unreduced_axes(x)), given)

    def of_own(grads: Any, state: Any, *given: Any) -> Any:
      own = lambda x, is_sum: across.own(x) if is_sum else x
      return core(across, grads, state, *jax.tree.map(own, given, sums))

    step = of_own if reads and enters else functools.partial(core, across)
    if enters:
      step = shard_maps.per_device(step, reals, across, keeps=keeps)
    back = lambda new: new if whole else jax.tree.map(like_complex, new, grads)
    return step, (reals, state, *given), back

  maps: Any = {"keeps": keeps, "whole": whole, "filled": filled, "steps": True}
  return any_tree(init, own, {"axis_name": axis_name, **maps})


def any_tree(
  init_fn: Callable[[Any], Any],
  update_fn: Callable[..., Any],
  maps: dict[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Wraps functions of float arrays so that they take trees as libraries have them."""

  # Leaves that are not trained become None. `update` sees the array of each box, and
  # without `maps`, the options of _in_map, each PerWorker as it is. With their `steps`
  # it returns what to call, the arguments, and the way back for updates.
  def init(params: Any) -> Any:
    params = trees.trainable(params)
    with types.under_mesh_of(params):
      return init_fn(params)

  def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    # Another one, since walks of closures, like equinox's, follow no circles.
    inside = any_tree(init_fn, update_fn, maps).update
    if shard_maps.UNSEEN.value:
      return shard_maps.in_map(inside, updates, state, params, **extra_args)
    given = [*map(trees.unboxed, (updates, state, trees.trainable(params)))]
    call, back = functools.partial(update_fn, **extra_args), lambda new: new
    if maps and (found := entry(*given[:2], whole=maps.get("whole", False))):
      call = functools.partial(_in_map, inside, maps, found, **extra_args)
    elif maps and maps.get("steps"):  # a core is not deeper below an update
      call, given, back = call(*given)
    new, kept = call(*given)
    return trees.boxed_like(updates, back(new)), trees.boxed_like(state, kept)

  return optax.GradientTransformationExtraArgs(init, update)


def entry(updates: Any, state: Any, *, whole: bool = False) -> Any:
  """Returns gradients that need a map, their specs, and the axes; None for others."""
  if trees.of_all(updates):  # rows, which have the axes of the workers
    return *trees.unmarked(updates), ()
  # The map around this one has cut the state over the axes of the workers.
  specs, others = (None, ()) if whole else shard_maps.shards_of(updates)
  if specs is None:
    return None
  is_node = lambda x: states.is_state(x) or states.is_rows(x)
  keys: set[tuple[str, ...]] = set()
  for x in jax.tree.leaves(state, is_leaf=is_node):
    if states.is_state(x):
      keys.update(*filter(None, (x.server_residual, *(x.memory or ()))))
    elif states.is_rows(x):
      keys.update(x.arrays)
  # ``optimizer.init`` makes rows of whole leaves.
  made_whole = keys and not any(set(axes).intersection(others) for axes in keys)
  return None if made_whole else (updates, specs, None, others)


def on_device(updates: Any, state: Any) -> tuple[Any, Any, tuple[int, ...]]:
  """Returns the shapes that a device sees, their mesh, and the counts of addends."""
  mesh, unreduced = types.mesh_of(updates), types.unreduced_axes(updates)
  sizes = tuple(size for name, size in mesh.shape.items() if name in unreduced)
  typed = updates, jax.tree.map(types.typed_spec, updates), None, ()
  tree, specs, axes, _ = entry(updates, state) or typed

  def like(x: Any, spec: P) -> jax.ShapeDtypeStruct:
    shape = mesh_axes.shard_shape(jnp.shape(x)[axes is not None :], spec, mesh)
    return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

  return jax.tree.map(like, tree, specs), mesh, sizes


def _in_map(
  update: shard_maps.Update,
  maps: dict[str, Any],
  found: Any,
  updates: Any,
  state: Any,
  params: Any = None,
  **extra_args: Any,
) -> tuple[Any, Any]:
  """Calls ``update`` on one worker's gradients, or on one device's shards, in a map.

  ``maps`` has the ``axis_name``, Ellipsis for that of rows, and whether it ``keeps``
  rows. A ``whole`` one sees whole leaves, as optimizers that take norms must, and the
  exchanges in it see shards. ``filled`` makes a state for all workers of a mesh.
  """
  tree, specs, axes, names = found
  placed_as, placed, mesh = specs, shard_maps.PLACED.value, types.mesh_of(updates)
  if axes is not None:
    workers = _check_rows(tree, axes, maps["axis_name"], mesh)
    state = maps["filled"](state, mesh) if maps.get("filled") else state
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    if maps.get("whole"):
      placed = shard_maps.by_leaf(shapes, jax.tree.leaves(specs, is_leaf=is_spec))
      specs = jax.tree.map(lambda _: P(), specs, is_leaf=is_spec)
    # Over axes that shard nothing each device still sends a part of the words.
    names = axes_in(specs).union(axis_names(axes))
  each = functools.partial(jax.tree.map, is_leaf=is_spec)
  cut, manual = specs if axes_in(specs) else None, mesh_axes.manual_axes()
  stacked = state_specs(state, axis_name=axes or manual, param_specs=cut)
  own = each(lambda spec: mesh_axes.restrict_spec(spec, names), stacked)
  places, keeps = specs, maps.get("keeps") and axes is not None
  if axes is not None:
    of_axes = lambda spec: mesh_axes.restrict_spec(spec, axis_names(axes))
    check_stacked(state, each(of_axes, own), shapes, workers)
    places = each(lambda spec: P(axes, *mesh_axes.entries(spec)), specs)
  arrays, with_arrays = shard_maps.arrays_of(extra_args)
  # A map around this one may have no types, which say what differs between workers.
  untyped = () if axes or types.is_typed(manual) else manual
  differs = each(lambda x: tuple(axes_in(x).intersection(untyped)), stacked)

  def local(grads: Any, state: Any, params: Any, arrays: Any) -> tuple[Any, Any]:
    grads = jax.tree.map(lambda x: x[0], grads) if axes else grads
    if untyped:
      grads = types.mark_varying(grads, untyped)
      state = jax.tree.map(types.mark_varying, state, differs)
    with shard_maps.PLACED(placed):
      new, state = update(grads, state, params, **with_arrays(arrays))
    return (jax.tree.map(lambda x: x[None], new) if keeps else new), state

  new, state = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(places, own, None if params is None else specs, P()),
    out_specs=(places if keeps else specs, own),
    axis_names=set(names),
  )(tree, state, params, arrays)
  return (trees.marked(new, axes, placed_as) if axes and keeps else new), state


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


def _check_rows(rows: Any, axes: AxisName, axis_name: Any, mesh: AbstractMesh) -> int:
  """Returns the number of workers; ValueError for rows of others."""
  given = axes if axis_name is ... else axis_name
  if given is None or axis_names(given) != axis_names(axes):
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


def _is_complex(x: Any) -> bool:
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating)


def pairs(x: Any) -> Any:
  """Returns a complex array as pairs of reals on a new last axis, others unchanged."""
  if not _is_complex(x):
    return x
  stack = lambda x: jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.eval_shape(stack, x)
  return shard_maps.map_addends(stack, x)


def like_complex(x: jax.Array, like: jax.Array) -> jax.Array:
  """Turns pairs of reals into complex numbers if ``like`` is complex."""
  if not _is_complex(like):
    return x
  part = functools.partial(lax.index_in_dim, axis=-1, keepdims=False)
  return shard_maps.map_addends(lambda x: lax.complex(part(x, 0), part(x, 1)), x)


def raises_under_derivatives(message: str) -> Callable[[Callable[[Any], Any]], Any]:
  """Makes a function of a tree raise TypeError if JAX differentiates it."""

  def decorate(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
      raise TypeError(message)

    return guarded

  return decorate


# Rounding has no derivative. Without this some codecs would return zeros for it, and
# others would fail inside a kernel.
@raises_under_derivatives(
  "`updates` must not be differentiated: what the exchange rounds and sends has no "
  "derivative; call update outside of jax.grad, or give it "
  "jax.lax.stop_gradient(updates)."
)
def not_differentiated(updates: Any) -> Any:
  """Returns the gradients unchanged; raises TypeError if JAX differentiates them."""
  return updates


def extra_args(value: Any, grad: Any, value_fn: Callable[[Any], Any]) -> dict[str, Any]:
  """Returns the loss, its gradient and its function by optax's names for them."""

  def of_params(params: Any, obj_fn: Any = None) -> jax.Array:
    # A line search hands all that it does not know to the function, by its name.
    return value_fn(params)

  # Partial functions are trees, which jax.jit takes as arguments.
  functions = {"value_fn": Partial(of_params), "obj_fn": Partial(value_fn)}
  return {"value": value, "grad": grad, **functions}


def stand_ins(params: Any) -> dict[str, Any]:
  """Returns stand-ins for the extra arguments, for a trace that nothing runs."""

  def value_fn(params: Any) -> jax.Array:
    sums = [jnp.sum(jnp.abs(x), dtype=jnp.float32) for x in jax.tree.leaves(params)]
    return sum(sums, jnp.float32(0))

  return extra_args(jnp.float32(0), params, value_fn)
