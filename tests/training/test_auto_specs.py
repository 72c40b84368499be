"""Under Auto axes shards of a model are encoded where they lie, as under Explicit ones.

The specs over other axes are given, or read from parameters outside of ``jax.jit``.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.core.state import states_in
from gradcomp.codecs import QSGD
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits, says

OVER = {"axis_name": "data"}
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
  rng = np.random.default_rng(seed)
  draw = lambda shape: rng.standard_normal((*lead, *shape)).astype(np.float32) / 8
  return {name: draw(shape) for name, shape in SHAPES.items()}


def linear_loss(params, rows):
  """Its gradient is the worker's row, in any mode."""
  return sum(jnp.sum(params[name] * rows[name][0]) for name in params)


def first_state(tx, params, kind, axis_name="data"):
  """By the specs that concrete parameters have, whatever shows them."""
  with jax.set_mesh(params["w"].sharding.mesh):
    if kind == AxisType.Explicit:
      return tx.init(params)
    return gradcomp.init_state(tx, params, axis_name=axis_name)


CASES = {
  "two_shot": FOUR(feedback="error", exchange="two_shot", **OVER),
  "guarded": gradcomp.skip_nonfinite(
    optax.chain(
      gradcomp.wrappers.clip_by_local_norm(1.0, **OVER),
      FOUR(exchange="all_gather", **OVER),
    ),
    3,
    **OVER,
  ),
  "ring": FOUR(exchange="ring", **OVER),
  "momentum": FOUR(feedback="momentum", **OVER),
  "int8": FOUR(feedback=gradcomp.ErrorFeedback(residual_dtype="int8"), **OVER),
  "shared scales": FOUR(bits=8, share_scale=True, exchange="psum", **OVER),
  "redsync": gradcomp.redsync(density=0.05, **OVER),
  "powersgd": gradcomp.powersgd(rank=2, **OVER),
  "zero": gradcomp.parallel.zero(
    optax.sgd(0.5, momentum=0.5), grads=QSGD(bits=4), params=QSGD(bits=8), **OVER
  ),
  "hierarchical": FOUR(
    feedback="error", exchange="hierarchical", axis_name=("host", "data")
  ),
}


def stepper(tx, mesh, axis_name="data"):
  """``step(params, state, seed)``, and the parameters as they lie."""
  kind = mesh.axis_types[0]
  specs = None if kind == AxisType.Explicit else SPECS
  grad_fn = gradcomp.value_and_grad(linear_loss, axis_name=axis_name, param_specs=specs)
  on_top = {name: P(axis_name, *spec) for name, spec in SPECS.items()}

  @jax.jit
  def update(params, state, rows):
    return tx.update(grad_fn(params, rows)[1], state, params)

  def step(state, seed, bad=False):
    rows = normal(seed + 1, mesh.size // mesh.shape["model"])
    if bad:
      rows["w"][-1, 0, 255] = np.nan  # on one worker, in one shard
    return update(params, state, place(rows, mesh, on_top))

  params = place(normal(0), mesh, SPECS)
  return step, params


@functools.cache
def updates_of(name, kind):
  """The updates of three steps, the second not finite if guarded, and the state."""
  hosts = name == "hierarchical"
  axes = ({"host": 2, "data": 2} if hosts else {"data": 4}) | {"model": 2}
  axis_name = ("host", "data") if hosts else "data"
  step, params = stepper(CASES[name], mesh_of(axes, kind), axis_name)
  state, outputs = first_state(CASES[name], params, kind, axis_name), []
  for seed in range(3):
    output, state = step(state, seed, bad=name == "guarded" and seed == 1)
    outputs.append(output)
  return outputs, state


def test_norms_in_allow_frozen_are_those_of_whole_gradients():
  """A worker's own norm, over all shards of its gradient, as if no axis cut them."""
  front = optax.clip_by_global_norm(0.5), gradcomp.dense(**OVER)
  tx = gradcomp.wrappers.allow_frozen(optax.chain(*front, optax.sgd(1.0, 0.5)))
  outputs = []
  for specs in (SPECS, {name: P() for name in SPECS}):
    mesh = mesh_of({"data": 4, "model": 2})
    params = place(normal(0), mesh, specs)
    with jax.set_mesh(mesh):
      state = gradcomp.init_state(tx, params, param_specs=specs, **OVER)
    rows = place(normal(1, 4), mesh, {name: P("data", *x) for name, x in specs.items()})

    @jax.jit
    def update(params, state, rows, specs=specs):
      grad_fn = gradcomp.value_and_grad(linear_loss, param_specs=specs, **OVER)
      return tx.update(grad_fn(params, rows)[1], state, params)

    outputs.append(update(params, state, rows))
  (updates, _), (whole, _) = outputs
  for name in SPECS:
    # A sum of squares, in another order.
    np.testing.assert_allclose(updates[name], whole[name], rtol=1e-5, atol=1e-7)


def test_norms_in_local_steps_are_those_of_whole_gradients():
  inner = optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1, 0.5))
  codec, mesh = gradcomp.codecs.Dense(), mesh_of({"data": 4, "model": 2})
  outer = optax.sgd(0.7, 0.9, nesterov=True)
  tx = gradcomp.local.local_steps(inner, outer, every=2, codec=codec, **OVER)
  found = []
  for specs in (SPECS, {name: P() for name in SPECS}):
    params = place(normal(0), mesh, specs)
    with jax.set_mesh(mesh):
      state = gradcomp.init_state(tx, params, param_specs=specs, **OVER)
    step = gradcomp.make_train_step(linear_loss, tx, mesh=mesh, **OVER)
    for seed in (1, 2, 3):
      rows = place(normal(seed, 4), mesh, dict.fromkeys(SPECS, P("data")))
      params, state, _ = step(params, state, rows)
    found.append(params)
  for name in SPECS:
    # A sum of squares, in another order.
    np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5, atol=1e-7)


