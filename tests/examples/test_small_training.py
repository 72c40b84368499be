"""The training of examples/ray_train.py goes on with another number of workers."""

import jax
import numpy as np
import pytest

from examples.lib import small_training
from tests.plugins import slow_cases
from tests.support import modes
from tests.support.assertions import assert_same_bits

EVERY = 2


def training(folder, workers, local_steps=0):
  return small_training.Training(modes.mesh(workers), folder, EVERY, local_steps)


@pytest.mark.parametrize("local_steps", [0, *slow_cases.slow(EVERY)])
def test_workers_take_up_what_others_have_not_sent(local_steps, tmp_path):
  """Three for four, from a checkpoint: what waits has the mean that it had."""
  four = training(tmp_path, 4, local_steps)
  list(four.losses(EVERY))
  three = training(tmp_path, 3, local_steps)
  assert three.step == EVERY
  assert_same_bits(three.state[0], four.state[0])
  states = [x.state[1] for x in (four, three)]
  old, new = (x.fragments[0].exchange if local_steps else x[0] for x in states)
  for name, x in old.residual.items():
    was = np.asarray(x, np.float64).reshape(4, -1)
    now = np.asarray(new.residual[name], np.float64).reshape(3, -1)
    # A sum of two in float32, and a product with 3/4: each rounds by 2**-24 at most.
    most = 2.0**-22 * np.abs(was).max(axis=0)
    assert (np.abs(now.mean(axis=0) - was.mean(axis=0)) <= most).all()
    assert np.any(was) or name == "b"  # which is small, and sent whole in each step
  rows = map(jax.tree.leaves, (old.server_residual, new.server_residual))
  for pair in zip(*rows, strict=True):
    # The same numbers, cut elsewhere; zeros are padding.
    numbers = [np.asarray(x).ravel() for x in pair]
    assert_same_bits(*(np.sort(x[x != 0]) for x in numbers))
  assert len(list(three.losses(2 * EVERY))) == EVERY and three.step == 2 * EVERY


def test_a_training_that_stopped_ends_as_one_that_did_not(tmp_path):
  """With as many workers, to the bit: the checkpoint has all that the steps need."""
  whole, halves = training(tmp_path / "whole", 2), tmp_path / "halves"
  losses = list(whole.losses(2 * EVERY))
  assert losses[-1] < losses[0]
  assert list(training(halves, 2).losses(EVERY)) == losses[:EVERY]
  after = training(halves, 2)
  assert list(after.losses(2 * EVERY)) == losses[EVERY:]
  assert_same_bits(after.state, whole.state)
