"""The training of examples/ray_train.py goes on with other workers, and its diary."""

import json

import jax
import numpy as np
import pytest

from examples import ray_train
from examples.lib import elastic
from tests.plugins import slow_cases
from tests.support import modes
from tests.support.assertions import assert_same_bits

EVERY = 2
entry = lambda time, what, **more: {"time": time, "what": what, **more}


def training(folder, workers, local_steps=0):
  return ray_train.Training(modes.mesh(workers), folder, EVERY, local_steps)


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


def test_a_change_lasts_until_others_take_a_step():
  """It reads any number of steps of the old group, and groups that took none."""
  entries = [entry(t, "step", step=t, workers=4) for t in (1, 2)]
  entries += [entry(3, "a node is killed"), entry(3.5, "failed"), entry(4.5, "failed")]
  entries += [entry(6, "started", workers=4)]
  entries += [entry(t, "started", workers=3) for t in (9, 9.5)]
  entries += [entry(10, "connected"), entry(12, "restored", step=2)]
  entries += [entry(14, "step", step=3, workers=3), entry(15, "started", workers=4)]
  assert list(elastic.told(entries)) == [
    "a node is killed after step 2",
    "    0.5 s  the first worker fails in an exchange",
    "    6.5 s  the last worker of a new group has started",
    "    7.0 s  JAX has connected them",
    "    9.0 s  all have their state",
    "   11.0 s  step 3, by 3 workers",
  ]


def test_all_files_are_read_in_the_order_of_time(tmp_path):
  for number, time in enumerate((5.0, 1.0, 3.0)):  # of other processes
    line = json.dumps(entry(time, "step", workers=number))
    (tmp_path / f"diary-{number}.jsonl").write_text(f"{line}\n")
  elastic.note(tmp_path, "step", workers=9)
  assert [x["workers"] for x in elastic.read(tmp_path)] == [1, 2, 0, 9]
  assert elastic.began(tmp_path, 2) == 3.0 and elastic.began(tmp_path, 5) is None
