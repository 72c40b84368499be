"""Arrays of the mesh are arguments of a loss, or leaves of it, and not in closures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

import gradcomp
from gradcomp.codecs import Dense
from tests.support.assertions import assert_same_bits
from tests.support.cases import steps
from tests.support.cases.local import local
from tests.support.cases.parallel import numbers

N, OVER, dense = steps.N, steps.OVER, steps.dense


def loss_of_all(params, x, base):
  return jnp.mean((x @ (base["w"] + params["a"])) ** 2) + base["scale"][0]


@jax.custom_vjp
def squared(x):
  return x**2


squared.defvjp(lambda x: (x**2, x), lambda x, cotangent: (2 * x * cotangent,))


def loss_with_rules(params, x, base):
  """With a rule of its own, a scan, and a branch, all of which read the base."""
  step = lambda total, row: (total + jnp.mean(squared(row @ base["w"])), None)
  total, _ = jax.lax.scan(step, jnp.float32(0), x)
  branch = jax.lax.cond(x[0, 0] > 0, lambda: base["scale"][0], lambda: jnp.float32(0))
  rows = jnp.mean(base["rows"] * x)  # fails but for a worker's own
  return total + loss_of_all(params, x, base) + branch + rows


closed = lambda base: lambda params, x: loss_of_all(params, x, base)
tree_of = lambda base: Partial(loss_of_all, base=base)


@pytest.fixture(scope="module")
def problem():
  """Parameters, rows and a base on the mesh."""
  mesh = steps.explicit_mesh()
  base = {"w": numbers(8, 4), "scale": np.full(1, 3, np.float32)}
  params, base = steps.put(({"a": numbers(8, 4, seed=1)}, base), mesh)
  base["rows"] = steps.put(numbers(8 * N, 8, seed=2), mesh, "data")
  return mesh, params, steps.put(numbers(8 * N, 8, seed=3), mesh, "data"), base


def reduced_gradient(loss):
  """A function that returns the loss and the reduced gradient."""

  def run(*args):
    value, grads = gradcomp.value_and_grad(loss, **OVER)(*args)
    return value, dense.update(grads, dense.init(args[0]))[0]

  return run


OF_LOSS = "`loss_fn`", "params, batch, array", "Partial"
OF_OPTIMIZER = "`optimizer`", "inject_hyperparams"


def assert_refused(step, *args, cures=OF_LOSS):
  """JAX's error has a note with the cures. It fails on the day JAX allows closures."""
  with pytest.raises(NotImplementedError, match="shard_map") as caught:
    step(*args)
  (note,) = [x for x in caught.value.__notes__ if "closes over" in x]
  assert all(cure in note for cure in cures), note


def test_arrays_in_closures_are_refused(problem):
  """Also those of an enclosing jit, which are tracers."""
  _, params, x, base = problem
  assert_refused(reduced_gradient(closed(base)), params, x)
  of_base = lambda params, x, base: reduced_gradient(closed(base))(params, x)
  assert_refused(functools.partial(jax.eval_shape, of_base), params, x, base)


def test_leaves_of_a_callable_tree_are_arguments(problem):
  """The bits are those of an argument; the loss is traced once, and left as it was."""
  _, params, x, base = problem
  expected = jax.jit(reduced_gradient(loss_with_rules))(params, x, base)
  traces = []

  def counted(own_loss, *args):
    traces.append(1)
    return own_loss(*args)

  @jax.jit
  def run(params, x, base):
    held = Partial(counted, Partial(loss_with_rules, base=base))
    leaves = jax.tree.leaves(held)
    result = reduced_gradient(held)(params, x)
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(held), strict=True))
    return result

  assert_same_bits(run(params, x, base), expected)
  assert len(traces) == 1  # a second trace would double the time


