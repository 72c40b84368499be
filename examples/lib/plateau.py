"""Halves the learning rate whenever a loss stops falling."""

import functools
from typing import Any, NamedTuple

import jax
import optax
from optax import contrib

# After three means in a row that are not a thousandth below the least so far.
RULE = contrib.reduce_on_plateau(factor=0.5, patience=3, rtol=1e-3)


class PlateauState(NamedTuple):
  """The state of ``scale_by_plateau``, equal on all workers."""

  plateau: contrib.ReduceLROnPlateauState


def scale_by_plateau() -> optax.GradientTransformation:
  """Scales updates by 1, and by half as much after each plateau of the loss."""

  def update_fn(updates: Any, state: PlateauState, params: Any = None) -> Any:
    del params
    return optax.tree.scale(state.plateau.scale, updates), state

  return optax.GradientTransformation(
    lambda params: PlateauState(RULE.init(params)), update_fn
  )


def observe(opt_state: Any, loss: float) -> Any:
  """Records the mean loss of some steps in a state, between two steps.

  A state without ``scale_by_plateau`` comes back as it is.
  """
  state = optax.tree.get(opt_state, "plateau")
  if state is None:
    return opt_state
  # Where the next step, which was compiled for these places, looks for it.
  places = jax.tree.map(lambda x: x.sharding, state)
  return optax.tree.set(opt_state, plateau=_observe(places)(state, loss))


@functools.cache
def _observe(places: Any) -> Any:
  def update(state: Any, loss: jax.Array) -> Any:
    return RULE.update({}, state, value=loss)[1]

  return jax.jit(update, out_shardings=places)
