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
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits

WORKERS = 4
BASE = None  # a global variable, which a test sets


def loss_of_all(params, x, base):
  return jnp.mean((x @ (base["w"] + params["a"])) ** 2) + base["scale"][0]


def loss_of_a_global(params, x):
  """The variable is read by a function inside."""
  return (lambda: loss_of_all(params, x, BASE))()


class Model:
  """Holds its arrays in attributes, and is no tree."""

  def __init__(self, base):
    self.base = base

  def __call__(self, params, x):
    return loss_of_all(params, x, self.base)


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
  relu = jax.nn.relu(x @ (base["w"] + params["a"]))
  return (
    total
    + jnp.mean(relu)
    + jax.lax.cond(x[0, 0] > 0, lambda: base["scale"][0], lambda: jnp.float32(0))
  )


def of_a_default(base):
  def loss(params, x, base=base):
    return loss_of_all(params, x, base)

  return loss


CLOSURES = {
  "closure": lambda base: lambda params, x: loss_of_all(params, x, base),
  "default": of_a_default,
  "partial": lambda base: functools.partial(loss_of_all, base=base),
  "jitted": lambda base: jax.jit(CLOSURES["closure"](base)),
  "checkpointed": lambda base: jax.checkpoint(CLOSURES["closure"](base)),
  "method": lambda base: Model(base).__call__,
  "object": Model,
}
TREES = {
  "partial": lambda base: Partial(loss_of_all, base=base),
  "nnx": Module,
}


@pytest.fixture(scope="module")
def problem():
  """Parameters, rows and a base on the mesh."""
  mesh = modes.mesh(WORKERS, AxisType.Explicit)
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
  params, base = put(({"a": normal(8, 4)}, {"w": normal(8, 4)}), P())
  base["scale"] = put(np.full(1, 3, np.float32), P())
  return mesh, params, put(normal(8 * WORKERS, 8), P("data")), base


def reduced_gradient(loss, **options):
  """A function that returns the loss and the reduced gradient."""

  def run(*args):
    grad_fn = gradcomp.value_and_grad(loss, axis_name="data", **options)
    value, grads = grad_fn(*args)
    tx = gradcomp.dense(axis_name="data")
    return value, tx.update(grads, tx.init(args[0]))[0]

  return run


OF_LOSS = "`loss_fn`", "params, batch, array", "Partial"


def assert_refused(step, *args, cures=OF_LOSS):
  """JAX's error has a note with the cures. It fails on the day JAX allows closures."""
  with pytest.raises(NotImplementedError, match="shard_map") as caught:
    step(*args)
  (note,) = [x for x in caught.value.__notes__ if "closes over" in x]
  assert all(cure in note for cure in cures), note


@pytest.mark.parametrize(
  "way",
  [
    "closure",
    "jitted",
    *slow("default", "partial", "checkpointed", "method", "object"),
  ],
)
def test_arrays_in_closures_are_refused(way, problem):
  """Those of an enclosing jit, which are tracers."""
  _, *args = problem

  @jax.jit
  def run(params, x, base):
    return reduced_gradient(CLOSURES[way](base))(params, x)

  assert_refused(run, *args)


def test_a_global_variable_is_refused(problem, monkeypatch):
  _, params, x, base = problem
  monkeypatch.setitem(globals(), "BASE", base)
  assert_refused(reduced_gradient(loss_of_a_global), params, x)
  assert BASE is base


@pytest.mark.parametrize("kind", ["partial", *slow("nnx")])
def test_leaves_of_a_callable_tree_are_arguments(kind, problem):
  """The bits are those of an argument, and the tree is left as it was."""
  _, params, x, base = problem
  expected = jax.jit(reduced_gradient(loss_of_all))(params, x, base)

  @jax.jit
  def run(params, x, base):
    loss_fn = TREES[kind](base)
    leaves = jax.tree.leaves(loss_fn)
    result = reduced_gradient(loss_fn)(params, x)
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(loss_fn), strict=True))
    return result

  assert_same_bits(run(params, x, base), expected)
  loss, _ = reduced_gradient(TREES[kind](base))(params, x)  # outside of jit
  np.testing.assert_allclose(loss, expected[0], rtol=1e-6)  # other fusions


def test_a_tree_with_rules_of_its_own(problem):
  """A scan, a branch and a custom_vjp inside of the loss read an argument's leaves."""
  _, params, x, base = problem
  expected = jax.jit(reduced_gradient(loss_with_rules))(params, x, base)
  run = lambda base: reduced_gradient(Partial(loss_with_rules, base=base))(params, x)
  assert_same_bits(jax.jit(run)(base), expected)


def test_an_array_that_is_sharded_like_the_batch(problem):
  """Each worker reads its own rows, as of an argument."""
  _, params, x, _ = problem
  paired = lambda params, first, x: loss_of_all(params, x, base_of(first))
  base_of = lambda first: {"w": jnp.ones((8, 4)), "scale": first[:1]}
  expected = jax.jit(reduced_gradient(paired))(params, x[:, 0], x)
  run = lambda x: reduced_gradient(Partial(paired, x=x))(params, x[:, 0])
  assert_same_bits(jax.jit(run)(x), expected)


def test_a_loss_is_traced_once(problem):
  """A second trace would double the time."""
  _, params, x, base = problem
  traces = []

  def loss_fn(params, x, base):
    traces.append(1)
    return loss_of_all(params, x, base)

  run = lambda base: reduced_gradient(Partial(loss_fn, base=base))(params, x)
  jax.jit(run).trace(base)
  assert len(traces) == 1


