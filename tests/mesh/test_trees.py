"""Trees as libraries have them: whole modules, Variables, and leaves of no gradient."""

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, Dense
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits, says
from tests.support.cases import zero
from tests.support.cases.steps import OVER, N, put

CODEC = QSGD(bits=4, rounding="nearest")  # bits are then no matter of leaves' names


class Model(eqx.Module):
  """Has a leaf of every kind, between its arrays."""

  b: jax.Array
  count: jax.Array
  drop: eqx.nn.Dropout  # a number and a bool
  empty: None
  key: jax.Array
  name: str
  shape: np.ndarray
  steps: int
  twice: Callable[[Any], Any]
  w: jax.Array


class Pair(NamedTuple):
  b: Any
  w: Any


class Linear(nnx.Module):
  """Has Variables of numbers and of keys, which are not trained."""

  def __init__(self, b, w):
    self.b, self.w = nnx.Param(b), nnx.Param(w)
    self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


arrays = functools.partial(zero.tree, 0, {"b": (4,), "w": (64, 4)})


def twice(x):
  return 2 * x


def model():
  key, drop = jax.random.key(7), eqx.nn.Dropout(0.25)
  fields = dict(count=jnp.arange(3), empty=None, key=key, name="model", drop=drop)
  sizes = np.array([64, 4])
  return Model(**arrays(), **fields, shape=sizes, steps=3, twice=twice)


TREES = {
  "dict": arrays,  # haiku's are such
  "eqx.Module": model,
  "nnx.Module": lambda: Linear(**arrays()),
  "nnx.State": lambda: nnx.state(Linear(**arrays()), nnx.Param),
  "FrozenDict": lambda: freeze(arrays()),
  "NamedTuple": lambda: Pair(**arrays()),
}


