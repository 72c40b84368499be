"""inspect shows what zero loses, of gradients and of what changes in parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.codecs import QSGD
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.zero import loss_fn

WORKERS = 4
CODEC = QSGD(bits=4, bucket_size=32, rounding="nearest")


def zero(axis_name="data"):
  return gradcomp.parallel.zero(
    optax.sgd(0.1),
    grads=CODEC,
    params=CODEC,
    axis_name=axis_name,
    feedback="error",
    min_leaf_size=100,
  )


def test_numbers_are_those_of_numpy():
  """In the second step. Of what SGD does, the mean of all corrected is known."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {"w": normal(20, 48), "b": normal(7)}
  first, grads = (
    {name: normal(WORKERS, *x.shape) for name, x in params.items()} for _ in range(2)
  )
  tx = zero()

  def step(first, grads):
    updates, old = tx.update(first, tx.init(params), params)
    before = optax.apply_updates(params, updates)
    return before, old, *gradcomp.telemetry.inspected_update(tx, grads, old, before)

  of_all = jax.jit(jax.vmap(step, axis_name="data"))
  before, old, updates, after, found = of_all(first, grads)
  norm = lambda x: np.linalg.norm(np.asarray(x, np.float64))
  whole = {}
  for name, leaf in grads.items():
    metrics = jax.tree.map(lambda x: x[0], found.leaves[f"['{name}']"])
    change = jax.tree.map(lambda x: x[0], found.leaves[f"['{name}'] change"])
    kept = np.asarray(after.gradients.residual[name])
    corrected = leaf + np.asarray(old.gradients.residual[name])
    sent = (corrected - kept).mean(axis=0)
    # m of the first step is p - 0.1 times what was sent then, of zero residuals.
    master = params[name] - 0.1 * (
      first[name] - np.asarray(old.gradients.residual[name])
    ).mean(axis=0)
    wanted = master - 0.1 * sent - before[name][0]
    waits = wanted - updates[name][0]
    whole[name] = norm(waits)
    expected = {
      "gradient_norm": norm(leaf) / 2,
      "residual_norm": norm(kept) / 2,
      "relative_error": norm(kept) / norm(corrected),
      "owner_residual_norm": norm(waits),
    }
    for field, value in expected.items():
      # Differences of parameters of about 1, each rounded in float32.
      np.testing.assert_allclose(
        getattr(metrics, field), value, rtol=1e-4, atol=2e-6, err_msg=field
      )
    assert np.isnan(metrics.cosine)
    vectors = updates[name][0], wanted
    cosine = np.sum(np.multiply(*vectors)) / norm(vectors[0]) / norm(vectors[1])
    expected = {
      "gradient_norm": norm(wanted),
      "owner_residual_norm": norm(waits),
      "relative_error": norm(waits) / norm(wanted),
      "cosine": cosine,
      "zeros": np.mean(updates[name][0] == 0),
    }
    for field, value in expected.items():
      np.testing.assert_allclose(
        getattr(change, field), value, rtol=1e-4, atol=3e-6, err_msg=field
      )
  np.testing.assert_allclose(
    found.total.owner_residual_norm[0],
    np.hypot(whole["w"], whole["b"]),
    rtol=1e-4,
    atol=2e-6,
  )
  plan = gradcomp.explain(tx, params, workers=WORKERS)
  assert found.total.bytes_sent[0] == plan.bytes_sent


@pytest.mark.parametrize("axis_name", ["data", *slow(None)])
def test_a_train_step_shows_it_and_changes_nothing(axis_name):
  """Checked types; without an axis of the step, under Explicit axes."""
  mesh = modes.mesh(
    WORKERS, jax.sharding.AxisType.Auto if axis_name else jax.sharding.AxisType.Explicit
  )
  tx = zero()
  params = {"w": jnp.ones((20, 48)), "b": jnp.ones(7)}
  with jax.set_mesh(mesh):
    state = tx.init(params)
  step = gradcomp.make_train_step(
    loss_fn, tx, axis_name="data", mesh=mesh, donate=False
  )
  batch = jnp.arange(1.0, 1 + WORKERS)
  plain = step(params, state, batch)
  *seen, metrics = step(params, state, batch, inspect=True)
  assert_same_bits(seen, list(plain[:2]))
  leaves = metrics["inspection"].leaves
  assert set(leaves) == {"['b']", "['w']", "['b'] change", "['w'] change"}
  assert 0 < leaves["['w'] change"].cosine <= 1.000001
