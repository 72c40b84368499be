"""Training stays the same where the data axis is one of several, or is two axes."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, Dense
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.modes import train, user_step

BOTH = ("host", "chip")
CODECS = {"dense": Dense(), "qsgd": QSGD(bits=8, bucket_size=64)}
SPECS = {"w": P(None, "model"), "b": P("model"), "v": P("model", None), "c": P()}

# Below JAX 0.12, jax.shard_map drops the model sharding at its exit where the data axis
# is Auto and the model axis Explicit.
KINDS = [
  kinds
  for kinds in itertools.product((AxisType.Auto, AxisType.Explicit), repeat=2)
  if jax.__version_info__ >= (0, 12) or kinds != (AxisType.Auto, AxisType.Explicit)
]
EXPLICIT = (AxisType.Explicit, AxisType.Explicit)


def loss_fn(params, batch):
  """Where the model axis is Explicit, JAX must be told what a matrix product is."""
  hidden = jax.nn.relu(batch["x"] @ params["w"] + params["b"])
  known = "model" in jax.sharding.get_abstract_mesh().explicit_axes
  out = jnp.matmul(hidden, params["v"], out_sharding=P(None, None) if known else None)
  return jnp.mean((out + params["c"] - batch["y"]) ** 2)


def manual_loss_fn(params, batch):
  """The same with both axes manual: each device has a part of the hidden units."""
  hidden = jax.nn.relu(batch["x"] @ params["w"] + params["b"])
  out = lax.psum(hidden @ params["v"], "model")
  return jnp.mean((out + params["c"] - batch["y"]) ** 2)


def problem():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {"w": normal(32, 128) / 6, "b": normal(128), "v": normal(128, 16) / 12}
  return params | {"c": normal(16)}, {"x": normal(32, 32), "y": normal(32, 16)}


def make_optimizer(codec):
  options = {} if codec == "dense" else {"exchange": "two_shot", "feedback": "error"}
  tx = gradcomp.compress(CODECS[codec], axis_name="data", **options)
  return optax.chain(tx, optax.sgd(0.1, momentum=0.9))


@functools.cache
def plain_training(steps):
  params, batch = problem()
  optimizer = optax.sgd(0.1, momentum=0.9)
  state = optimizer.init(params)
  grad_fn = jax.jit(jax.value_and_grad(loss_fn))
  losses = []
  for _ in range(steps):
    loss, grads = grad_fn(params, batch)
    updates, state = optimizer.update(grads, state)
    params = optax.apply_updates(params, updates)
    losses.append(float(loss))
  return params, losses


def model_mesh(kinds):
  return jax.make_mesh((4, 2), ("data", "model"), kinds)


def place(params, mesh):
  """Copies, which a step may donate."""
  return {
    k: jax.device_put(np.array(leaf), NamedSharding(mesh, SPECS[k]))
    for k, leaf in params.items()
  }


@functools.cache
def with_train_step(kinds, codec):
  """The library's own step, which makes the data axis manual and no other."""
  params, batch = problem()
  mesh, optimizer = model_mesh(kinds), make_optimizer(codec)
  params = place(params, mesh)
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  return train(step, params, state, batch)


@functools.cache
def with_user_map(kinds, codec):
  """A user's map over both axes, typed; ``c`` must come out equal on all devices."""
  params, batch = problem()
  mesh, optimizer = model_mesh(kinds), make_optimizer(codec)
  state = gradcomp.init_state(
    optimizer, params, axis_name="data", param_specs=SPECS, mesh=mesh
  )
  specs = gradcomp.state_specs(state, axis_name="data", param_specs=SPECS)

  step = jax.shard_map(
    user_step(manual_loss_fn, optimizer),
    mesh=mesh,
    in_specs=(SPECS, specs, P("data")),
    out_specs=(SPECS, specs, P()),
    check_vma=True,
  )
  batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
  return train(jax.jit(step), place(params, mesh), state, batch)


@functools.cache
def with_plain_jit(kinds, codec):
  """No map in sight: gradients typed unreduced over an Explicit data axis."""
  params, batch = problem()
  mesh, optimizer = model_mesh(kinds), make_optimizer(codec)
  params = place(params, mesh)
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
  return train(jax.jit(user_step(loss_fn, optimizer)), params, state, batch)


