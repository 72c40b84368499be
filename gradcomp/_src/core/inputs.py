"""Takes gradients in where a transformation begins: what their leaves must be."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradcomp._src.mesh.shard_maps import map_addends


def of_reals(
  init_fn: Callable[[Any], Any], update_fn: Callable[..., tuple[Any, Any]]
) -> optax.GradientTransformationExtraArgs:
  """Makes a transformation of functions that know real arrays alone.

  Complex arrays reach them as pairs of real numbers, on a new last axis. So what they
  keep of complex gradients are pairs, too.

  Args:
    init_fn: as for ``optax.GradientTransformation``.
    update_fn: the same, with any extra arguments.

  Returns:
    A transformation whose ``update`` raises TypeError for leaves that are no arrays of
    real or complex floating point.

  Example:
    >>> tx = of_reals(lambda params: params, lambda updates, state, _: (updates, state))
    >>> x = jnp.array([1 + 2j])
    >>> tx.init(x).tolist(), tx.update(x, ())[0].tolist()
    ([[1.0, 2.0]], [(1+2j)])
  """

  def init(params: Any) -> Any:
    return init_fn(jax.tree.map(pairs, params))

  def update(
    updates: Any, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[Any, Any]:
    _check_dtypes(updates)
    reals, state = update_fn(jax.tree.map(pairs, updates), state, params, **extra_args)
    return jax.tree.map(_like, reals, updates), state

  return optax.GradientTransformationExtraArgs(init, update)


def _check_dtypes(updates: Any) -> None:
  """Raises TypeError for leaves that are no arrays of floats."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
    name = f"`updates`{jax.tree_util.keystr(path)}"
    if not hasattr(leaf, "dtype"):
      raise TypeError(f"{name} must be an array, got {leaf!r}; use jnp.asarray.")
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      raise TypeError(
        f"{name} must have a real or complex float dtype, got {leaf.dtype}."
      )


def _is_complex(x: Any) -> bool:
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating)


def pairs(x: Any) -> Any:
  """Returns a complex array as pairs of reals, and all else as it is."""
  if not _is_complex(x):
    return x
  stack = lambda x: jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.eval_shape(stack, x)
  return map_addends(stack, x)


def whole(tree: Any, complexes: Sequence[bool]) -> Any:
  """Returns the shapes and dtypes of a tree, some leaves of which are pairs of reals.

  Args:
    tree: the leaves, as :func:`pairs` makes them.
    complexes: for each leaf, whether it was complex.
  """

  def shape(x: Any, is_pair: bool) -> jax.ShapeDtypeStruct:
    dtype = jnp.result_type(x)
    if not is_pair:
      return jax.ShapeDtypeStruct(jnp.shape(x), dtype)
    return jax.ShapeDtypeStruct(x.shape[:-1], jnp.result_type(dtype, jnp.complex64))

  leaves, treedef = jax.tree.flatten(tree)
  return jax.tree.unflatten(treedef, map(shape, leaves, complexes))


def _like(x: jax.Array, like: jax.Array) -> jax.Array:
  """Returns pairs of reals as complex numbers, if ``like`` are."""
  if not _is_complex(like):
    return x
  part = functools.partial(lax.index_in_dim, axis=-1, keepdims=False)
  return map_addends(lambda x: lax.complex(part(x, 0), part(x, 1)), x)


@jax.custom_jvp
def not_differentiated(updates: Any) -> Any:
  """Returns the gradients as they are, but refuses to be differentiated.

  Rounding has no derivative. Without this some codecs would return zeros for it, and
  others would fail inside of a kernel.

  Raises:
    TypeError: while ``jax.grad``, ``jax.jvp`` or the like traces it, if the gradients
      depend on what is differentiated.

  Example:
    >>> not_differentiated({"w": jnp.ones(2)})
    {'w': Array([1., 1.], dtype=float32)}
  """
  return updates


@not_differentiated.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
  del primals, tangents
  raise TypeError(
    "`updates` must not be differentiated: what the exchange rounds and sends has no "
    "derivative; call update outside of jax.grad, or give it "
    "jax.lax.stop_gradient(updates)."
  )
