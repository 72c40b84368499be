"""Maps over devices, entered where arrays are typed as sharded or unreduced.

A map over workers may be one that a trace must not see: a user's function is traced as
if it were in none, so that its constraints may name the axes of the workers, see
``training/constraints.py``. An exchange in it needs them, and the way back.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType, PartitionSpec

from gradcomp._src.mesh import types
from gradcomp._src.mesh.axes import AxisName, automatic_axes, axis_names
from gradcomp._src.mesh.closures import arrays_of
from gradcomp._src.mesh.place import Place
from gradcomp._src.mesh.specs import axes_in, entries, is_spec
from gradcomp._src.mesh.study import is_followed
from gradcomp._src.mesh.trees import is_array

Update = Callable[..., tuple[Any, Any]]

# ``with UNSEEN(axes):`` around the trace of such a function, whose map binds the axes.
UNSEEN: Any = jax.make_user_context(frozenset())

# From one to the other mesh, which only types know. constraints.py removes it.
CROSS = Primitive("gradcomp_cross")
CROSS.def_abstract_eval(
  lambda x: jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type)
)


def in_map(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  """Calls a function that sees the map over the axes, on arrays of its mesh."""
  manual = dict.fromkeys(UNSEEN.value, AxisType.Manual)
  mesh = jax.sharding.get_abstract_mesh().update_axis_types(manual)
  cross = lambda tree: jax.tree.map(lambda x: CROSS.bind(x) if is_array(x) else x, tree)
  with UNSEEN(frozenset()), jax.sharding.use_abstract_mesh(mesh):
    args, kwargs = cross((args, kwargs))
    found = function(*args, **kwargs)
  return cross(found)


def per_device(function: Update, updates: Any, across: Place, *, keeps: bool) -> Update:
  """Returns ``function(updates, state, *given)``, in a map if these updates need it."""
  if is_followed():
    return lambda updates, state, *_: (updates, state)
  if not across.is_sum and not types.sharded_over(updates):
    return function
  return functools.partial(_on_devices, function, across, keeps)


def _on_devices(
  function: Update, across: Place, keeps: bool, updates: Any, state: Any, *given: Any
) -> tuple[Any, Any]:
  """Calls ``function`` on each device's shards, in a map."""
  # It binds the axes of addends, and with `keeps` returns such. `given` is only read.
  arrays, with_arrays = arrays_of(given)

  def on_device(updates: Any, state: Any, arrays: list[Any]) -> tuple[Any, Any]:
    return function(updates, state, *with_arrays(arrays))

  def whole(updates: Any, state: Any, arrays: list[Any]) -> tuple[Any, Any]:
    """Calls ``on_device`` in a map over the axes of the types."""
    called: Callable[..., Any] = on_device
    specs, *others = jax.tree.map(types.typed_spec, (updates, state, arrays))
    each = functools.partial(jax.tree.map, is_leaf=is_spec)
    out = specs if keeps else each(lambda spec: PartitionSpec(*entries(spec)), specs)
    mesh = types.mesh_of(updates)
    # JAX 0.10 takes unreduced arrays only if all axes are manual.
    manual = set(mesh.axis_names if across.is_sum else axes_in(specs))
    if across.is_sum and mesh.auto_axes and not keeps:
      # But then all devices along an Auto axis would compute and send equal arrays.
      manual -= set(mesh.auto_axes)
      stacked = each(lambda spec: PartitionSpec(across.axes, *entries(spec)), specs)
      add_axis = lambda tree: jax.tree.map(lambda x: x[None], tree)
      updates, specs = _unchecked(add_axis, mesh, specs, stacked)(updates), stacked
      called = lambda rows, *args: on_device(jax.tree.map(lambda x: x[0], rows), *args)
    return jax.shard_map(
      called,
      mesh=mesh,
      in_specs=(specs, *others),
      out_specs=(out, others[0]),
      axis_names=manual,
      # JAX allows an unreduced argument only if types are not checked.
      check_vma=any(map(types.varying_axes, jax.tree.leaves(updates))),
    )(updates, state, arrays)

  if not across.is_sum:
    return whole(updates, state, arrays)
  of_each = functools.partial(_on_devices, jax.vmap(on_device), across, keeps)
  return _with_rule(whole, of_each)(updates, state, arrays)


def devices(axis_name: AxisName) -> int:
  """Returns the number of devices that share the work of one worker."""
  return math.prod(automatic_axes(axis_name).values())


