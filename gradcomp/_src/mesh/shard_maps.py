"""Maps over devices, with arrays of closures and specs of parameters in them.

Maps are entered where arrays are typed as sharded or unreduced. A map over workers may
be one that a trace must not see: a user's function is traced as if it were in none, so
that its constraints may name the axes of the workers, see ``training/constraints.py``.
An exchange in it needs them, and the way back.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from gradcomp._src.mesh import axes as mesh_axes
from gradcomp._src.mesh import types
from gradcomp._src.mesh.axes import AxisName, axes_in, axis_names, entries, is_spec
from gradcomp._src.mesh.study import is_followed
from gradcomp._src.mesh.trees import is_array, unboxed
from gradcomp._src.mesh.types import Place

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
    out = specs if keeps else each(lambda spec: P(*entries(spec)), specs)
    mesh = types.mesh_of(updates)
    # JAX 0.10 takes unreduced arrays only if all axes are manual.
    manual = set(mesh.axis_names if across.is_sum else axes_in(specs))
    if across.is_sum and mesh.auto_axes and not keeps:
      # But then all devices along an Auto axis would compute and send equal arrays.
      manual -= set(mesh.auto_axes)
      stacked = each(lambda spec: P(across.axes, *entries(spec)), specs)
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
  return math.prod(mesh_axes.automatic_axes(axis_name).values())


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
  axes = mesh_axes.automatic_axes(axis_name)
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
  words = lax.with_sharding_constraint(words, P())
  padded = jnp.pad(words, [(0, filling * (i == axis)) for i in range(words.ndim)])
  cut = lambda axis: P(*[None] * axis, tuple(axes))
  mapped = jax.shard_map(
    named,
    in_specs=cut(axis),
    out_specs=cut(to),
    axis_names=set(axes),
    check_vma=types.is_typed(axis_name),
  )
  whole = lax.with_sharding_constraint(mapped(padded), P())
  return lax.slice_in_dim(whole, 0, length, axis=to)


def map_addends(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
  """Applies a linear function of last axes to an array, or to each device's addend."""
  spec = types.typed_spec(x)
  if not spec.unreduced:
    return function(x)
  rank = jax.eval_shape(function, jax.ShapeDtypeStruct(x.shape, x.dtype)).ndim
  out = P(*entries(spec)[:rank], unreduced=spec.unreduced)
  mapped = _unchecked(function, types.mesh_of(x), spec, out)
  return _linear(mapped, lambda x: map_addends(jax.vmap(function), x))(x)


def unreduce(tree: Any, axis_name: AxisName) -> Any:
  """Turns workers' addends, stacked ``[N, ...]`` over the axis, into unreduced ones."""
  mesh = types.mesh_of(tree)
  names = set(axis_names(axis_name))
  if mesh.size == 1:  # JAX has no unreduced arrays on one device
    return jax.tree.map(lambda x: x[0], tree)

  def drop(at: int, tree: Any) -> Any:
    def spec(x: jax.Array) -> P:
      found = [*entries(types.typed_spec(x))]
      del found[at : at + 1]
      return P(*found, unreduced=names)

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
  out = P(None, *entries(spec), unreduced=spec.unreduced)
  ahead = lambda x: jnp.broadcast_to(x, (size, *x.shape))
  return _unchecked(ahead, types.mesh_of(x), spec, out)(x)


def _unchecked(function: Callable[..., Any], mesh: Any, spec: Any, out: Any) -> Any:
  """Maps a function of one tree, without a check of its types."""
  given: Any = {"mesh": mesh, "in_specs": (spec,), "out_specs": out}
  return jax.shard_map(function, check_vma=False, **given)


# Under Explicit axes, JAX 0.10 to 0.12 lets no function in ``jax.shard_map`` close over
# an array of the mesh. docs/inside/architecture.md says why closures are not searched.
OF_LOSS = (
  "If the error above is about an array of the mesh that `loss_fn` closes over: make "
  "it an argument, loss_fn(params, batch, array), and call the result of "
  "gradcomp.value_and_grad with (params, batch, array), or that of "
  "gradcomp.make_train_step with (params, opt_state, batch, array); or pass "
  "jax.tree_util.Partial(loss_fn, name=array), whose arrays are arguments."
)
OF_BODY = (
  "If the error above is about an array of the mesh that `body` closes over: make it "
  "a part of `carry` or of `layers`, or pass jax.tree_util.Partial(body, name=array), "
  "for body(carry, layer, name), whose arrays are arguments."
)
OF_OPTIMIZER = (
  "If the error above is about an array of the mesh that `optimizer` closes over: make "
  "it of numbers or NumPy's arrays, or put optax.inject_hyperparams, which keeps "
  "numbers in the state, around the innermost transformation: "
  "zero(optax.inject_hyperparams(optax.adam)(rate), ...). If a function that `update` "
  "was given closes over it, like a batch: pass jax.tree_util.Partial, as in "
  "update(..., value_fn=jax.tree_util.Partial(f, batch=batch)), for f(params, batch)."
)


