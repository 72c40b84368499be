"""An average of the parameters over the steps, to test in their place."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class AverageState(NamedTuple):
  """The state of ``average_params``, equal on all workers."""

  averaged_params: Any
  count: jax.Array  # steps


def average_params(decay: float) -> optax.GradientTransformation:
  """Keeps the exponential moving average of the parameters, as Wen et al. test it.

  After t steps a step's parameters p_s have the weight ``decay ** (t - s)``, divided by
  the sum of all weights, so that short runs are not drawn to the first parameters. It
  is the last of a chain, for it must see the updates that are added.

  Raises:
    ValueError: if ``decay`` is not in (0, 1).
  """
  if not 0 < decay < 1:
    raise ValueError(f"`decay` must be in (0, 1), got {decay}.")

  def init_fn(params: Any) -> AverageState:
    return AverageState(optax.tree.zeros_like(params), jnp.zeros([], jnp.int32))

  def update_fn(updates: Any, state: AverageState, params: Any = None) -> Any:
    count = optax.safe_increment(state.count)
    # (1 - decay) / (1 - decay ** count), to the last digits of float32.
    weight = (1 - decay) / -jnp.expm1(count * jnp.log1p(decay - 1))
    after = optax.apply_updates(params, updates)
    averaged = jax.tree.map(
      lambda mean, new: mean + weight * (new - mean), state.averaged_params, after
    )
    return updates, AverageState(averaged, count)

  return optax.GradientTransformation(init_fn, update_fn)


def averaged(opt_state: Any, params: Any) -> Any:
  """Returns the average that a state holds, or ``params`` if it holds none."""
  return optax.tree.get(opt_state, "averaged_params", default=params)