def spread(
  function: Callable[[jax.Array], jax.Array],
  words: jax.Array,
  axis_name: AxisName,
  name: str,
  *,
  axis: int = -1,
  to: int | None = None,
) -> jax.Array:
  """Runs a collective, equal in all places of an axis, by parts on all devices."""
  axes = automatic_axes(axis_name)
  named = jax.named_scope(name)(function)
  if not axes or not words.ndim:
    return named(words)
  axis %= words.ndim
  to = axis if to is None else to
  length = words.shape[axis]
  filling = -length % math.prod(axes.values())
  # The constraint keeps the words whole outside of the map. Without it, XLA would shard
  # the operands of the words, and the arrays that are computed from them. That takes
  # many small messages, and whole leaves would come out sharded.
  words = lax.with_sharding_constraint(words, PartitionSpec())
  padded = jnp.pad(words, [(0, filling * (i == axis)) for i in range(words.ndim)])
  cut = lambda axis: PartitionSpec(*[None] * axis, tuple(axes))
  mapped = jax.shard_map(
    named,
    in_specs=cut(axis),
    out_specs=cut(to),
    axis_names=set(axes),
    check_vma=types.is_typed(axis_name),
  )
  whole = lax.with_sharding_constraint(mapped(padded), PartitionSpec())
  return lax.slice_in_dim(whole, 0, length, axis=to)


def map_addends(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
  """Applies a linear function of last axes to an array, or to each device's addend."""
  spec = types.typed_spec(x)
  if not spec.unreduced:
    return function(x)
  rank = jax.eval_shape(function, jax.ShapeDtypeStruct(x.shape, x.dtype)).ndim
  out = PartitionSpec(*entries(spec)[:rank], unreduced=spec.unreduced)
  mapped = _unchecked(function, types.mesh_of(x), spec, out)
  return _linear(mapped, lambda x: map_addends(jax.vmap(function), x))(x)


def unreduce(tree: Any, axis_name: AxisName) -> Any:
  """Turns workers' addends, stacked ``[N, ...]`` over the axis, into unreduced ones."""
  mesh = types.mesh_of(tree)
  names = set(axis_names(axis_name))
  if mesh.size == 1:  # JAX has no unreduced arrays on one device
    return jax.tree.map(lambda x: x[0], tree)

  def drop(at: int, tree: Any) -> Any:
    def spec(x: jax.Array) -> PartitionSpec:
      found = [*entries(types.typed_spec(x))]
      del found[at : at + 1]
      return PartitionSpec(*found, unreduced=names)

    squeeze = lambda tree: jax.tree.map(lambda x: jnp.squeeze(x, at), tree)
    specs = jax.tree.map(types.typed_spec, tree), jax.tree.map(spec, tree)
    return _unchecked(squeeze, mesh, *specs)(tree)

  return _linear(functools.partial(drop, 0), functools.partial(drop, 1))(tree)


def _with_rule(function: Callable[..., Any], of_each: Callable[..., Any]) -> Any:
  """Returns a function for which ``jax.vmap`` calls ``of_each``, on first axes."""

  def rule(size: int, is_batched: Any, *args: Any) -> tuple[Any, Any]:
    ahead = lambda x, known: x if known else _ahead(x, size)
    result = of_each(*jax.tree.map(ahead, args, tuple(is_batched)))
    return result, jax.tree.map(lambda _: True, result)

  # JAX 0.10 to 0.12 has no rule for maps with unreduced arrays.
  result = jax.custom_batching.custom_vmap(function)
  result.def_vmap(rule)
  return result


def _linear(function: Callable[[Any], Any], of_each: Callable[[Any], Any]) -> Any:
  """Returns such a linear function, which JAX may differentiate."""
  result = jax.custom_jvp(_with_rule(function, of_each))
  result.defjvp(lambda primals, tangents: (result(*primals), function(*tangents)))
  return result


def _ahead(x: jax.Array, size: int) -> jax.Array:
  """Broadcasts an array along a new first axis, with any sharding."""
  spec = types.typed_spec(x)
  out = PartitionSpec(None, *entries(spec), unreduced=spec.unreduced)
  ahead = lambda x: jnp.broadcast_to(x, (size, *x.shape))
  return _unchecked(ahead, types.mesh_of(x), spec, out)(x)


def _unchecked(function: Callable[..., Any], mesh: Any, spec: Any, out: Any) -> Any:
  """Maps a function of one tree, without a check of its types."""
  given: Any = {"mesh": mesh, "in_specs": (spec,), "out_specs": out}
  return jax.shard_map(function, check_vma=False, **given)