def loss_fn(tree, x):
  """Reads all that a model has: what is missing would be an error, or another loss."""
  b, w = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
  y = x @ w + b
  if isinstance(tree, Model):
    assert (tree.name, tree.steps, tree.empty, tree.drop.p) == ("model", 3, None, 0.25)
    y = tree.twice(y) / (jnp.sum(tree.count) - tree.shape[1] // 4)  # exactly y
    y = y + 0 * jax.random.uniform(tree.key)
  return jnp.mean(y**2)


def trained(tree):
  return eqx.filter(tree, eqx.is_inexact_array)


def local(tx, axis_name, x, trees):
  """Updates of each tree on one worker, whose state is made there."""
  grad_fn = gradcomp.value_and_grad(loss_fn, axis_name=axis_name, accumulate=2)
  return [tx.update(grad_fn(y, x)[1], tx.init(y), y)[0] for y in trees]


def updates_in(place, tx, x, trees):
  if place == "none":
    return jax.jit(lambda x: local(tx, None, x, trees))(x)
  if place == "vmap":
    own = lambda x: local(tx, "data", x, trees)
    found = jax.jit(jax.vmap(own, **OVER))(x.reshape(N, -1, x.shape[-1]))
    return jax.tree.map(lambda x: x[0], found)
  kind = AxisType.Explicit if place == "explicit" else AxisType.Auto
  with jax.set_mesh(modes.mesh(N, kind)):
    parts, others = eqx.partition(trees, eqx.is_array)
    steps = lambda parts, x: local(tx, "data", x, eqx.combine(parts, others))
    return jax.jit(steps)(parts, jax.device_put(x, P("data")))


@pytest.mark.parametrize("place", ["explicit", "auto", *slow("vmap", "none")])
def test_updates_are_those_of_a_dict_in_the_tree_that_was_given(place):
  """In each tree the arrays have the bits of a dict's, and all else has None."""
  over = {} if place == "none" else OVER
  tx = gradcomp.compress(CODEC, feedback="error", min_leaf_size=0, **over)
  x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
  trees = {name: make() for name, make in TREES.items()}
  updates = updates_in(place, tx, x, [*trees.values()])
  found = dict(zip(trees, updates, strict=True))
  for name, update in found.items():
    assert jax.tree.structure(update) == jax.tree.structure(trained(trees[name])), name
    assert type(update) is type(trees[name])
    assert_same_bits(jax.tree.leaves(update), jax.tree.leaves(found["dict"]))


def over_mesh(kind, tree):
  """A mesh, the tree with its arrays on all of its devices, and a batch in parts."""
  mesh = modes.mesh(N, kind)
  x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
  place = lambda x: put(x, mesh) if eqx.is_inexact_array(x) else x
  return mesh, jax.tree.map(place, tree), put(x, mesh, "data")


STEPS = [(AxisType.Explicit, "adam"), (None, "adam")]
STEPS += [(AxisType.Auto, "zero"), (AxisType.Explicit, "local_steps")]


@pytest.mark.parametrize("kind, name", [(AxisType.Auto, "adam"), *slow(*STEPS)])
def test_a_train_step_returns_the_module_that_it_was_given(kind, name):
  """Its arrays are those of a dict's step, and the rest are the same objects."""
  over = {"axis_name": "data" if kind else None}
  exchange = gradcomp.compress(CODEC, min_leaf_size=0, **over)
  tx = WRAPPED.get(name, optax.chain(exchange, optax.adam(0.1)))
  ends = []
  for given in (arrays(), model()):
    mesh, tree, x = over_mesh(kind or AxisType.Auto, given)
    before, structure = jax.tree.leaves(tree), jax.tree.structure(tree)
    with jax.set_mesh(mesh):
      state = jax.jit(tx.init)(trained(tree))
      step = gradcomp.make_train_step(loss_fn, tx, **over)
      sent = gradcomp.wire_report(step.lower(tree, state, x)).bytes_sent
      like = step.eval_shape(tree, state, x)
      for _ in range(2):
        tree, state, metrics = step(tree, state, x)
    assert jax.tree.structure(tree) == jax.tree.structure(like[0]) == structure
    for old, new in zip(before, jax.tree.leaves(tree), strict=True):
      assert old is new or eqx.is_inexact_array(old)
      # Only what is trained is donated.
      assert not isinstance(old, jax.Array) or old.is_deleted() == (old is not new)
    ends.append((jax.tree.leaves(trained(tree)), metrics["loss"]))
    assert sent > 0 or not kind
  assert_same_bits(*ends)


dense, adamw = gradcomp.dense(**OVER), optax.adamw(0.1)
WRAPPED = {
  "clip": gradcomp.wrappers.clip_by_local_norm(0.5, **OVER),
  "zero": zero.coded(adamw, CODEC, min_leaf_size=0),
  "local_steps": gradcomp.local.local_steps(
    optax.adam(0.1), optax.sgd(0.7), every=1, codec=Dense(), **OVER
  ),
  "skip_nonfinite": gradcomp.skip_nonfinite(optax.chain(dense, adamw), 3, **OVER),
  "switch": gradcomp.wrappers.switch([1], [dense, gradcomp.terngrad(**OVER)]),
  "allow_frozen": gradcomp.wrappers.allow_frozen(optax.chain(dense, adamw)),
}


def test_every_transformation_takes_a_module():
  """Also wrappers around optimizers of optax, which see the arrays that are trained."""

  def updated(tx, tree, x):
    state = tx.init(tree)
    grads = jax.tree.map(lambda g: g * x, trained(tree))
    updates, state = tx.update(grads, state, tree)
    return updates, state, trained(gradcomp.local.local_params(tree, state))

  def worker(x):
    both = lambda tx: [updated(tx, y, x) for y in (model(), trained(model()))]
    found = {name: both(tx) for name, tx in WRAPPED.items()}
    return found, WRAPPED["switch"].init(model())

  found, state = jax.jit(jax.vmap(worker, axis_name="data"))(jnp.ones(2))
  for name, (whole, arrays) in found.items():
    assert jax.tree.structure(whole) == jax.tree.structure(arrays), name
    assert_same_bits(jax.tree.leaves(whole), jax.tree.leaves(arrays))
  # Displacements are zero after the exchange of each step, and all else comes back.
  own = gradcomp.local.local_params(module := model(), state)
  assert (own.twice, own.name, own.count) == (twice, "model", module.count)


@pytest.mark.parametrize("kind", [AxisType.Auto, *slow(AxisType.Explicit)])
def test_what_is_not_trained_may_lie_on_the_mesh(kind):
  """A map takes it as an argument: JAX lets it close over no array of its mesh."""
  mesh, tree, x = over_mesh(kind, model())
  arrays, others = eqx.partition(tree, eqx.is_array)
  tree = eqx.combine(put(arrays, mesh), others)
  loss = lambda tree, x: loss_fn(tree, x) * tree.count[1]
  specs = jax.tree.map(lambda _: P(), trained(tree)) if kind == AxisType.Auto else None
  grad_fn = gradcomp.value_and_grad(loss, param_specs=specs, **OVER)
  value, _ = jax.jit(lambda x: grad_fn(tree, x))(x)
  expected = jax.jit(lambda x: loss_fn(model(), x))(np.asarray(x))
  np.testing.assert_allclose(value, expected, rtol=1e-6)  # of 32 squares


def test_reports_and_checkpoints_take_a_module():
  """As the arrays that are trained, of which each knows the structure, or the names."""
  tx = gradcomp.qsgd(bits=4, feedback="error", min_leaf_size=0, **OVER)
  mesh, tree, _ = over_mesh(AxisType.Auto, model())
  workers = {"workers": N}
  with jax.set_mesh(mesh):
    state = tx.init(tree)
    shapes_of = functools.partial(gradcomp.checkpoint.state_shapes, **OVER)
    for function in (gradcomp.explain, gradcomp.checkpoint.make_record, shapes_of):
      assert function(tx, tree, **workers) == function(tx, trained(tree), **workers)
    shapes = shapes_of(tx, tree, **workers)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, shapes)
    specs = jax.tree.map(lambda _: P(), trained(tree))
    made = gradcomp.init_state(tx, tree, param_specs=specs, **OVER)
    assert jax.tree.structure(made) == jax.tree.structure(state)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, state)
  alone = gradcomp.compress(CODEC, min_leaf_size=0)
  inspect = functools.partial(gradcomp.telemetry.inspect_update, alone)
  *_, found = jax.eval_shape(inspect, trained(tree), alone.init(trained(tree)))
  assert [*found.leaves] == [".b", ".w"]
  ones = jax.tree.map(lambda x: x + 1, state)
  moved = gradcomp.reshard_state(tx, tree, ones, old_workers=N, workers=2, **OVER)
  assert moved.residual.w.shape == (128, 4)
  assert np.sum(moved.residual.w) == np.sum(ones.residual.w)


