"""The training of examples/ray_train.py goes on with another number of workers."""

import jax
import numpy as np
import pytest

from examples.lib import small_training
from tests.plugins import slow_cases
from tests.support import modes
from tests.support.assertions import assert_same_bits

SAVE_EVERY = 4


def training(folder, workers, local_steps=0):
  mesh = modes.mesh(workers)
  return small_training.Training(mesh, folder, SAVE_EVERY, local_steps)


def exchange_of(state, local_steps):
  _, opt_state = state
  return opt_state.fragments[0].exchange if local_steps else opt_state[0]


@pytest.mark.parametrize("local_steps", [0, *slow_cases.slow(SAVE_EVERY)])
def test_workers_take_up_what_others_have_not_sent(local_steps, tmp_path):
  """Three for four, from a checkpoint: what waits has the mean that it had."""
  four = training(tmp_path, 4, local_steps)
  first = next(four.losses(SAVE_EVERY))
  for _ in four.losses(SAVE_EVERY):
    pass
  three = training(tmp_path, 3, local_steps)
  assert three.step == SAVE_EVERY
  assert_same_bits(three.state[0], four.state[0])
  old, new = (exchange_of(x.state, local_steps) for x in (four, three))
  for name, x in old.residual.items():
    was = np.asarray(x, np.float64).reshape(4, -1)
    now = np.asarray(new.residual[name], np.float64).reshape(3, -1)
    # A sum of two in float32, and a product with 3/4: each rounds by 2**-24 at most.
    most = 2.0**-22 * np.abs(was).max(axis=0)
    assert (np.abs(now.mean(axis=0) - was.mean(axis=0)) <= most).all()
    assert np.any(was) or name == "b"  # which is small, and sent whole in each step
  for rows, cut in zip(
    jax.tree.leaves(old.server_residual),
    jax.tree.leaves(new.server_residual),
    strict=True,
  ):
    # The same numbers, cut elsewhere; zeros are padding.
    numbers = [np.asarray(x).ravel() for x in (rows, cut)]
    assert_same_bits(*(np.sort(x[x != 0]) for x in numbers))
  losses = list(three.losses(2 * SAVE_EVERY))
  assert three.step == 2 * SAVE_EVERY and losses[-1] < first
  again = training(tmp_path, 4, local_steps)
  assert again.step == 2 * SAVE_EVERY
  assert_same_bits(again.state[0], three.state[0])


def test_a_training_that_stopped_ends_as_one_that_did_not(tmp_path):
  """With as many workers, to the bit: the checkpoint has all that the steps need."""
  whole, halves = training(tmp_path / "whole", 2), tmp_path / "halves"
  losses = list(whole.losses(2 * SAVE_EVERY))
  assert list(training(halves, 2).losses(SAVE_EVERY)) == losses[:SAVE_EVERY]
  after = training(halves, 2)
  assert list(after.losses(2 * SAVE_EVERY)) == losses[SAVE_EVERY:]
  assert_same_bits(after.state, whole.state)
