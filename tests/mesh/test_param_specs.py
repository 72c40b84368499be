"""Under Auto axes shards are encoded where they lie, as under Explicit ones."""

import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.core.state import states_in
from gradcomp.codecs import QSGD, Dense
from tests.plugins.slow_cases import slow
from tests.support import laws
from tests.support.assertions import assert_same_bits, says

OVER, HOSTS = {"axis_name": "data"}, ("host", "data")
SHAPES = {"w": (64, 256), "b": (256,), "v": (256, 32), "c": (32,)}
SPECS = {"w": P(None, "model"), "b": P("model"), "v": P("model"), "c": P()}
FOUR = functools.partial(gradcomp.qsgd, bits=4, bucket_size=64)


def mesh_of(axes, kind=AxisType.Auto):
  sizes = tuple(axes.values())
  devices = jax.devices()[: math.prod(sizes)]
  return jax.make_mesh(sizes, tuple(axes), (kind,) * len(axes), devices=devices)


def place(tree, mesh, specs):
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  return jax.tree.map(put, tree, specs)


def normal(seed, *lead):
  return jax.tree.map(lambda x: x / 8, laws.tree(SHAPES, *lead, seed=seed))


def linear_loss(params, rows):
  """Its gradient is the worker's row, in any mode."""
  return sum(jnp.sum(params[name] * rows[name][0]) for name in params)


SGD = optax.sgd(0.5, momentum=0.5)  # powers of two: no compiler rounds it differently
CLIP = gradcomp.wrappers.clip_by_local_norm(1.0, **OVER)
CASES = {
  "two_shot": FOUR(feedback="error", exchange="two_shot", **OVER),
  "guarded": gradcomp.skip_nonfinite(
    optax.chain(CLIP, FOUR(exchange="all_gather", **OVER), SGD), 3, **OVER
  ),
  "ring": FOUR(exchange="ring", **OVER),
  "momentum": FOUR(feedback="momentum", **OVER),
  "int8": FOUR(feedback=gradcomp.ErrorFeedback(residual_dtype="int8"), **OVER),
  "shared scales": FOUR(bits=8, share_scale=True, exchange="psum", **OVER),
  "redsync": gradcomp.redsync(density=0.05, **OVER),
  "powersgd": gradcomp.powersgd(rank=2, **OVER),
  "zero": gradcomp.parallel.zero(SGD, grads=QSGD(), params=QSGD(bits=8), **OVER),
  "hierarchical": FOUR(feedback="error", exchange="hierarchical", axis_name=HOSTS),
}
MODEL = {"data": 4, "model": 2}
shardings = lambda tree: jax.tree.map(lambda x: x.sharding, tree)