def inspection(kind):
  tx, mesh = CASES["two_shot"], mesh_of({"data": 4, "model": 2}, kind)
  specs = None if kind == AxisType.Explicit else SPECS
  grad_fn = gradcomp.value_and_grad(linear_loss, param_specs=specs, **OVER)
  params = place(normal(0), mesh, SPECS)
  state = first_state(tx, params, kind, "data")
  rows = place(normal(1, 4), mesh, {name: P("data", *x) for name, x in SPECS.items()})

  @jax.jit
  def inspected(params, state, rows):
    grads = grad_fn(params, rows)[1]
    return gradcomp.telemetry.inspect(tx, grads, state, params)

  return inspected(params, state, rows)


def test_an_inspection_of_shards_is_that_of_explicit_axes():
  got, expected = inspection(AxisType.Auto), inspection(AxisType.Explicit)
  # Sums of squares, in an order that is the compiler's.
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, expected)


@pytest.mark.bits
@pytest.mark.parametrize("name", [*list(CASES)[:2], *slow(*list(CASES)[2:])])
def test_updates_have_the_bits_of_explicit_axes(name):
  """Norms and decisions are those of whole gradients there, and so they are here.

  An addend of a sum is a gradient over N = 4, and so are its residuals: a power of two.
  """
  got, state = updates_of(name, AxisType.Auto)
  expected, other = updates_of(name, AxisType.Explicit)
  assert_same_bits(got, expected)
  assert all(np.any(x) for x in jax.tree.leaves(got[2]))
  for ours, theirs in zip(states_in(state), states_in(other), strict=True):
    if name != "int8":
      times4 = lambda tree: jax.tree.map(lambda x: 4 * np.asarray(x), tree)
      assert_same_bits(ours.residual, times4(theirs.residual))
      assert_same_bits(ours.velocity, times4(theirs.velocity))
    assert_same_bits(ours.server_residual, theirs.server_residual)
  if name == "guarded":
    assert not any(np.any(x) for x in jax.tree.leaves(got[1]))
    assert int(state.total_notfinite) == 1


def test_a_state_has_the_residual_of_each_shard():
  for leaf, spec in SPECS.items():
    placed = updates_of("two_shot", AxisType.Auto)[1].residual[leaf].sharding
    on_top = P(("data", *spec[0:1])) if leaf in "bv" else P("data", *spec[1:])
    wanted = NamedSharding(placed.mesh, on_top)
    assert placed.is_equivalent_to(wanted, len(SHAPES[leaf]))


@pytest.mark.slow
@pytest.mark.bits
def test_a_saved_state_goes_on_with_half_of_the_workers(tmp_path):
  """With the bits of the Explicit form, whose residuals are addends of a sum."""
  tx, outputs, old = CASES["two_shot"], {}, mesh_of({"data": 4, "model": 2})
  for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = mesh_of({"data": 2, "model": 2}, kind)
    step, params = stepper(tx, mesh)
    state = updates_of("two_shot", kind)[1]
    options = {"old_workers": 4, "workers": 2, "mesh": mesh, **OVER}
    if kind == AxisType.Auto:
      specs = gradcomp.state_specs(state, param_specs=shardings(params), **OVER)
      place_of = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(old, spec)
      )
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        like = jax.tree.map(place_of, state, specs)
        restored = checkpointer.restore(tmp_path / "state", like)
      assert_same_bits(restored, state)
      state = restored
      options |= {"param_specs": shardings(params), "keep": "mean"}
    else:
      options |= {"keep": "addends"}
    moved = gradcomp.reshard_state(tx, params, state, **options)
    outputs[kind], _ = step(moved, 7)
  assert_same_bits(outputs[AxisType.Auto], outputs[AxisType.Explicit])


def shardings(params):
  return jax.tree.map(lambda x: x.sharding, params)


def gradients(params, param_specs, rows):
  return gradcomp.value_and_grad(linear_loss, param_specs=param_specs, **OVER)(
    params, rows
  )[1]


def shapes(params, param_specs):
  """Those of the gradients, of parameters outside of ``jax.jit``."""
  return jax.eval_shape(lambda rows: gradients(params, param_specs, rows), normal(1, 4))


def test_specs_are_given_or_read():
  """As specs, as shardings, as one for all, or as the parameters lie."""
  params = place(normal(0), mesh_of({"data": 4, "model": 2}), SPECS)
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


