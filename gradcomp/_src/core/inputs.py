"""Validates gradient leaves at a transformation's entry, and makes extra arguments."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import Partial

from gradcomp._src.core.of_workers import of_workers, step_shards
from gradcomp._src.mesh import trees
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.per_worker import of_all
from gradcomp._src.mesh.shard_maps import map_addends
from gradcomp._src.mesh.types import under_mesh_of


def on_real_pairs(
  init_fn: Callable[[Any], Any],
  update_fn: Callable[..., tuple[Any, Any]],
  axis_name: AxisName | None,
  *,
  keeps_rows: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Wraps real-valued init and update functions so that they accept complex leaves.

  Complex arrays reach them as :func:`pairs`, which their states hold, too. ``update``
  raises TypeError for leaves that are no arrays of floats. Both take :func:`any_tree`.
  """

  def init(params: Any) -> Any:
    return init_fn(jax.tree.map(pairs, params))

  def on_worker(grads: Any, state: Any, params: Any, **extra_args: Any) -> Any:
    return _joined(grads, *update_fn(_paired(grads), state, params, **extra_args))

  def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    grads, kept, params = _opened(updates, state, params)
    if of_all(grads) or step_shards(grads, kept) is not None:
      new, kept = mapped(grads, kept, params, **extra_args)
    else:  # no call of on_worker, so that a kernel is not deeper below an update
      reals = _paired(grads)
      new, kept = _joined(grads, *update_fn(reals, kept, params, **extra_args))
    return _closed(updates, state, new, kept)

  mapped = of_workers(on_worker, axis_name, keeps_rows=keeps_rows)
  return any_tree(init, update)._replace(update=update)


def _paired(grads: Any) -> Any:
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


def _joined(grads: Any, reals: Any, state: Any) -> tuple[Any, Any]:
  """Returns updates with complex numbers where the gradients have some."""
  return jax.tree.map(_like, reals, grads), state


def any_tree(
  init_fn: Callable[[Any], Any], update_fn: Callable[..., tuple[Any, Any]]
) -> optax.GradientTransformationExtraArgs:
  """Wraps functions of arrays of floats so that they take trees as libraries have them.

  Parameters that are not trained reach them as None, as in the gradients. ``update``
  sees the array of each box, and returns the boxes that it was given.
  """

  def init(params: Any) -> Any:
    params = trees.trainable(params)
    with under_mesh_of(params):
      return init_fn(params)

  def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    given = _opened(updates, state, params)
    return _closed(updates, state, *update_fn(*given, **extra_args))

  return optax.GradientTransformationExtraArgs(init, update)


def _opened(updates: Any, state: Any, params: Any) -> list[Any]:
  return [*map(trees.unboxed, (updates, state, trees.trainable(params)))]


def _closed(updates: Any, state: Any, new: Any, kept: Any) -> tuple[Any, Any]:
  """Puts results into the boxes of the arguments."""
  return trees.boxed_like(updates, new), trees.boxed_like(state, kept)


def _is_complex(x: Any) -> bool:
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating)


def pairs(x: Any) -> Any:
  """Returns a complex array as pairs of reals on a new last axis, others unchanged."""
  if not _is_complex(x):
    return x
  stack = lambda x: jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.eval_shape(stack, x)
  return map_addends(stack, x)


def whole(tree: Any, complexes: Sequence[bool]) -> Any:
  """Returns the shapes and dtypes of a tree before :func:`pairs`."""

  def shape(x: Any, is_pair: bool) -> jax.ShapeDtypeStruct:
    dtype = jnp.result_type(x)
    if not is_pair:
      return jax.ShapeDtypeStruct(jnp.shape(x), dtype)
    return jax.ShapeDtypeStruct(x.shape[:-1], jnp.result_type(dtype, jnp.complex64))

  leaves, treedef = jax.tree.flatten(tree)
  return jax.tree.unflatten(treedef, map(shape, leaves, complexes))


def _like(x: jax.Array, like: jax.Array) -> jax.Array:
  """Turns pairs of reals into complex numbers if ``like`` is complex."""
  if not _is_complex(like):
    return x
  part = functools.partial(lax.index_in_dim, axis=-1, keepdims=False)
  return map_addends(lambda x: lax.complex(part(x, 0), part(x, 1)), x)


def raises_under_derivatives(message: str) -> Callable[[Callable[[Any], Any]], Any]:
  """Makes a function of a tree raise TypeError if JAX differentiates it."""

  def refuse(primals: Any, tangents: Any) -> Any:
    raise TypeError(message)

  def decorate(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    guarded = jax.custom_jvp(function)
    guarded.defjvp(refuse)
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
    del obj_fn
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