def stepper(name, mesh, by="jit"):
  """A step in plain jit or of ``make_train_step``, and what it takes."""
  axis_name = HOSTS if name == "hierarchical" else "data"
  tx, kind, over = CASES[name], mesh.axis_types[0], {"axis_name": axis_name}
  tx = optax.chain(tx, *[] if name in ("zero", "guarded") else [SGD])
  specs = None if kind == AxisType.Explicit else SPECS
  grad_fn = gradcomp.value_and_grad(linear_loss, param_specs=specs, **over)

  def plain(params, state, rows):
    loss, grads = grad_fn(params, rows)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, {"loss": loss}

  step = jax.jit(plain)
  if by == "step":
    step = gradcomp.make_train_step(linear_loss, tx, mesh=mesh, donate=False, **over)
  params = place(normal(0), mesh, SPECS)
  with jax.set_mesh(mesh):
    made = tx.init if kind == AxisType.Explicit else None
    state = (made or functools.partial(gradcomp.init_state, tx, **over))(params)

  def rows_of(seed, bad=False):
    rows = normal(seed + 1, mesh.size // mesh.shape["model"])
    if bad:
      rows["w"][-1, 0, 255] = np.nan  # on one worker, in one shard
    return place(rows, mesh, {x: P(axis_name, *spec) for x, spec in SPECS.items()})

  return step, params, state, rows_of


@functools.cache
def trained(name, kind, by):
  """Parameters behind each step, the last state, and the bytes over each axis."""
  hosts = {"host": 2, "data": 2, "model": 2}
  mesh = mesh_of(hosts if name == "hierarchical" else MODEL, kind)
  step, params, state, rows_of = stepper(name, mesh, by)
  program = step.lower(params, state, rows_of(0)).compile()
  held = [params]
  for seed in range(3):
    rows = rows_of(seed, bad=name == "guarded" and seed == 1)
    params, state, metrics = step(held[-1], state, rows)
    held.append(params)
  assert np.isfinite(metrics["loss"])
  return held, state, gradcomp.wire_report(program, mesh=mesh).by_axis


ROWS = [("two_shot", "jit"), ("guarded", "step"), ("two_shot", "step")]
ROWS += slow(*((x, y) for x in CASES for y in ("jit", "step") if (x, y) not in ROWS))


@pytest.mark.parametrize("name, by", ROWS)
def test_a_training_has_the_bits_and_bytes_of_explicit_axes(name, by):
  """Norms and decisions are those of whole gradients there, and so they are here.

  In plain jit an addend of a sum is a gradient over N = 4, and so are its residuals: a
  power of two. No word of the exchange leaves a shard.
  """
  held, state, sent = trained(name, AxisType.Auto, by)
  expected, other, explicit = trained(name, AxisType.Explicit, by)
  assert_same_bits(held, expected)
  assert {k: x.sharding.spec for k, x in held[-1].items()} == SPECS
  for ours, theirs in zip(states_in(state), states_in(other), strict=True):
    if name != "int8":
      share = 4 if by == "jit" else 1
      times = lambda tree, n=share: jax.tree.map(lambda x: n * np.asarray(x), tree)
      assert_same_bits(ours.residual, times(theirs.residual))
      assert_same_bits(ours.velocity, times(theirs.velocity))
    assert_same_bits(ours.server_residual, theirs.server_residual)
  for step, (old, new) in enumerate(itertools.pairwise(jax.device_get(held))):
    moved = [np.any(new[leaf] != x) for leaf, x in old.items()]
    assert not any(moved) if (name, step) == ("guarded", 1) else all(moved)
  if name == "guarded":
    assert int(state[0].total_notfinite) == 1
  over_model = sent["model"].collectives if "model" in sent else ()
  assert not {"u32", "s8", "bf16"}.intersection(x.dtype for x in over_model)
  if by == "jit" or name == "hierarchical":
    return  # types send the loss otherwise
  # A number of a byte says whether a step was finite, of all devices of some axes.
  each = lambda x: [c.bytes_sent for c in x["data"].collectives if c.dtype != "u8"]
  assert sum(each(sent)) == sum(each(explicit)) > 0


def test_a_state_has_the_residual_of_each_shard():
  _, (state, *_), _ = trained("two_shot", AxisType.Auto, "jit")
  for leaf, spec in SPECS.items():
    placed = state.residual[leaf].sharding
    on_top = P(("data", *spec[0:1])) if leaf in "bv" else P("data", *spec[1:])
    wanted = NamedSharding(placed.mesh, on_top)
    assert placed.is_equivalent_to(wanted, len(SHAPES[leaf]))


NORM = optax.clip_by_global_norm(0.3)
CODED = dict(grads=Dense(), params=Dense(), min_leaf_size=0, **OVER)
PARTS = OVER | {"fragments": 2, "feedback": gradcomp.ErrorFeedback()}
NORMED = {
  "allow_frozen": gradcomp.wrappers.allow_frozen(
    optax.chain(NORM, gradcomp.dense(**OVER), SGD)
  ),
  "local_steps": gradcomp.local.local_steps(
    optax.chain(NORM, SGD), optax.sgd(0.7), every=2, codec=Dense(), **PARTS
  ),
  "zero": gradcomp.parallel.zero(SGD, **CODED),
}


@pytest.mark.parametrize("name", ["allow_frozen", "local_steps", *slow("zero")])
def test_norms_are_those_of_whole_gradients(name):
  """A worker's own norm, over all shards of its gradient, as if no axis cut them.

  Owners in zero have other rows of shards, and the same updates.
  """
  tx, outputs, mesh = NORMED[name], [], mesh_of(MODEL)
  for specs in (SPECS, {name: P() for name in SPECS}):
    params = place(normal(0), mesh, specs)
    with jax.set_mesh(mesh):
      state = gradcomp.init_state(tx, params, param_specs=specs, **OVER)
    rows = place(normal(1, 4), mesh, {name: P("data", *x) for name, x in specs.items()})

    @jax.jit
    def update(params, state, rows, specs=specs):
      return tx.update(gradients(params, specs, rows), state, params)[0]

    outputs.append(update(params, state, rows))
  for name, expected in outputs[1].items():
    # A sum of squares, in another order.
    np.testing.assert_allclose(outputs[0][name], expected, rtol=1e-5, atol=1e-7)


def test_an_inspection_of_shards_is_that_of_explicit_axes():
  found = []
  for kind, specs in (AxisType.Auto, SPECS), (AxisType.Explicit, None):
    _, params, (state, *_), rows_of = stepper("two_shot", mesh_of(MODEL, kind))

    def inspected(params, state, rows, specs=specs):
      grads = gradients(params, specs, rows)
      given = grads, state, params
      return gradcomp.telemetry.inspect_update(CASES["two_shot"], *given)[2]

    found.append(jax.device_get(jax.jit(inspected)(params, state, rows_of(1))))
  # Sums of squares, in an order that is the compiler's.
  chex.assert_trees_all_close(*found, rtol=1e-5, atol=0)


def gradients(params, param_specs, rows):
  grad_fn = gradcomp.value_and_grad(linear_loss, param_specs=param_specs, **OVER)
  return grad_fn(params, rows)[1]


def shapes(params, param_specs):
  """Those of the gradients, of parameters outside of ``jax.jit``."""
  return jax.eval_shape(lambda rows: gradients(params, param_specs, rows), normal(1, 4))


def test_specs_are_given_or_read():
  """As specs, as shardings, as one for all, or as the parameters lie."""
  params = place(normal(0), mesh_of(MODEL), SPECS)
  for given in (None, SPECS, shardings(params)):
    assert {k: x.spec for k, x in shapes(params, given).items()} == SPECS
  for spec in (P(), P("model")):
    assert {x.spec for x in shapes(params, spec).values()} == {spec}
  init = functools.partial(gradcomp.init_state, CASES["two_shot"], **OVER)
  with jax.set_mesh(params["w"].sharding.mesh):
    states = [init(params, param_specs=x) for x in (None, shardings(params), SPECS)]
    states.append(jax.jit(functools.partial(init, param_specs=SPECS))(params))
  for state in states[1:]:
    assert_same_bits(state, states[0])
    assert shardings(state) == shardings(states[0])
  # Also of an array by itself.
  alone = gradcomp.value_and_grad(lambda w, x: jnp.sum(w * x[0]), **OVER)
  grads = jax.eval_shape(lambda x: alone(params["w"], x)[1], normal(1, 4)["w"])
  assert grads.spec == SPECS["w"]


@pytest.mark.parametrize("name", ["two_shot", "redsync", *slow("powersgd", "zero")])
def test_a_state_of_other_shards_is_an_error(name):
  mesh = mesh_of(MODEL)
  params, tx = place(normal(0), mesh, SPECS), CASES[name]
  with jax.set_mesh(mesh):
    states = {None: tx.init(params), "model": gradcomp.init_state(tx, params, **OVER)}
  for made, given in ((None, SPECS), ("model", P())):
    update = lambda rows, s, x=given: tx.update(gradients(params, x, rows), s, params)
    with pytest.raises(ValueError, match=says("gradcomp.init_state", "param_specs")):
      jax.eval_shape(update, normal(1, 4), states[made])


def test_bad_specs_are_named():
  """Traced parameters have none: whole gradients would be gathered in silence."""
  params = place(normal(0), mesh_of(MODEL), SPECS)
  for given, error, parts in (
    (SPECS | {"w": "model"}, TypeError, ("`param_specs`['w']", "got 'model'")),
    ({"w": P()}, ValueError, ("`param_specs`", "tree", "sharding")),
    (SPECS | {"b": P("data")}, ValueError, ("`param_specs`['b']", "'data'")),
  ):
    with pytest.raises(error, match=says(*parts)):
      shapes(params, given)
  grad_fn = gradcomp.value_and_grad(linear_loss, **OVER)
  message = says("`param_specs`", "('model',)", "gathered", "jax.P()")
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(grad_fn, params, normal(1, 4))
  init = functools.partial(gradcomp.init_state, CASES["ring"], **OVER)
  with pytest.raises(ValueError, match=says("`param_specs`", "('model',)")):
    jax.eval_shape(init, params)


def test_a_train_step_goes_on_with_a_state_of_whole_leaves():
  """As ``optimizer.init`` makes it: each device sends a part of its words."""
  mesh = mesh_of(MODEL)
  step, params, _, rows_of = stepper("two_shot", mesh, "step")
  with jax.set_mesh(mesh):
    state = optax.chain(CASES["two_shot"], SGD).init(params)
  _, after, metrics = step.eval_shape(params, state, rows_of(1))
  like = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert like(after) == like(state)
  assert metrics["loss"].shape == ()
