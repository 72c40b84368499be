"""jax.vmap over a step in plain jit trains an ensemble, each member as if alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.plugins.slow_cases import slow
from tests.support import modes

N, MEMBERS = 4, 3
OPTIONS = {"axis_name": "data", "min_leaf_size": 0}
error4 = gradcomp.qsgd(bits=4, bucket_size=32, feedback="error", **OPTIONS)
grads_of = lambda: gradcomp.value_and_grad(loss_fn, axis_name="data")


def loss_fn(params, x):
  y = jnp.tanh(x @ params["w"]) + params["b"] - x[:, ::-1]
  return jnp.mean(jnp.abs(y) ** 2)


def problem(dtype):
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {"w": normal(MEMBERS, 16, 16) / 4, "b": normal(MEMBERS, 16)}
  return jax.tree.map(lambda x: x.astype(dtype), params), normal(4 * N, 16)


# A transformation, whether its step is jitted inside of the map, and the dtype.
CASES = {
  "qsgd": (error4, True, "float32"),
  "eager": (error4, False, "float32"),
  "complex": (error4, True, "complex64"),
  "redsync": (gradcomp.redsync(0.1, **OPTIONS), True, "float32"),
  "powersgd": (gradcomp.powersgd(**OPTIONS), True, "float32"),
  "guarded": (gradcomp.skip_nonfinite(error4, 3, axis_name="data"), True, "float32"),
}
ROWS = [(name, kind) for name in CASES for kind in (AxisType.Explicit, AxisType.Auto)]


@pytest.mark.parametrize("name, kind", [ROWS[0], *slow(*ROWS[1:])])
def test_members_train_as_if_alone(name, kind):
  """Two steps, with the state of each member; the batch is the same for all."""
  tx, jitted, dtype = CASES[name]
  optimizer = optax.chain(tx, optax.sgd(0.5))

  def step(params, state, x):
    updates, state = optimizer.update(grads_of()(params, x)[1], state, params)
    return optax.apply_updates(params, updates), state

  def trained(step, init, params, x):
    state = init(params)
    for _ in range(2):
      params, state = step(params, state, x)
    return params

  params, x = problem(dtype)
  step = jax.jit(step) if jitted else step
  every = jax.vmap(step, in_axes=(0, 0, None)), jax.vmap(optimizer.init)

  @jax.jit
  def both(params, x):
    members = [jax.tree.map(lambda leaf, i=i: leaf[i], params) for i in range(MEMBERS)]
    alone = [trained(step, optimizer.init, member, x) for member in members]
    return trained(*every, params, x), alone

  with jax.set_mesh(modes.mesh(N, kind)):
    together, alone = both(jax.device_put(params, P()), jax.device_put(x, P("data")))
  for i, member in enumerate(alone):
    for name, leaf in member.items():
      # Batched products add in another order, which may move a code by one level.
      np.testing.assert_allclose(together[name][i], leaf, atol=1e-2)


@pytest.mark.parametrize("kind", [AxisType.Explicit, *slow(AxisType.Auto)])
def test_losses_are_differentiated_in_plain_jit(kind):
  """Of what value_and_grad returns, JAX knows the derivative."""
  params, x = problem("float32")
  member = jax.tree.map(lambda leaf: leaf[0], params)
  with jax.set_mesh(modes.mesh(N, kind)):
    placed = jax.device_put(member, P()), jax.device_put(x, P("data"))
    got = jax.jit(jax.grad(lambda params, x: grads_of()(params, x)[0]))(*placed)
  expected = jax.jit(jax.grad(loss_fn))(member, x)
  np.testing.assert_allclose(got["w"], expected["w"], atol=1e-6)
