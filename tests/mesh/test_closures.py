"""Arrays of the mesh are arguments of a loss, or leaves of it, and not in closures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

import gradcomp
from gradcomp.codecs import Dense
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits

N = 4
OVER = {"axis_name": "data"}
BASE = None  # a global variable, which a test sets
dense = gradcomp.dense(**OVER)


def loss_of_all(params, x, base):
  return jnp.mean((x @ (base["w"] + params["a"])) ** 2) + base["scale"][0]


class Module(nnx.Module):
  """A module of flax, which is a tree."""

  def __init__(self, base):
    self.w, self.scale = nnx.Param(base["w"]), nnx.Variable(base["scale"])

  def __call__(self, params, x):
    return loss_of_all(params, x, {"w": self.w[...], "scale": self.scale[...]})


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


def loss_of_a_global(params, x):
  """The variable is read by a function inside."""
  return (lambda: loss_of_all(params, x, BASE))()


def of_a_global(base):
  globals()["BASE"] = base
  return loss_of_a_global


CLOSURES = {
  "closure": lambda base: lambda params, x: loss_of_all(params, x, base),
  "global": of_a_global,
  "jitted": lambda base: jax.jit(CLOSURES["closure"](base)),
}
tree_of = lambda base: Partial(loss_of_all, base=base)
# Losses that are trees, and the losses of three arguments that they are. An array that
# is sharded like the batch is a worker's own rows there.
TREES = {
  "rules": (lambda base: Partial(loss_with_rules, base=base), loss_with_rules),
  "nnx": (Module, loss_of_all),
}


@pytest.fixture(scope="module")
def problem():
  """Parameters, rows and a base on the mesh."""
  mesh = modes.mesh(N, AxisType.Explicit)
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
  base = {"w": normal(8, 4), "scale": np.full(1, 3, np.float32)}
  params, base = put(({"a": normal(8, 4)}, base), P())
  base["rows"] = put(normal(8 * N, 8), P("data"))
  return mesh, params, put(normal(8 * N, 8), P("data")), base


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


@pytest.mark.parametrize("way", ["closure", "jitted", "global"])
def test_arrays_in_closures_are_refused(way, problem):
  """Those of an enclosing jit, which are tracers; a global variable is an array."""
  _, params, x, base = problem
  of_base = lambda params, x, base: reduced_gradient(CLOSURES[way](base))(params, x)
  try:
    if way == "global":
      assert_refused(reduced_gradient(CLOSURES[way](base)), params, x)
    else:
      assert_refused(functools.partial(jax.eval_shape, of_base), params, x, base)
  finally:
    globals()["BASE"] = None


@pytest.mark.parametrize("kind", ["rules", *slow("nnx")])
def test_leaves_of_a_callable_tree_are_arguments(kind, problem):
  """The bits are those of an argument; the loss is traced once, and left as it was."""
  _, params, x, base = problem
  make, loss_fn = TREES[kind]
  expected = jax.jit(reduced_gradient(loss_fn))(params, x, base)
  traces = []

  def counted(own_loss, *args):
    traces.append(1)
    return own_loss(*args)

  @jax.jit
  def run(params, x, base):
    held = Partial(counted, make(base))
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
  assert_refused(one, CLOSURES["closure"](base), 0.5)
  assert_refused(one, tree_of(base), rate, cures=OF_OPTIMIZER)


def test_an_array_that_another_axis_shards():
  """Beside an Explicit axis that is not the workers', JAX says it in other words."""
  mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Explicit,) * 2)
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape, np.float32)
  base = {"w": put(normal(8, 4), None, "model"), "scale": put(normal(1))}
  args = {"a": put(normal(8, 4), None, "model")}, put(normal(16, 8), "data")
  with jax.set_mesh(mesh):
    got = jax.jit(reduced_gradient(tree_of(base)))(*args)
    assert_same_bits(got, jax.jit(reduced_gradient(loss_of_all))(*args, base))
    with pytest.raises(ValueError, match="8,4@model") as caught:
      jax.eval_shape(reduced_gradient(CLOSURES["closure"](base)), *args)
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


def local(inner):
  given = {"every": 1, "codec": Dense()} | OVER
  return gradcomp.local.local_steps(inner, optax.sgd(1.0), **given)


def test_a_function_that_update_is_given(problem):
  """A line search of each worker reads its rows as leaves, and not in a closure."""
  mesh, params, x, base = problem
  tx = local(optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8)))

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


def test_numbers_of_an_optimizer(problem):
  """Injected around a transformation they would be in closures; in it, in the state."""
  mesh, params, x, base = problem
  around = lambda inner: gradcomp.parallel.zero(
    inner, grads=Dense(), params=Dense(), **OVER
  )

  def run(tx):
    grad_fn = gradcomp.value_and_grad(tree_of(base), **OVER)
    step = lambda *given: tx.update(grad_fn(*given)[1], tx.init(params), params)[0]
    return jax.eval_shape(step, params, x)["a"]

  inject = optax.inject_hyperparams
  with jax.set_mesh(mesh):
    tx = inject(lambda rate: around(optax.adam(rate)))(rate=0.1)
    assert_refused(run, tx, cures=OF_OPTIMIZER)
    assert run(around(inject(optax.adam)(learning_rate=0.1))).shape == (8, 4)