def name(x):
  """In the name of a test."""
  if isinstance(x, tuple):
    return "-".join(kind.name for kind in x)
  return x.__name__.removeprefix("with_")


def check_model_sharding(params, kinds):
  for key, leaf in params.items():
    expected = NamedSharding(model_mesh(kinds), SPECS[key])
    assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), key


@pytest.mark.parametrize(
  "run, kinds",
  [
    *((with_train_step, kinds) for kinds in KINDS),
    (with_user_map, KINDS[0]),
    (with_user_map, KINDS[-1]),
    *slow(*((with_user_map, kinds) for kinds in KINDS[1:-1])),
    # Plain jit needs types that say what the data axis has not summed yet.
    *((with_plain_jit, kinds) for kinds in KINDS if kinds[0] == AxisType.Explicit),
  ],
  ids=name,
)
def test_dense_training_is_ordinary_training(run, kinds):
  params, _, losses = run(kinds, "dense")
  expected, expected_losses = plain_training(5)
  # Means of 4 parts and sums of 2 halves, against one of each: a few ulp, which 5 steps
  # carry on.
  np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
  for key, leaf in expected.items():
    np.testing.assert_allclose(params[key], leaf, rtol=0, atol=2e-6, err_msg=key)
  check_model_sharding(params, kinds)


@pytest.mark.parametrize(
  "run, kinds",
  [
    (with_train_step, KINDS[0]),
    (with_user_map, KINDS[-1]),
    *slow(*((with_train_step, kinds) for kinds in KINDS[1:])),
    *slow(*((with_user_map, kinds) for kinds in KINDS[:-1])),
  ],
  ids=name,
)
def test_compressed_training_keeps_the_model_sharding(run, kinds):
  params, state, losses = run(kinds, "qsgd")
  _, expected = plain_training(5)
  # 8 bits in buckets of 64 lose less than 1 % of a gradient, and feedback most of that.
  np.testing.assert_allclose(losses, expected, rtol=1e-2)
  assert losses[-1] < 0.8 * losses[0]
  check_model_sharding(params, kinds)
  residual = state[0].residual["w"]
  chex.assert_shape(residual, (4 * 32, 128))
  assert np.any(residual)
  placed = NamedSharding(model_mesh(kinds), P("data", "model"))
  assert residual.sharding.is_equivalent_to(placed, 2)


def test_the_places_to_train_agree():
  """Each device sends its own part of a leaf, whoever cut it: the same bits."""
  in_map = with_user_map(EXPLICIT, "qsgd")
  for run in (with_train_step, with_plain_jit):
    assert_same_bits(run(EXPLICIT, "qsgd")[0], in_map[0])


def assert_same_leaves(got, expected):
  """Whatever axes are in the keys of a state."""
  assert_same_bits(jax.tree.leaves(got), jax.tree.leaves(expected))


def gradients(workers, steps=2):
  """Trees with leaves ``[N, ...]``, one a step."""
  rng = np.random.default_rng(1)
  normal = lambda *shape: rng.standard_normal((workers, *shape)).astype(np.float32)
  return [{"w": normal(40, 30), "b": normal(77), "s": normal()} for _ in range(steps)]


def flat_mesh(workers):
  return jax.make_mesh(
    (workers,), ("data",), (AxisType.Auto,), devices=jax.devices()[:workers]
  )


def two_axes_mesh(shape, kind=AxisType.Auto):
  devices = jax.devices()[: shape[0] * shape[1]]
  return jax.make_mesh(shape, BOTH, (kind,) * 2, devices=devices)


def in_shard_map(tx, mesh, axis_name, grads):
  """Outputs, and the residuals of both stages, in global form."""
  with jax.set_mesh(mesh):
    state = tx.init(jax.tree.map(lambda x: x[0], grads[0]))
  specs = gradcomp.state_specs(state, axis_name=axis_name)

  def local(grads, state):
    return tx.update(jax.tree.map(lambda x: x[0], grads), state)

  update = jax.jit(
    jax.shard_map(
      local, mesh=mesh, in_specs=(P(axis_name), specs), out_specs=(P(), specs)
    )
  )
  outputs = []
  for grad in grads:
    output, state = update(grad, state)
    outputs.append(output)
  return outputs, state.residual, state.server_residual