def test_statistics_of_a_train_step_before(problem):
  """They are an argument of the loss, and come back as its aux, [8]."""
  mesh, params, x, _ = problem
  optimizer = optax.chain(gradcomp.dense(axis_name="data"), optax.sgd(0.1))
  with jax.set_mesh(mesh):
    state = optimizer.init(params)

  def loss_fn(params, x, statistics):
    mean = 0.9 * statistics + 0.1 * jnp.mean(x, axis=0)
    return loss_of_all(params, x - mean, {"w": 1.0, "scale": jnp.ones(1)}), mean

  @jax.jit
  def step(params, state, statistics, x):
    grad_fn = gradcomp.value_and_grad(loss_fn, axis_name="data", has_aux=True)
    (loss, statistics), grads = grad_fn(params, x, statistics)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, statistics, loss

  statistics, losses = jnp.zeros(8), []
  for _ in range(3):
    params, state, statistics, loss = step(params, state, statistics, x)
    losses.append(loss)
  assert losses[2] < losses[1] < losses[0]
  np.testing.assert_allclose(statistics, 0.271 * np.mean(x, 0), rtol=1e-5, atol=1e-7)


def test_a_train_step(problem):
  """The loss may be a tree; neither it nor an optimizer may have closures."""
  mesh, params, x, base = problem
  dense = gradcomp.dense(axis_name="data")
  rate = jax.device_put(jnp.float32(0.5), NamedSharding(mesh, P()))

  def one(loss_fn, rate, *extra):
    tx = optax.chain(dense, optax.sgd(rate))
    with jax.set_mesh(mesh):
      state = tx.init(params)
    options = dict(axis_name="data", mesh=mesh, donate=False)
    step = gradcomp.make_train_step(loss_fn, tx, **options)
    after, _, metrics = step(params, state, x, *extra)
    return after, metrics["loss"]

  assert_same_bits(one(TREES["partial"](base), 0.5), one(loss_of_all, 0.5, base))
  assert_refused(one, CLOSURES["closure"](base), 0.5)
  cures = "`optimizer`", "inject_hyperparams"
  assert_refused(one, TREES["partial"](base), rate, cures=cures)


@pytest.mark.parametrize("way", ["partial", "closure"])
def test_an_array_that_another_axis_shards(way):
  """Beside an Explicit axis that is not the workers', JAX says it in other words."""
  kinds = (AxisType.Explicit,) * 2
  mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=jax.devices()[:4])
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  base = {"w": put(normal(8, 4), None, "model"), "scale": put(np.ones(1, np.float32))}
  args = {"a": put(normal(8, 4), None, "model")}, put(normal(16, 8), "data")
  with jax.set_mesh(mesh):
    if way == "partial":
      got = jax.jit(reduced_gradient(TREES["partial"](base)))(*args)
      expected = jax.jit(reduced_gradient(loss_of_all))(*args, base)
      assert_same_bits(got, expected)
      return
    with pytest.raises(ValueError, match="8,4@model") as caught:
      jax.jit(reduced_gradient(CLOSURES["closure"](base)))(*args)
    assert any("`loss_fn` closes over" in note for note in caught.value.__notes__)


def test_other_errors_of_a_loss_stay_what_they_are(problem):
  """JAX raises no ValueError for closures on a mesh of this one axis."""
  _, params, x, _ = problem
  for kind in (NotImplementedError, ValueError):

    def loss_fn(params, x, kind=kind):
      raise kind("of the user")

    with pytest.raises(kind, match="of the user") as caught:
      jax.jit(reduced_gradient(loss_fn))(params, x)
    notes = [x for x in caught.value.__notes__ if "closes over" in x]
    assert len(notes) == (kind is NotImplementedError)
    assert all(x.startswith("If the error above is about") for x in notes)


def zeroed(inner):
  codec = gradcomp.codecs.Dense()
  return gradcomp.parallel.zero(inner, grads=codec, params=codec, axis_name="data")


def local(inner):
  codec = gradcomp.codecs.Dense()
  options = {"every": 1, "codec": codec, "axis_name": "data"}
  return gradcomp.local.local_steps(inner, optax.sgd(1.0), **options)


def test_a_function_that_update_is_given(problem):
  """A line search of each worker reads its rows as leaves, and not in a closure."""
  mesh, params, x, base = problem
  search = optax.scale_by_backtracking_linesearch(8)
  tx = local(optax.chain(optax.sgd(1.0), search))

  @functools.partial(jax.jit, static_argnames="given")
  def step(params, state, x, base, given):
    loss_fn = Partial(loss_of_all, base=base)
    value, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, x)
    value_fn = Partial(lambda params: loss_of_all(params, x, base))
    if given:
      value_fn = Partial(loss_of_all, x=x, base=base)
    more = dict(value=value, grad=grads, value_fn=value_fn)
    return tx.update(grads, state, params, **more)[0]["a"]

  with jax.set_mesh(mesh):
    state = tx.init(params)
    cures = "`optimizer`", "value_fn=jax.tree_util.Partial(f, batch=batch)"
    assert_refused(lambda: step(params, state, x, base, False), cures=cures)
    assert np.any(step(params, state, x, base, True))


@pytest.mark.parametrize("around", [zeroed, *slow(local)])
def test_numbers_of_an_optimizer(around, problem):
  """Injected around a transformation they would be in closures; in it, in the state."""
  _, params, x, base = problem
  loss_fn = TREES["partial"](base)

  @jax.jit
  def step(params, state, x):
    _, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, x)
    return tx.update(grads, state, params)[0]["a"]

  def run():
    return step(params, tx.init(params), x)

  with jax.set_mesh(problem[0]):
    tx = optax.inject_hyperparams(lambda rate: around(optax.adam(rate)))(rate=0.1)
    assert_refused(run, cures=("`optimizer`", "inject_hyperparams"))
    tx = around(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    assert np.any(run())
