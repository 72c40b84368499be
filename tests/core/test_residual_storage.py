"""Residuals of fewer bits keep what a step did not send, the same in all modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp import ErrorFeedback, MomentumFeedback
from gradcomp._src.core import residual_storage
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.residual import (
  CODEC,
  STORED,
  WORKERS,
  each_way,
  exchange,
  gradients,
  read,
  step_of,
  steps,
)

MODES = [
  (modes.EXPLICIT, "int8"),
  *slow((modes.EXPLICIT, "bfloat16"), (modes.AUTO, "bfloat16"), (modes.AUTO, "int8")),
  *slow(*((mode, stored) for mode in modes.MODES[:3] for stored in STORED)),
]


@pytest.mark.parametrize(("mode", "stored"), MODES)
def test_all_modes_have_the_same_bits(mode, stored):
  trees = [gradients(i) for i in range(3)]
  trees[1]["w"][2, 3, 5] = np.nan
  tx = exchange(stored)
  assert_same_bits(steps(mode, tx, trees), steps("vmap", tx, trees))


@each_way
@pytest.mark.parametrize("feedback", [ErrorFeedback, *slow(MomentumFeedback)])
def test_nothing_is_lost_but_by_rounding(stored, feedback):
  trees = [gradients(i) for i in range(4)]
  outputs, kept = steps("vmap", exchange(stored, feedback=feedback), trees)
  before = jax.tree.map(np.zeros_like, kept[0])
  momentum = jax.tree.map(np.zeros_like, trees[0])
  decay = 0.9 if feedback is MomentumFeedback else 0.0
  for tree, output, after in zip(trees, outputs, kept, strict=True):
    for name in tree:
      momentum[name] = decay * momentum[name] + tree[name]
      residual = after[name].reshape(tree[name].shape)
      wanted = (momentum[name] + before[name].reshape(residual.shape)).sum(axis=0)
      got = residual.sum(axis=0) + WORKERS * output[name][0]
      # Each worker rounds to a neighbor, and float32 rounds a few sums of about 10.
      step = step_of(stored, after[name])
      bound = step.reshape(residual.shape).sum(axis=0) + 1e-5
      # What is read is a neighbor of what was stored, whose step may be twice as long.
      assert np.all(np.abs(got - wanted) <= 2 * bound)
    before = after


@each_way
def test_rounding_is_unbiased_over_keys(stored):
  """A z-test of the mean error, with the variance that is known exactly."""
  x = gradients(5, 1)["w"][0]
  keys = 64

  def residual(stored, key):
    feedback = ErrorFeedback(residual_dtype=stored)
    tx = gradcomp.compress(CODEC, feedback=feedback, min_leaf_size=0, key=key)
    kept = tx.update(x, tx.init(x))[1].residual
    return residual_storage.read_residual(kept).astype(jnp.float32)

  def both(seeds):
    rounded = jax.vmap(lambda seed: residual(stored, jax.random.key(seed)))(seeds)
    return residual("float32", 0), rounded

  exact, every = (np.asarray(x, np.float64) for x in jax.jit(both)(np.arange(keys)))
  error = every - exact
  step = step_of(stored, exact.astype(np.float32))
  fraction = np.mod(exact / step, 1.0)
  variance = keys * np.sum(step**2 * fraction * (1 - fraction))
  assert len(np.unique(error.reshape(keys, -1), axis=0)) == keys
  # Beyond 4 standard deviations once in 16,000; the keys are fixed.
  assert abs(error.sum()) <= 4 * np.sqrt(variance)
  # And not because nothing was random: as much noise as there should be, within a few
  # times the relative deviation of 24,576 squares.
  assert np.sum(error**2) == pytest.approx(variance, rel=0.05)


def test_what_waits_decays():
  x = gradients(0)["w"][0]

  def kept(decay):
    feedback = ErrorFeedback(residual_decay=decay)
    tx = gradcomp.compress(CODEC, feedback=feedback, min_leaf_size=0)
    return tx.update(x, tx.init(x))[1].residual

  plain, decayed = jax.jit(lambda: (kept(1.0), kept(0.75)))()
  assert np.any(plain)
  assert_same_bits(decayed, plain * np.float32(0.75))


@each_way
def test_where_nothing_is_finite_the_old_residual_stays(stored):
  """A row is a block here, which has a scale of its own."""
  trees = [gradients(0), gradients(1)]
  trees[1]["w"][1, 2, ::32] = np.inf
  trees[1]["b"][2, 3] = np.nan
  _, (old, new) = steps("vmap", exchange(stored), trees)
  assert_same_bits(new["w"][:, 2], old["w"][:, 2])
  assert_same_bits(new["b"], old["b"])
  assert all(np.any(new["w"][:, i] != old["w"][:, i]) for i in (0, 1, 3, 4, 5))


@pytest.mark.slow
@each_way
def test_a_skipped_step_leaves_all_as_it_was(stored):
  tx = gradcomp.skip_nonfinite(exchange(stored), 3, axis_name="data")
  tree = gradients(0)
  update = modes.mapped("vmap", tx, WORKERS)
  params = jax.tree.map(lambda leaf: leaf[0], tree)
  _, state = update(tree, None, params)
  tree["w"][0, 0, 0] = np.nan
  _, after = update(tree, state, params)
  assert_same_bits(after.inner_state, state.inner_state)


@pytest.mark.parametrize("stored", ["int8", *slow("bfloat16")])
def test_a_transformation_without_feedback_sends_what_waits(stored):
  feedback = ErrorFeedback(residual_dtype=stored)
  first = gradcomp.compress(CODEC, feedback=feedback, min_leaf_size=0)
  tx = gradcomp.wrappers.switch([1], [first, gradcomp.dense()])
  x = gradients(3)["w"][0]
  update = jax.jit(tx.update)
  _, state = update(x, tx.init(x))
  waits = read(state.inner.residual)
  sent, state = update(np.zeros_like(x), state)
  assert waits.any()
  assert_same_bits(sent, waits)
  assert not read(state.inner.residual).any()