@pytest.mark.parametrize(
  "exchange, codec",
  [
    ("two_shot", QSGD(bits=4)),
    ("psum", Dense()),
    ("psum", QSGD(bits=4, share_scale=True)),
    *slow(("all_gather", QSGD(bits=4)), ("ring", QSGD(bits=4))),
  ],
  ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_two_axes_are_one(exchange, codec):
  """Workers are numbered row by row, as on one axis of the same devices."""
  make = functools.partial(
    gradcomp.compress,
    codec,
    exchange=exchange,
    feedback=None if codec == Dense() else "error",
  )
  grads = gradients(4)
  two = in_shard_map(make(axis_name=BOTH), two_axes_mesh((2, 2)), BOTH, grads)
  one = in_shard_map(make(axis_name="data"), flat_mesh(4), "data", grads)
  assert_same_leaves(two, one)


def test_hierarchical_over_two_axes_is_groups_on_one():
  """Also by ``jax.vmap`` over chips inside ``jax.vmap`` over hosts."""
  shape, workers = (2, 4), 8
  make = functools.partial(gradcomp.qsgd, bits=4, bucket_size=64, feedback="error")
  grads = gradients(workers)
  tx = make(axis_name=BOTH, exchange="hierarchical")
  two = in_shard_map(tx, two_axes_mesh(shape), BOTH, grads)
  flat = make(axis_name="data", exchange=modes.grouped("hierarchical", shape[1]))
  one = in_shard_map(flat, flat_mesh(workers), "data", grads)
  assert_same_leaves(two, one)

  nested = lambda f: jax.vmap(jax.vmap(f, axis_name="chip"), axis_name="host")
  init, update = jax.jit(nested(tx.init)), jax.jit(nested(tx.update))
  split = lambda x: x.reshape(*shape, *x.shape[1:])
  state = init(jax.tree.map(split, grads[0]))
  for grad, expected in zip(grads, two[0], strict=True):
    output, state = update(jax.tree.map(split, grad), state)
    whole = jax.tree.map(lambda x: np.broadcast_to(x, (*shape, *x.shape)), expected)
    assert_same_bits(output, whole)
  # A map stacks what differs between workers on the first axis.
  stacked = jax.tree.map(
    lambda x: x.reshape(-1, *x.shape[3:]), (state.residual, state.server_residual)
  )
  assert_same_bits(stacked, two[1:])


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_stay_per_worker_over_two_axes(check_vma):
  params, batch = problem()

  def local(params, batch):
    loss, grads = gradcomp.value_and_grad(loss_fn, axis_name=BOTH)(params, batch)
    deferred = jax.grad(loss_fn)(
      gradcomp.defer_reduction(params, axis_name=BOTH), batch
    )
    return loss, jax.tree.map(lambda x: x[None], (grads, deferred))

  loss, (grads, deferred) = jax.jit(
    jax.shard_map(
      local,
      mesh=two_axes_mesh((2, 2)),
      in_specs=(P(), P(BOTH)),
      out_specs=(P(), P(BOTH)),
      check_vma=check_vma,
    )
  )(params, batch)
  assert_same_bits(grads, deferred)
  # A mean of 4 means and a mean of all: a few ulp of a value about 1.
  np.testing.assert_allclose(loss, loss_fn(params, batch), rtol=1e-6)
  grad_fn = jax.jit(jax.grad(loss_fn))
  for i in range(4):
    part = jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], batch)
    for key, expected in grad_fn(params, part).items():
      # Fused differently: a few ulp of values below 1.
      np.testing.assert_allclose(grads[key][i], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Explicit, *slow(AxisType.Auto)])
def test_train_step_over_two_axes(kind):
  """The same step, to the bit, as over one axis of the same devices."""
  results = []
  for mesh, axis_name in ((two_axes_mesh((2, 2), kind), BOTH), (flat_mesh(4), "data")):
    params, batch = problem()
    tx = gradcomp.qsgd(bits=4, axis_name=axis_name, feedback="error")
    optimizer = optax.chain(tx, optax.sgd(0.1))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
      state = optimizer.init(params)
    step = gradcomp.make_train_step(loss_fn, optimizer, axis_name=axis_name, mesh=mesh)
    results.append(train(step, params, state, batch, steps=3)[0])
  assert_same_bits(*results)
