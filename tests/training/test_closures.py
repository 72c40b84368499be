"""A loss may read arrays of the mesh from where it closes over them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits, says

WORKERS = 4
BASE = None  # a global variable, which a test sets


def loss_of_all(params, x, base):
  return jnp.mean((x @ (base["w"] + params["a"])) ** 2) + base["scale"][0]


def loss_of_a_global(params, x):
  """The variable is read by a function inside."""
  return (lambda: loss_of_all(params, x, BASE))()


class Model:
  """What holds its arrays in attributes, one in another object."""

  def __init__(self, base):
    self.scale = base["scale"]
    self.weights = Weights(base["w"])

  def loss(self, params, x):
    return loss_of_all(params, x, {"w": self.weights.w, "scale": self.scale})

  __call__ = loss


class Weights:
  def __init__(self, w):
    self.w = w
    self.owner = [self]  # what holds itself


class Hidden:
  """What nobody can look into."""

  __slots__ = ("base",)


def hidden(base):
  """A loss that reads what gradcomp does not find."""
  place = Hidden()
  place.base = base
  return lambda params, x: loss_of_all(params, x, place.base)


def of_a_closure(base):
  return lambda params, x: loss_of_all(params, x, base)


def of_a_default(base):
  def loss(params, x, base=base):
    return loss_of_all(params, x, base)

  return loss


LOSSES = {
  "closure": of_a_closure,
  "default": of_a_default,
  "partial": lambda base: functools.partial(loss_of_all, base=base),
  "jitted": lambda base: jax.jit(of_a_closure(base)),
  "checkpointed": lambda base: jax.checkpoint(of_a_closure(base)),
  "method": lambda base: Model(base).loss,
  "object": Model,
  "tree": lambda base: jax.tree_util.Partial(loss_of_all, base=base),
}


@pytest.fixture(scope="module")
def problem():
  """Parameters, rows and a base on the mesh, and what a loss of all three gives."""
  mesh = modes.mesh(WORKERS, AxisType.Explicit)
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
  params, base = put(({"a": normal(8, 4)}, {"w": normal(8, 4), "scale": [3.0]}), P())
  base["scale"] = put(np.full(1, 3, np.float32), P())
  x = put(normal(8 * WORKERS, 8), P("data"))
  expected = jax.jit(reduced_gradient(loss_of_all))(params, x, base)
  return mesh, params, x, base, expected


def reduced_gradient(loss):
  """A function that returns the loss and the reduced gradient."""

  def run(*args):
    loss_and_grads = gradcomp.value_and_grad(loss, axis_name="data")(*args)
    tx = gradcomp.dense(axis_name="data")
    return loss_and_grads[0], tx.update(loss_and_grads[1], tx.init(args[0]))[0]

  return run


@pytest.mark.parametrize(
  "way",
  ["closure", "method", "jitted", *slow("default", "partial", "checkpointed")]
  + slow("object", "tree"),
)
def test_arrays_are_found_where_functions_hold_them(way, problem):
  """Those of an enclosing jit, which are tracers."""
  _, params, x, base, expected = problem

  @jax.jit
  def run(params, x, base):
    return reduced_gradient(LOSSES[way](base))(params, x)

  assert_same_bits(run(params, x, base), expected)


def test_a_global_variable_of_the_users_own(problem, monkeypatch):
  _, params, x, base, expected = problem
  monkeypatch.setitem(globals(), "BASE", base)
  assert_same_bits(jax.jit(reduced_gradient(loss_of_a_global))(params, x), expected)
  assert BASE is base  # nothing was changed for that


def test_outside_of_jit(problem):
  _, params, x, base, expected = problem
  loss, _ = gradcomp.value_and_grad(of_a_closure(base), axis_name="data")(params, x)
  np.testing.assert_allclose(loss, expected[0], rtol=1e-6)  # other fusions


def test_an_array_that_is_cut_like_the_batch(problem):
  """Each worker reads its own rows, as of an argument."""
  _, params, x, base, expected = problem

  @jax.jit
  def run(params, x, base):
    loss_fn = lambda params, first: loss_of_all(params, x, base) + 0 * first[0]
    return reduced_gradient(loss_fn)(params, x[:, 0])

  assert_same_bits(run(params, x, base), expected)


def test_statistics_of_a_train_step_before(problem):
  """The first step reads an array of one device; the second, one of the mesh."""
  mesh, params, x, base, _ = problem
  optimizer = optax.chain(gradcomp.dense(axis_name="data"), optax.sgd(0.1))
  with jax.set_mesh(mesh):
    state = optimizer.init(params)

  @jax.jit
  def step(params, state, statistics, x):
    def loss_fn(params, x):
      mean = 0.9 * statistics + 0.1 * jnp.mean(x, axis=0)
      return loss_of_all(params, x - mean, base), mean

    grad_fn = gradcomp.value_and_grad(loss_fn, axis_name="data", has_aux=True)
    (loss, statistics), grads = grad_fn(params, x)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, statistics, loss

  statistics, losses = jnp.zeros(8), []
  for _ in range(3):
    params, state, statistics, loss = step(params, state, statistics, x)
    losses.append(loss)
  assert losses[2] < losses[1] < losses[0]
  np.testing.assert_allclose(statistics, 0.271 * np.mean(x, 0), rtol=1e-5, atol=1e-7)


def test_a_loss_and_a_learning_rate_of_a_train_step(problem):
  mesh, params, x, base, expected = problem
  rate = jax.device_put(jnp.float32(0.5), NamedSharding(mesh, P()))
  optimizer = optax.chain(gradcomp.dense(axis_name="data"), optax.sgd(rate))
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  step = gradcomp.make_train_step(
    of_a_closure(base), optimizer, axis_name="data", mesh=mesh, donate=False
  )
  after, _, metrics = step(params, state, x)
  # The mean of four, or a sum of addends divided by four: XLA fuses them differently.
  np.testing.assert_allclose(metrics["loss"], expected[0], rtol=1e-6)
  wanted = params["a"] - 0.5 * expected[1]["a"]
  np.testing.assert_allclose(after["a"], wanted, rtol=1e-6, atol=1e-6)


def test_an_array_that_another_axis_cuts():
  """Beside an Explicit axis that is not the workers', JAX says it in other words."""
  kinds = (AxisType.Explicit,) * 2
  mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=jax.devices()[:4])
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  base = {"w": put(normal(8, 4), None, "model"), "scale": put(np.ones(1, np.float32))}
  args = {"a": put(normal(8, 4), None, "model")}, put(normal(16, 8), "data")
  with jax.set_mesh(mesh):
    got = jax.jit(reduced_gradient(of_a_closure(base)))(*args)
    expected = jax.jit(reduced_gradient(loss_of_all))(*args, base)
    assert_same_bits(got, expected)
    with pytest.raises(ValueError, match=says("`loss_fn`", "[8,4@model]")):
      jax.jit(reduced_gradient(hidden(base)))(*args)


def test_what_is_not_found_is_an_error_that_says_what_to_do(problem):
  _, params, x, base, _ = problem
  parts = ("`loss_fn`", "[8,4]", "loss_fn(params, batch, array)")
  with pytest.raises(ValueError, match=says(*parts)):
    jax.jit(reduced_gradient(hidden(base)))(params, x)


def test_other_errors_of_a_loss_stay_what_they_are(problem):
  _, params, x, _, _ = problem

  def loss_fn(params, x):
    raise NotImplementedError("of the user")

  with pytest.raises(NotImplementedError, match="of the user"):
    jax.jit(reduced_gradient(loss_fn))(params, x)
