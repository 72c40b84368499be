"""A switch goes on with what waits, and thresholds are used again where N is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from tests.specs import top_k
from tests.support.assertions import says
from tests.support.sparse_steps import N, check_conservation, gradients, redsync, trail

switch = gradcomp.wrappers.switch


def test_switch_changes_the_density_in_one_compilation():
  """Dense until step 2, then sparse, then sparser; residuals and momentum go on."""
  densities, steps = [1, 0.25, 0.02], gradients(7)
  found = trail(switch([2, 4], [redsync(d, 0.9) for d in densities]), steps)
  passed = [(output, state.inner) for output, state in found]
  check_conservation(passed, steps, 0.9, True, sparse=lambda step: step >= 2)
  sent = [np.count_nonzero(output["w"][0]) for output, _ in passed]
  waiting = [np.count_nonzero(state.residual["w"]) for _, state in passed]
  k = [top_k.entries_of(d, 630) for d in densities]
  assert sent[:2] == [630, 630] and waiting[:2] == [0, 0]
  assert all(k[1] <= count <= 4 * k[1] for count in sent[2:4])
  assert all(k[2] <= count <= 4 * k[2] for count in sent[4:])
  assert min(waiting[2:]) > 0
  kept = [state.memory.own[("data",)][1] for _, state in passed]
  assert [int(own.used[0, 0]) for own in kept] == [0, 0, k[1], k[1], k[2], k[2], k[2]]
  assert [int(state.count[0]) for _, state in passed] == list(range(1, 8))


def test_a_residual_that_nothing_keeps_is_sent():
  """Once and for all, by a part without feedback: nothing is lost."""
  plain = gradcomp.dense(axis_name="data", exchange="psum", feedback=None)
  steps, sparse = gradients(3), redsync(0.02, None)
  found = trail(switch([1, 2], [sparse, plain, sparse]), steps)
  passed = [(output, state.inner) for output, state in found]
  check_conservation(passed, steps, None, False)
  waiting = [np.count_nonzero(state.residual["w"]) for _, state in passed]
  assert waiting[0] > 600 and waiting[1] == 0 and waiting[2] > 600


def test_a_parameter_may_be_named_like_what_owners_keep():
  """Only their own residuals must not wait through a transformation without them."""
  tx = switch([3], [redsync(0.02), redsync(0.02, None)])
  jax.eval_shape(tx.init, {".server_residual": jnp.ones((9, 70))})


def test_without_a_map_or_a_mesh_nothing_is_selected_again():
  """Nobody knows the workers; only what uses thresholds again needs them."""
  params, given = {"w": np.ones((10, 70), np.float32)}, {"w": np.ones((N, 10, 70))}
  exact, sampled = (redsync(0.05, selection=x) for x in ("exact", "sampled"))

  def update(tx):
    state = tx.init(params)
    assert state.memory is None
    return jax.jit(jax.vmap(lambda g: tx.update(g, state)[0], axis_name="data"))

  assert np.count_nonzero(update(exact)(given)["w"][0]) == 35
  with pytest.raises(ValueError, match=says("`memory`", "thresholds", "got none")):
    update(sampled)(given)