def test_an_array_by_itself_has_a_spec():
  mesh = mesh_of({"data": 4, "model": 2})
  w = jax.device_put(normal(0)["w"], NamedSharding(mesh, SPECS["w"]))
  tx = CASES["two_shot"]
  state = gradcomp.init_state(tx, w, mesh=mesh, **OVER)
  grad_fn = gradcomp.value_and_grad(lambda w, x: jnp.sum(w * x[0]), **OVER)
  update, after = jax.eval_shape(
    lambda x, state: tx.update(grad_fn(w, x)[1], state), normal(1, 4)["w"], state
  )
  assert update.shape == w.shape
  assert after.residual.shape == state.residual.shape


def test_traced_parameters_need_specs():
  """Else whole gradients would be gathered over the model's axis, in silence."""
  params = place(normal(0), mesh_of({"data": 4, "model": 2}), SPECS)
  grad_fn = gradcomp.value_and_grad(linear_loss, **OVER)
  message = says("`param_specs`", "('model',)", "gathered", "jax.P()")
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(grad_fn, params, normal(1, 4))
  init = functools.partial(gradcomp.init_state, CASES["ring"], **OVER)
  with pytest.raises(ValueError, match=says("`param_specs`", "('model',)")):
    jax.eval_shape(init, params)


@pytest.mark.parametrize("name", ["two_shot", "redsync", *slow("powersgd", "zero")])
def test_a_state_of_other_shards_is_an_error(name):
  mesh = mesh_of({"data": 4, "model": 2})
  params, tx = place(normal(0), mesh, SPECS), CASES[name]
  with jax.set_mesh(mesh):
    states = {None: tx.init(params), "model": gradcomp.init_state(tx, params, **OVER)}
  for made, given in ((None, SPECS), ("model", P())):
    update = lambda rows, state, x=given: tx.update(
      gradients(params, x, rows), state, params
    )
    with pytest.raises(ValueError, match=says("gradcomp.init_state", "param_specs")):
      jax.eval_shape(update, normal(1, 4), states[made])


def test_bad_specs_are_named():
  params = place(normal(0), mesh_of({"data": 4, "model": 2}), SPECS)
  with pytest.raises(TypeError, match=says("`param_specs`['w']", "got 'model'")):
    shapes(params, SPECS | {"w": "model"})
  with pytest.raises(ValueError, match=says("`param_specs`", "tree", "sharding")):
    shapes(params, {"w": P()})
  with pytest.raises(ValueError, match=says("`param_specs`['b']", "'data'")):
    shapes(params, SPECS | {"b": P("data")})


def train_step(name, kind, *, made=None):
  """``make_train_step`` of SGD with a compressed gradient, its arguments and bytes."""
  mesh = mesh_of({"data": 4, "model": 2}, kind)
  params, codec = place(normal(0), mesh, SPECS), CASES[name]
  tx = codec if name == "zero" else optax.chain(codec, optax.sgd(0.5, momentum=0.5))
  with jax.set_mesh(mesh):
    state = (made or first_state)(tx, params, kind)
  step = gradcomp.make_train_step(linear_loss, tx, mesh=mesh, **OVER)
  rows = lambda seed: place(normal(seed, 4), mesh, dict.fromkeys(SPECS, P("data")))
  return step, params, state, rows


@functools.cache
def trained(name, kind):
  """Parameters, losses and the bytes over each axis of three steps."""
  step, params, state, rows = train_step(name, kind)
  sent = gradcomp.wire_report(step.lower(params, state, rows(1)).compile()).by_axis
  losses = []
  for seed in (1, 2, 3):
    params, state, metrics = step(params, state, rows(seed))
    losses.append(metrics["loss"])
  return params, losses, sent


@pytest.mark.bits
@pytest.mark.parametrize("name", ["two_shot", *slow(*list(CASES)[1:-1])])
def test_a_train_step_has_the_bits_and_bytes_of_explicit_axes(name):
  """It reads the specs from its arguments; no word of the exchange leaves a shard."""
  params, losses, sent = trained(name, AxisType.Auto)
  expected, _, explicit = trained(name, AxisType.Explicit)
  assert_same_bits(params, expected)
  assert {k: x.sharding.spec for k, x in params.items()} == SPECS
  assert np.all(np.isfinite(losses))
  # A number of a byte says whether a step was finite, of all devices of some axes.
  bytes_of = lambda sent: sum(
    x.bytes_sent for x in sent["data"].collectives if x.dtype != "u8"
  )
  assert bytes_of(sent) == bytes_of(explicit) > 0
  over_model = sent["model"].collectives if "model" in sent else ()
  assert not {"u32", "s8", "bf16"}.intersection(x.dtype for x in over_model)


def test_a_train_step_goes_on_with_a_state_of_whole_leaves():
  """As ``optimizer.init`` makes it: each device sends a part of its words."""
  step, *args, rows = train_step(
    "two_shot", AxisType.Auto, made=lambda tx, params, _: tx.init(params)
  )
  _, after, metrics = step.eval_shape(*args, rows(1))
  like = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert like(after) == like(args[1])
  assert metrics["loss"].shape == ()
