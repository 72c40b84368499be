"""Saves states, and lets trainings go on from what comes back."""

import jax
import optax
import orbax.checkpoint as ocp

from tests.support import modes
from tests.support.assertions import assert_same_bits


def training(optimizer):
  """A transformation whose state has the parameters, too, as a checkpoint has."""
  optimizer = optax.with_extra_args_support(optimizer)

  def update(updates, state, _=None):
    params, inner = state
    updates, inner = optimizer.update(updates, inner, params)
    return updates, (optax.apply_updates(params, updates), inner)

  return optax.GradientTransformation(lambda p: (p, optimizer.init(p)), update)


def through_orbax(state, folder):
  """What a file gives back to a process that knows shapes and placements alone."""

  def abstract(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "state", state)
    checkpointer.wait_until_finished()
    return checkpointer.restore(folder / "state", jax.tree.map(abstract, state))


def assert_goes_on(mode, optimizer, given, folder, saved_after=2):
  """A training that is stopped ends with the bits of one that is not.

  Args:
    mode: one of ``modes.modes_for(workers)``.
    optimizer: over the axis "data".
    given: gradients with leaves ``[N, ...]``, a tree a step.
    folder: an empty one.
    saved_after: the steps before it is stopped.
  """
  workers = jax.tree.leaves(given[0])[0].shape[0]
  update = modes.mapped(mode, training(optimizer), workers)
  params = jax.tree.map(lambda leaf: leaf[0], given[0])
  state = None
  for gradient in given[:saved_after]:
    _, state = update(gradient, state, params)
  again = through_orbax(state, folder)
  assert jax.tree.structure(again) == jax.tree.structure(state)
  assert_same_bits(again, state)
  for gradient in given[saved_after:]:
    expected, state = update(gradient, state, params)
    got, again = update(gradient, again, params)
    assert_same_bits((got, again), (expected, state))
