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
KINDS = [AxisType.Explicit, *slow(AxisType.Auto)]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
error4 = gradcomp.qsgd(bits=4, bucket_size=32, feedback="error", **OPTIONS)


def loss_fn(params, x):
  y = jnp.tanh(x @ params["w"]) + params["b"] - x[:, ::-1]
  return jnp.mean(jnp.abs(y) ** 2)


def problem(dtype):
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {"w": normal(MEMBERS, 16, 16) / 4, "b": normal(MEMBERS, 16)}
  return jax.tree.map(lambda x: x.astype(dtype), params), normal(4 * N, 16)


@pytest.mark.parametrize(
  "tx, jitted, dtype",
  [
    (error4, True, "float32"),
    *slow(
      (error4, False, "float32"),
      (error4, True, "complex64"),
      (gradcomp.redsync(0.1, **OPTIONS), True, "float32"),
      (gradcomp.powersgd(**OPTIONS), True, "float32"),
      (gradcomp.skip_nonfinite(error4, 3, axis_name="data"), True, "float32"),
    ),
  ],
)
@each_kind
def test_members_train_as_if_alone(tx, jitted, dtype, kind):
  """Two steps, with the state of each member; the batch is the same for all."""
  optimizer = optax.chain(tx, optax.sgd(0.5))

  def step(params, state, x):
    grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, x)[1]
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params, x = problem(dtype)
  step = jax.jit(step) if jitted else step
  ensemble = jax.jit(jax.vmap(step, in_axes=(0, 0, None)))
  with jax.set_mesh(modes.mesh(N, kind)):
    x = jax.device_put(x, P("data"))
    placed = jax.device_put(params, P())
    together = placed, jax.jit(jax.vmap(optimizer.init))(placed)
    for _ in range(2):
      together = ensemble(*together, x)
    for i in range(MEMBERS):
      one = jax.device_put(jax.tree.map(lambda leaf, i=i: leaf[i], params), P())
      alone = one, optimizer.init(one)
      for _ in range(2):
        alone = jax.jit(step)(*alone, x)
      for name, leaf in alone[0].items():
        # Batched products add in another order, which may move a code by one level.
        np.testing.assert_allclose(together[0][name][i], leaf, atol=1e-2)


@each_kind
def test_losses_are_differentiated_in_plain_jit(kind):
  """Of what value_and_grad returns, JAX knows the derivative."""
  params, x = problem("float32")
  member = jax.tree.map(lambda leaf: leaf[0], params)
  grad_fn = gradcomp.value_and_grad(loss_fn, axis_name="data")
  with jax.set_mesh(modes.mesh(N, kind)):
    placed = jax.device_put(member, P()), jax.device_put(x, P("data"))
    got = jax.jit(jax.grad(lambda params, x: grad_fn(params, x)[0]))(*placed)
  expected = jax.grad(loss_fn)(member, x)
  np.testing.assert_allclose(got["w"], expected["w"], atol=1e-6)
