"""The extra arguments of ``update`` that optax optimizers take."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial


def extra_args(
  value: Any, grad: Any, value_fn: Callable[[Any], jax.Array]
) -> dict[str, Any]:
  """Returns extra arguments of ``update`` by optax's names for them.

  Args:
    value: the loss, for ``reduce_on_plateau``, ``polyak_sgd`` and ``momo``.
    grad: its gradient, for line searches, which take all three.
    value_fn: the loss as a function of the parameters; ``sophia`` names it ``obj_fn``.
  """

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
