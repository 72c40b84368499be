"""Readers and makers of the arguments of ``update``: pairs, dtypes, stand-ins."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial

from gradcomp._src.floats.dtypes import addend_dtype
from gradcomp._src.mesh.shard_maps import map_addends


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


def like_complex(x: jax.Array, like: jax.Array) -> jax.Array:
  """Turns pairs of reals into complex numbers if ``like`` is complex."""
  if not _is_complex(like):
    return x
  part = functools.partial(lax.index_in_dim, axis=-1, keepdims=False)
  return map_addends(lambda x: lax.complex(part(x, 0), part(x, 1)), x)


def update_dtypes(updates: Any, params: Any) -> list[np.dtype]:
  """Returns the dtype of each leaf's update: its gradient's, or its parameter's."""

  # The parameter's, if addends are wider, because its dtype does not hold an Nth.
  def of(gradient: jax.Array, param: Any) -> np.dtype:
    wide, narrow = map(jnp.result_type, (gradient, param))
    return narrow if wide == addend_dtype(narrow) else wide

  likes = updates if params is None else params
  return jax.tree.leaves(jax.tree.map(of, updates, likes))


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
