"""The study of Adam trains what it says, and compares ends seed by seed."""

import argparse
import math

import jax
import numpy as np
import optax
import pytest

from benchmarks.training import adam, adam_arms, adam_page


@pytest.fixture(scope="module")
def arrays():
  return adam.random_arrays()


def test_the_baseline_is_adamw_of_the_mean(arrays):
  """Against a loop of steps on one gradient of all workers' samples."""
  args = argparse.Namespace(steps=3, points=3, seeds=2, quick=True, small=False)
  ended = adam.run("transformer", adam_arms.BASELINE, arrays, args)
  found = adam.problem("transformer", arrays, adam.QUICK["transformer"])
  rate = optax.cosine_decay_schedule(2e-3, 3, alpha=0.1)
  tx = optax.adamw(rate, weight_decay=adam_arms.DECAY)
  key, first = jax.random.split(jax.random.key(1))
  params = found.init(first)
  state = tx.init(params)

  @jax.jit
  def step(params, state, key):
    of_worker = lambda i: found.draw(jax.random.fold_in(key, i))
    own = jax.vmap(of_worker)(np.arange(adam.WORKERS))
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), own)
    updates, state = tx.update(jax.grad(found.loss)(params, batch), state, params)
    params = optax.apply_updates(params, updates)
    return params, state, found.score(params)[0]

  for number in range(3):
    params, state, loss = step(params, state, jax.random.fold_in(key, number))
  # Adam's first steps have the size of the rate whatever the gradient is, so sums in
  # another order move elements whose gradient is next to zero.
  assert ended["test_loss"][1] == pytest.approx(float(loss), rel=1e-4)


def line(arm, *ends):
  return {"net": "lstm", "arm": arm, "steps": 8, "seeds": len(ends)} | {
    "parameters": 4,
    "workers": 4,
    "device": "cpu",
    "bytes_a_step": 8.0,
    "start": 0.0,
    "test_loss": ends,
    "accuracy": ends,
    "last_quarter": 0.1,
  }


def test_ends_are_compared_by_seeds():
  """A constant distance has no interval, however far apart the seeds are."""
  ends = np.array([1.0, 1.5, 2.0])
  lines = [line(adam_arms.BASELINE, *ends), line("close", *ends + math.log(1.005))]
  lines.append(line("far", *ends + math.log(1.02)))
  lines.append(line("gone", *ends + [0, 0, 400]))
  page = adam_page.markdown(lines)
  assert "| diverged | worse" in page
  assert "+0.50% ± 0.00% | within 1 %" in page
  assert "+2.00% ± 0.00% | worse" in page
  # Accuracies of these lines are their losses, which the points compare.
  assert "| +1.98 ± 0.00 | +2.00% ± 0.00%" in page
