"""Donation of arrays to a jitted function, each buffer once."""

from typing import Any

import jax
import jax.numpy as jnp


class Donating:
  """A jitted train step that donates parameters and optimizer state, each buffer once.

  Some optimizers keep the arrays that they were given: ``optax.contrib.prodigy`` has
  the first parameters in its state. JAX cannot donate one buffer twice. It raises an
  error on one device, and ends the process on several. So the second occurrence is
  copied. All other attributes, like ``lower``, are those of the jitted function.
  """

  def __init__(self, step: Any):
    self._step = step

  def __call__(self, params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> Any:
    leaves, treedef = jax.tree.flatten(((params, opt_state), args, kwargs))
    donated = len(jax.tree.leaves((params, opt_state)))
    seen: set[int] = set()
    for i, x in enumerate(leaves):
      if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        if id(x) in seen:
          leaves[i] = jnp.copy(x)
        elif i < donated:
          seen.add(id(x))
    given, args, kwargs = jax.tree.unflatten(treedef, leaves)
    return self._step(*given, *args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._step, name)
