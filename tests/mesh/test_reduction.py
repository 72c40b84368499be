"""Addends of plain jit are reduced over the axes of their types, and those alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.exchange import TwoShot
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.steps import OVER, N, explicit_mesh, put, unreduced_axes

BOTH = ("host", "chip")


def linear_loss(params, batch):
  """With one row a worker, its gradient is the row, exactly."""
  return sum(jnp.vdot(params[k], batch[k].mean(0)) for k in params)


def linear(workers):
  rows = laws.tree({"w": (40, 30), "b": (77,), "s": ()}, workers, seed=3)
  return jax.tree.map(lambda x: np.ones_like(x[0]), rows), rows


def update_in_jit(txs, mesh, axis_name):
  """``update`` of each in plain jit, and its state, which is made there."""
  params, rows = linear(mesh.size)

  @jax.jit
  def once(params, rows):
    grad_fn = gradcomp.value_and_grad(linear_loss, axis_name=axis_name)
    grads = grad_fn(params, rows)[1]
    assert unreduced_axes(grads) == set(np.ravel(axis_name))
    return [tx.update(grads, tx.init(params)) for tx in txs]

  with jax.set_mesh(mesh):
    return once(put(params, mesh), put(rows, mesh, axis_name))


def test_axes_are_taken_from_the_type():
  """Nothing is kept here: ``init`` does not know the axes that only types tell."""
  make = functools.partial(gradcomp.qsgd, bits=4, bucket_size=64, feedback=None)
  ways = ["all_gather", TwoShot(feedback=False)]
  txs = [make(exchange=x, **over) for x in ways for over in (OVER, {})]
  named, typed, two, two_typed = update_in_jit(txs, explicit_mesh(), "data")
  assert_same_bits((typed[0], two_typed[0]), (named[0], two[0]))


@pytest.mark.parametrize("exchange", ["two_shot", *slow("hierarchical")])
def test_two_axes_agree_with_shard_map(exchange):
  """Sums of addends, g / 8, and means of samples have the same bits."""
  mesh, over = explicit_mesh((2, 4), BOTH), {"axis_name": BOTH}
  how = {"exchange": exchange, "feedback": "error"} | over
  tx = gradcomp.qsgd(bits=4, bucket_size=64, **how)
  ((total, state),) = update_in_jit([tx], mesh, BOTH)

  def local(params, rows):
    _, grads = gradcomp.value_and_grad(linear_loss, **over)(params, rows)
    return tx.update(grads, tx.init(params))

  specs = gradcomp.state_specs(state, **over)
  places = {"in_specs": (P(), P(BOTH)), "out_specs": (P(), specs)}
  params, rows = linear(8)
  given = put(params, mesh), put(rows, mesh, BOTH)
  mean, kept = jax.jit(jax.shard_map(local, mesh=mesh, **places))(*given)
  assert_same_bits(total, mean)
  # A residual is kept in the units of what is sent: here addends, there samples.
  samples = jax.tree.map(lambda x: 8 * np.asarray(x), state.residual)
  assert_same_bits(samples, kept.residual)
  # What an owner keeps is what the sum, which is the mean, has lost.
  assert_same_bits(state.server_residual, kept.server_residual)


def test_an_addend_among_extra_arguments_is_the_workers_own():
  """It reaches a transformation on each worker as the gradient does."""
  square = lambda g, state, _, *, grad: (jax.tree.map(jnp.multiply, g, grad), state)
  inner = optax.GradientTransformationExtraArgs(optax.identity().init, square)
  own = gradcomp.wrappers.on_each_worker(inner, **OVER)
  tx, mesh, (params, rows) = gradcomp.dense(**OVER), explicit_mesh(), linear(N)

  def once(params, rows):
    grads = gradcomp.value_and_grad(linear_loss, **OVER)(params, rows)[1]
    return optax.chain(own, tx).update(grads, ((), tx.init(params)), grad=grads)[0]

  with jax.set_mesh(mesh):
    got = jax.jit(once)(put(params, mesh), put(rows, mesh, "data"))
  want = {name: np.mean(x**2, 0) for name, x in rows.items()}
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)


def test_reduced_gradients_are_refused():
  params, rows = linear(4)
  mesh, tx = explicit_mesh(), gradcomp.qsgd(bits=4, **OVER)
  with jax.set_mesh(mesh):
    state = tx.init(put(params, mesh))
  update = lambda params, rows: tx.update(jax.grad(linear_loss)(params, rows), state)
  with pytest.raises(ValueError, match=r"gradcomp\.value_and_grad.*defer_reduction"):
    jax.eval_shape(jax.jit(update), put(params, mesh), put(rows, mesh, "data"))


@pytest.mark.parametrize("asked, found", [("host", "chip"), (BOTH, "host")])
def test_another_axis_than_the_types_is_refused(asked, found):
  tx = gradcomp.qsgd(bits=4, axis_name=asked)
  message = rf"must be unreduced over .*got one over \('{found}',"
  with pytest.raises(ValueError, match=message):
    update_in_jit([tx], explicit_mesh((2, 2), BOTH), found)


MEMBERS = 3
OPTIONS = OVER | {"min_leaf_size": 0}
error4 = gradcomp.qsgd(bits=4, bucket_size=32, feedback="error", **OPTIONS)


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
  "guarded": (gradcomp.skip_nonfinite(error4, 3, **OVER), True, "float32"),
}
ROWS = [(name, kind) for name in CASES for kind in (AxisType.Explicit, AxisType.Auto)]


@pytest.mark.parametrize("name, kind", [ROWS[0], *slow(*ROWS[1:])])
def test_members_train_as_if_alone(name, kind):
  """Two steps, with the state of each member; the batch is the same for all."""
  tx, jitted, dtype = CASES[name]
  optimizer = optax.chain(tx, optax.sgd(0.5))

  def trained(step, init, params, x):
    state = init(params)
    for _ in range(2):
      params, state, _ = step(params, state, x)
    return params

  params, x = problem(dtype)
  step = modes.user_step(loss_fn, optimizer)
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
  """JAX knows the derivative of what value_and_grad returns."""
  params, x = problem("float32")
  member = jax.tree.map(lambda leaf: leaf[0], params)
  grad_fn = gradcomp.value_and_grad(loss_fn, **OVER)
  with jax.set_mesh(modes.mesh(N, kind)):
    placed = jax.device_put(member, P()), jax.device_put(x, P("data"))
    got = jax.jit(jax.grad(lambda *given: grad_fn(*given)[0]))(*placed)
  expected = jax.jit(jax.grad(loss_fn))(member, x)
  np.testing.assert_allclose(got["w"], expected["w"], atol=1e-6)