def test_a_reduction_is_deferred_for_what_is_trained():
  mesh, tree, x = over_mesh(AxisType.Auto, model())

  def worker(x):
    marked = gradcomp.defer_reduction(tree, **OVER)
    assert jax.tree.structure(marked) == jax.tree.structure(tree)
    assert (marked.twice, marked.steps, marked.count) == (twice, 3, tree.count)
    loss = lambda own: loss_fn(eqx.combine(own, tree), x)
    return jax.tree.map(lambda g: g[None], jax.grad(loss)(trained(marked)))

  specs = {"in_specs": P("data"), "out_specs": P("data")}
  grads = jax.eval_shape(jax.shard_map(worker, mesh=mesh, **specs), x)
  assert grads.w.shape == (N, 64, 4)  # no worker's is that of all


def test_a_wire_report_takes_what_equinox_lowers():
  """And any object with ``as_text()``; its ``input_shardings`` name the axes."""
  mesh, tree, x = over_mesh(AxisType.Auto, model())
  spec = {"mesh": mesh, "in_specs": P("data"), "out_specs": P()}
  mean = jax.shard_map(lambda x: jax.lax.pmean(x, "data"), **spec)
  lowered = eqx.filter_jit(lambda tree, x: mean(tree.twice(x))).lower(tree, x)
  compiled = lowered.compile()
  text = types.SimpleNamespace(as_text=compiled.compiled.as_text)
  expected = gradcomp.wire_report(jax.jit(lambda x: mean(twice(x))).lower(x))
  assert expected.collectives[0].axis == "data"
  same = [x.operands for x in expected.collectives]
  for program in (lowered, lowered.lowered, compiled, compiled.compiled, text):
    found = gradcomp.wire_report(program).collectives
    assert [x.operands for x in found] == same
    assert [x.axis for x in found] == ["" if program is text else "data"]
  with pytest.raises(TypeError, match=says("`program`", "as_text()", "got function")):
    gradcomp.wire_report(twice)


@pytest.mark.parametrize("leaf", [3, True, 2.0, "name", None, twice, np.arange(3)])
def test_what_is_no_array_of_floats_has_no_gradient(leaf):
  params, x = {"leaf": leaf, "w": jnp.ones(3)}, jnp.ones(3)
  loss = lambda params, x: jnp.sum(params["w"] * x)
  grad_fn = gradcomp.value_and_grad(loss, axis_name=None)
  _, grads = grad_fn(params, x)
  assert grads["leaf"] is None
  np.testing.assert_array_equal(grads["w"], np.ones(3))
  if leaf is not None:
    with pytest.raises(TypeError, match=says("argument 0", "array of real or complex")):
      grad_fn({"leaf": leaf}, x)
    with pytest.raises(TypeError, match="NoneType"):
      optax.apply_updates(params, grads)