def arrays_of(tree: Any) -> tuple[list[jax.Array], Callable[[Sequence[Any]], Any]]:
  """Returns the arrays of a tree, and a function that replaces them by others."""
  leaves, treedef = jax.tree.flatten(tree)

  def with_arrays(arrays: Sequence[Any]) -> Any:
    parts = iter(arrays)
    own = [next(parts) if isinstance(x, jax.Array) else x for x in leaves]
    return jax.tree.unflatten(treedef, own)

  return [x for x in leaves if isinstance(x, jax.Array)], with_arrays


def with_note(
  function: Callable[..., Any],
  note: str,
  mesh: Mesh | AbstractMesh,
  names: Collection[str],
) -> Callable[..., Any]:
  """Wraps a function in a map over ``names``: errors for such arrays get its note."""
  kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
  explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
  if not explicit:  # JAX raises no error
    return function
  # JAX raises a ValueError where the map leaves other axes Explicit.
  others = (ValueError,) if explicit.difference(names) else ()
  return _with_note(function, note, NotImplementedError, *others)


def optimizer_with_note(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer likewise; it takes extra arguments."""
  functions = optax.with_extra_args_support(tx)
  noted = [_with_note(f, OF_OPTIMIZER, NotImplementedError) for f in functions]
  return optax.GradientTransformationExtraArgs(*noted)


def _with_note(
  function: Callable[..., Any], note: str, *errors: type[Exception]
) -> Callable[..., Any]:
  @functools.wraps(function, updated=())
  def noted(*args: Any, **kwargs: Any) -> Any:
    try:
      return function(*args, **kwargs)
    except errors as error:
      error.add_note(note)
      raise

  return noted


_SHARDINGS = "jax.tree.map(lambda x: x.sharding, params)"

# No type has the specs of parameters over other axes than the workers' in the trace of
# a train step: ``with PLACED(by_leaf(params, specs)):`` does, by the path and the shape
# of each leaf. It is a part of the keys of JAX's caches, as a study is.
PLACED: Any = jax.make_user_context(None)


def specs_of(given: Any, axis_name: AxisName) -> Any:
  """Returns ``param_specs``, specs or shardings, as specs; errors for bad ones."""

  def spec(path: Any, x: Any) -> P:
    if is_spec(x):
      return x
    if isinstance(x, NamedSharding):
      return x.spec
    if isinstance(x, Sharding) and x.is_fully_replicated:
      return P()
    raise TypeError(
      f"`param_specs`{jax.tree_util.keystr(path)} must be a jax.P or a "
      f"jax.NamedSharding, got {x!r}; take those of the parameters: {_SHARDINGS}."
    )

  specs = jax.tree_util.tree_map_with_path(spec, given, is_leaf=is_spec)
  types.check_whole("param_specs", specs, axis_name)
  return specs


def specs_like(
  params: Any, given: Any, axis_name: AxisName, mesh: Mesh | AbstractMesh | None = None
) -> Any:
  """Returns a spec for each parameter: of ``param_specs``, or for None as they lie."""
  if given is None:
    mesh = types.mesh_of(params) if mesh is None else mesh
    others = [x for x in mesh.auto_axes if mesh.shape[x] > 1]
    hidden = tuple(x for x in others if x not in axis_names(axis_name))
    if hidden and types.is_traced(params):
      raise ValueError(
        f"`param_specs` must give the sharding of the parameters over the Auto axes "
        f"{hidden}, which types do not show, got None: whole gradients would be "
        f"gathered over these axes. Pass {_SHARDINGS}, taken outside of jax.jit; or "
        "jax.P() for parameters that every device has whole."
      )
    given = jax.tree.map(types.placed_spec, params)
  specs = specs_of(given, axis_name)
  try:
    return jax.tree.broadcast(specs, params, is_leaf=is_spec)
  except ValueError as error:
    raise ValueError(
      "`param_specs` must be one spec, or a tree of specs like the parameters, "
      f"{jax.tree.structure(params)}, got {specs}; take those of the parameters: "
      f"{_SHARDINGS}."
    ) from error


def specs_over(params: Any, axes: Collection[str]) -> tuple[P, ...] | None:
  """Returns the spec of each array; None if these axes shard none of them."""
  specs = tuple(types.placed_spec(x) for x in jax.tree.leaves(params))
  return specs if axes_in(specs).intersection(axes) else None


def by_leaf(params: Any, specs: Sequence[P]) -> Any:
  """Returns the specs by leaf, for :data:`PLACED`."""
  leaves = jax.tree_util.tree_leaves_with_path(unboxed(params))
  return tuple(map(_name, *zip(*leaves, strict=True))), tuple(specs)


def shards_of(grads: Any) -> tuple[Any, Collection[str]]:
  """Returns specs of a step's gradients, None if none cut, and Auto axes in no map."""
  if PLACED.value is None:
    return None, ()
  known, axes = dict(zip(*PLACED.value, strict=True)), mesh_axes.automatic_axes()
  own = lambda path, x: known.get(_name(path, x), P())
  spec = lambda path, x: mesh_axes.restrict_spec(own(path, x), axes)
  specs = jax.tree_util.tree_map_with_path(spec, grads)
  return specs if axes_in(specs) else None, axes


def _name(path: Any, x: Any) -> tuple[str, tuple[int, ...]]:
  return jax.tree_util.keystr(path), x.shape
