"""Measures come back in the state, whose type stays, however residuals are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp._src.core import residual_storage
from gradcomp.state import CompressState
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits

WORKERS = 2


def test_update_takes_and_returns_states_of_their_own_type():
  """An optimizer may look at the type, and what a step keeps has no measures."""
  tx = gradcomp.qsgd(bits=4)
  seen = []

  def update(updates, state, params=None):
    seen.append(type(state))
    return tx.update(updates, state, params)

  grads = {"w": jnp.ones(4096)}
  optimizer = optax.GradientTransformation(tx.init, update)
  before = tx.init(grads)
  _, state, found = gradcomp.telemetry.inspected_update(optimizer, grads, before)
  assert set(seen) == {CompressState} and type(state) is CompressState
  assert found.total.zeros == 0
  assert jax.tree.structure(state) == jax.tree.structure(before)


@pytest.mark.parametrize("stored", ["int8", *slow("bfloat16")])
def test_residuals_of_few_bits_are_read(stored):
  """What is shown is what the next step adds to its gradient."""
  tx = gradcomp.onebit_sgd(
    axis_name="data",
    exchange="all_gather",
    feedback=gradcomp.ErrorFeedback(residual_dtype=stored),
    min_leaf_size=0,
  )

  def step(grads):
    state = tx.init(grads)
    _, after, found = gradcomp.telemetry.inspected_update(tx, grads, state)
    waits = residual_storage.read_residual(after.residual["w"]).astype(jnp.float32)
    return after, tx.update(grads, state)[1], waits, found.leaves["['w']"].residual_norm

  rng = np.random.default_rng(0)
  grads = {"w": rng.standard_normal((WORKERS, 5, 512)).astype(np.float32)}
  after, plain, waits, found = jax.jit(jax.vmap(step, axis_name="data"))(grads)
  assert_same_bits(after, plain)
  expected = np.sqrt(np.square(waits, dtype=np.float64).sum() / WORKERS)
  # Sums of 2,560 squares in float32.
  np.testing.assert_allclose(found, [expected] * WORKERS, rtol=1e-5)
