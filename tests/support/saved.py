"""Saves states, and lets trainings go on from what comes back."""

import jax
import orbax.checkpoint as ocp

from tests.support import modes
from tests.support.assertions import assert_same_bits


def through_orbax(state, folder):
  """What a file gives back to a process that knows shapes and placements alone."""
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "state", state)
    checkpointer.wait_until_finished()
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    return checkpointer.restore(folder / "state", like)


def assert_goes_on(mode, optimizer, given, folder, saved_after=2):
  """A training that is stopped ends with the bits of one that is not."""
  workers = jax.tree.leaves(given[0])[0].shape[0]
  update = modes.started(mode, modes.training(optimizer), workers).update
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
