"""A step whose gradient is not finite on one worker is skipped on all workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits

WORKERS = 4

# With residuals of workers and of owners, both of which a NaN would touch.
exchange4 = gradcomp.qsgd(
  4, axis_name="data", feedback="error", exchange="two_shot", min_leaf_size=0
)
chained = optax.chain(exchange4, optax.trace(0.5))
skipping = gradcomp.skip_nonfinite(chained, 2, axis_name="data")


def gradients(seed, bad=None):
  """Of four workers, the third of which may hold one number that is bad."""
  w = laws.tree({"w": (32, 64)}, WORKERS, seed=seed)["w"]
  if bad is not None:
    w[2, 3, 4] = bad
  return {"w": w, "b": w[:, 0]}


def steps(mode, tx, trees):
  """The outputs and states of all workers, one for each tree of gradients."""
  params = jax.tree.map(lambda leaf: leaf[0], trees[0])
  update, state, held = modes.started(mode, tx, WORKERS).update, None, []
  for tree in trees:
    output, state = update(tree, state, params)
    held.append(jax.device_get((output, state)))
  return zip(*held, strict=True)


@pytest.mark.parametrize(
  "mode", ["vmap", modes.EXPLICIT, *slow(modes.AUTO, *modes.MODES[:3])]
)
@pytest.mark.parametrize("bad", [np.nan, *slow(np.inf)], ids=repr)
def test_the_run_goes_on_as_if_there_had_been_no_such_step(mode, bad):
  first, second = gradients(0), gradients(1)
  outputs, states = steps(mode, skipping, [first, gradients(7, bad), second])
  expected, plain = steps(mode, chained, [first, second])
  zeros = jax.tree.map(np.zeros_like, expected[0])
  assert_same_bits(list(outputs), [expected[0], zeros, expected[1]])
  assert_same_bits([s.inner_state for s in states], [plain[0], plain[0], plain[1]])
  for leaf in jax.tree.leaves(outputs):
    assert_same_bits(leaf, np.stack([leaf[0]] * WORKERS))
  found = [[np.unique(x).tolist() for x in state[:3]] for state in states]
  assert found == [[[0], [True], [0]], [[1], [False], [1]], [[0], [True], [1]]]


def test_workers_skip_what_reaches_no_other_worker():
  """Here no exchange sends the NaN to the others."""
  tx = gradcomp.skip_nonfinite(optax.identity(), 2, axis_name="data")
  update = jax.vmap(lambda grads: tx.update(grads, tx.init(grads)), axis_name="data")
  output, state = jax.jit(update)(gradients(0, np.nan))
  assert not any(leaf.any() for leaf in jax.tree.leaves(output))
  assert state.total_notfinite.tolist() == [1] * WORKERS


def test_as_optax_does_on_one_device():
  """Also once the steps in a row are too many, and the next is applied.

  Optax does not see what that has done to the state, which spoils all updates since.
  """
  guards = gradcomp.skip_nonfinite, optax.apply_if_finite
  both = [guard(optax.trace(0.5), 1) for guard in guards]
  states = [tx.init(jnp.ones(3)) for tx in both]
  assert states[0]._fields == states[1]._fields
  updates = [jax.jit(tx.update) for tx in both]
  for x in (1.0, np.nan, 2.0, np.nan, np.inf, np.nan, 1.0):
    each = zip(updates, states, strict=True)
    results = [update(np.float32([1.0, x, 3.0]), state) for update, state in each]
    states = [state for _, state in results]
    counts = [int(state.notfinite_count) for state in states]
    if counts != [4, 0]:
      assert_same_bits(*((output, *state) for output, state in results))
  assert counts == [4, 0]


def test_workers_agree_by_one_byte():
  """Beside what the exchange sends, and named as no mean; explain looks inside."""
  params, given = {"w": np.zeros((32, 64), np.float32)}, {"w": gradients(0)["w"]}
  guard = gradcomp.skip_nonfinite(exchange4, 1, axis_name="data")
  plain, guarded = (modes.collectives(tx, params, given) for tx in (exchange4, guard))
  extra = [c for c in guarded if c.kind == "all-reduce"]
  assert [(c.dtype, c.shapes) for c in extra] == [("u8", ((),))]
  sent = [sum(c.bytes_sent for c in found) for found in (plain, guarded)]
  assert sent[1] - sent[0] == 2
  said = [gradcomp.explain(tx, params, workers=4) for tx in (skipping, chained)]
  assert said[0].leaves == said[1].leaves