def test_a_train_step(problem):
  """The loss may be a tree; neither it nor an optimizer may have closures."""
  mesh, params, x, base = problem
  base = {name: base[name] for name in ("w", "scale")}  # further arguments are whole
  rate = jax.device_put(jnp.float32(0.5), NamedSharding(mesh, P()))

  def one(loss_fn, rate, *extra):
    tx = optax.chain(dense, optax.sgd(rate))
    with jax.set_mesh(mesh):
      state = jax.jit(tx.init)(params)
    step = gradcomp.make_train_step(loss_fn, tx, mesh=mesh, donate=False, **OVER)
    after, _, metrics = step(params, state, x, *extra)
    return after, metrics["loss"]

  assert_same_bits(one(tree_of(base), 0.5), one(loss_of_all, 0.5, base))
  assert_refused(one, closed(base), 0.5)
  assert_refused(one, tree_of(base), rate, cures=OF_OPTIMIZER)


def test_an_array_that_another_axis_shards():
  """Beside an Explicit axis that is not the workers', JAX says it in other words."""
  mesh = steps.explicit_mesh((2, 2), ("data", "model"))
  put = lambda seed, shape, *spec: steps.put(numbers(*shape, seed=seed), mesh, *spec)
  base = {"w": put(0, (8, 4), None, "model"), "scale": put(1, (1,))}
  args = {"a": put(2, (8, 4), None, "model")}, put(3, (16, 8), "data")
  with jax.set_mesh(mesh):
    got = jax.jit(reduced_gradient(tree_of(base)))(*args)
    assert_same_bits(got, jax.jit(reduced_gradient(loss_of_all))(*args, base))
    with pytest.raises(ValueError, match="8,4@model") as caught:
      jax.eval_shape(reduced_gradient(closed(base)), *args)
  assert any("`loss_fn` closes over" in note for note in caught.value.__notes__)


def test_other_errors_of_a_loss_stay_what_they_are(problem):
  """JAX raises no ValueError for closures on a mesh of this one axis."""
  _, params, x, _ = problem
  for kind in (NotImplementedError, ValueError):

    def loss_fn(params, x, kind=kind):
      raise kind("of the user")

    with pytest.raises(kind, match="of the user") as caught:
      jax.eval_shape(reduced_gradient(loss_fn), params, x)
    notes = [x for x in caught.value.__notes__ if "closes over" in x]
    assert len(notes) == (kind is NotImplementedError)
    assert all(x.startswith("If the error above is about") for x in notes)


def test_a_function_that_update_is_given(problem):
  """A line search of each worker reads its rows as leaves, and not in a closure."""
  mesh, params, x, base = problem
  inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8))
  tx = local(inner, optax.sgd(1.0), Dense(), every=1)

  def step(given, params, state, x, base):
    value, grads = gradcomp.value_and_grad(tree_of(base), **OVER)(params, x)
    value_fn = Partial(lambda params: loss_of_all(params, x, base))
    if given:
      value_fn = Partial(loss_of_all, x=x, base=base)
    more = dict(value=value, grad=grads, value_fn=value_fn)
    return tx.update(grads, state, params, **more)[0]["a"]

  with jax.set_mesh(mesh):
    args = params, tx.init(params), x, base
    cures = "`optimizer`", "value_fn=jax.tree_util.Partial(f, batch=batch)"
    refused = lambda: jax.eval_shape(functools.partial(step, False), *args)
    assert_refused(refused, cures=cures)
    assert np.any(jax.jit(functools.partial(step, True))(*args))


def test_numbers_that_are_injected_around_zero_would_be_in_closures(problem):
  """Inside of it they are in the state: tests/transforms/test_wrappers.py."""
  mesh, params, x, base = problem
  zero = functools.partial(gradcomp.parallel.zero, grads=Dense(), params=Dense())
  around = lambda rate: zero(optax.adam(rate), **OVER)
  tx = optax.inject_hyperparams(around)(rate=0.1)
  grads = lambda *given: gradcomp.value_and_grad(tree_of(base), **OVER)(*given)[1]
  step = lambda *given: tx.update(grads(*given), tx.init(params), params)
  with jax.set_mesh(mesh):
    assert_refused(jax.eval_shape, step, params, x, cures=OF_OPTIMIZER)
