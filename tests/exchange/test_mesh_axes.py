"""Training stays the same where the data axis is one of several, or is two axes."""

import functools
import itertools

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


@functools.cache
def trained(where, kinds, codec):
  """Parameters, state and losses of five steps.

  The library's own step makes the data axis manual and no other. A user's map is over
  both axes, typed: ``c`` must come out equal on all devices. In plain jit there is no
  map in sight, and gradients are typed unreduced over an Explicit data axis.
  """
  params, batch = problem()
  mesh, optimizer = model_mesh(kinds), make_optimizer(codec)
  on = functools.partial(NamedSharding, mesh)
  # Copies, which a step may donate.
  placed = {k: jax.device_put(np.array(x), on(SPECS[k])) for k, x in params.items()}
  if where == "train_step":
    step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  else:
    batch = jax.device_put(batch, on(P("data")))
    step = jax.jit(user_step(loss_fn, optimizer))
  if where != "user_map":
    with jax.set_mesh(mesh):
      state = optimizer.init(placed)
    return train(step, placed, state, batch)
  known = dict(axis_name="data", param_specs=SPECS)
  state = gradcomp.init_state(optimizer, params, mesh=mesh, **known)
  specs = gradcomp.state_specs(state, **known)
  step = jax.shard_map(
    user_step(manual_loss_fn, optimizer),
    mesh=mesh,
    in_specs=(SPECS, specs, P("data")),
    out_specs=(SPECS, specs, P()),
    check_vma=True,
  )
  return train(jax.jit(step), placed, state, batch)


def name(x):
  """In the name of a test."""
  return x if isinstance(x, str) else "-".join(kind.name for kind in x)


@pytest.mark.parametrize(
  "where, kinds, codec",
  [
    *(("train_step", kinds, "dense") for kinds in KINDS),
    ("user_map", KINDS[0], "dense"),
    ("user_map", KINDS[-1], "dense"),
    # Plain jit needs types that say what the data axis has not summed yet.
    *(("plain_jit", x, "dense") for x in KINDS if x[0] == AxisType.Explicit),
    ("train_step", KINDS[0], "qsgd"),
    ("user_map", KINDS[-1], "qsgd"),
    *slow(*(("train_step", kinds, "qsgd") for kinds in KINDS[1:])),
    *slow(*(("user_map", kinds, "qsgd") for kinds in KINDS[:-1])),
  ],
  ids=name,
)
def test_training_is_ordinary_and_keeps_the_model_sharding(where, kinds, codec):
  params, state, losses = trained(where, kinds, codec)
  expected, expected_losses = plain_training(5)
  # Means of 4 parts and sums of 2 halves, against one of each: a few ulp, which 5 steps
  # carry on. 8 bits in buckets of 64 lose less than 1 %, and feedback most of that.
  rtol = 1e-5 if codec == "dense" else 1e-2
  np.testing.assert_allclose(losses, expected_losses, rtol=rtol)
  on = functools.partial(NamedSharding, model_mesh(kinds))
  for key, leaf in expected.items():
    got = params[key]
    assert got.sharding.is_equivalent_to(on(SPECS[key]), got.ndim), key
    if codec == "dense":
      np.testing.assert_allclose(got, leaf, rtol=0, atol=2e-6, err_msg=key)
  if codec != "dense":
    residual = state[0].residual["w"]
    assert residual.shape == (4 * 32, 128) and np.any(residual)
    assert residual.sharding.is_equivalent_to(on(P("data", "model")), 2)


def test_the_places_to_train_agree():
  """Each device sends its own part of a leaf, whoever cut it: the same bits."""
  in_map = trained("user_map", EXPLICIT, "qsgd")[0]
  for where in ("train_step", "plain_jit"):
    assert_same_bits(trained(where, EXPLICIT, "qsgd")[0], in_map)


def two_axes_mesh(shape, kind=AxisType.Auto):
  devices = jax.devices()[: shape[0] * shape[1]]
  return jax.make_mesh(shape, BOTH, (kind,) * 2, devices=devices)


def test_vmap_over_chips_inside_vmap_over_hosts_is_groups_on_one_axis():
  """Workers are numbered row by row, and chips of a host are a group."""
  shape = (2, 4)
  rng = np.random.default_rng(1)
  given = {"w": rng.standard_normal((8, 40, 30)).astype(np.float32), "s": np.ones(8)}
  make = functools.partial(gradcomp.qsgd, bits=4, bucket_size=64, feedback="error")
  tx = make(axis_name=BOTH, exchange="hierarchical")
  nested = lambda f: jax.jit(jax.vmap(jax.vmap(f, axis_name="chip"), axis_name="host"))
  split = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), given)
  flat = make(axis_name="data", exchange=modes.grouped("hierarchical", shape[1]))
  on_one = lambda f: jax.jit(jax.vmap(f, axis_name="data"))
  two = nested(tx.update)(split, nested(tx.init)(split))
  two = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), two)
  one = on_one(flat.update)(given, on_one(flat.init)(given))
  # Axes are in the keys of what owners keep.
  assert_same_bits(jax.tree.leaves(two), jax.tree.leaves(one))


def test_gradients_stay_per_worker_over_two_axes():
  params, batch = problem()

  def local(params, batch):
    loss, grads = gradcomp.value_and_grad(loss_fn, axis_name=BOTH)(params, batch)
    deferred = jax.grad(loss_fn)(
      gradcomp.defer_reduction(params, axis_name=BOTH), batch
    )
    return loss, jax.tree.map(lambda x: x[None], (grads, deferred))

  places = dict(in_specs=(P(), P(BOTH)), out_specs=(P(), P(BOTH)))
  mapped = jax.shard_map(local, mesh=two_axes_mesh((2, 2)), **places)
  loss, (grads, deferred) = jax.jit(mapped)(params, batch)
  assert_same_bits(grads, deferred)
  whole = jax.jit(jax.value_and_grad(loss_fn))
  # A mean of 4 means and a mean of all: a few ulp of a value about 1.
  np.testing.assert_allclose(loss, whole(params, batch)[0], rtol=1e-6)
  for i in range(4):
    part = jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], batch)
    for key, expected in whole(params, part)[1].items():
      # Fused differently: a few ulp of values below 1.
      np.testing.assert_allclose(grads[key][i], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Explicit, *slow(AxisType.Auto)])
def test_train_step_over_two_axes(kind):
  """The same step, to the bit, as over one axis of the same devices."""
  results = []
  flat = modes.mesh(4)
  for mesh, axis_name in ((two_axes_mesh((2, 2), kind), BOTH), (flat, "data")):
    params, batch = problem()
    tx = gradcomp.qsgd(bits=4, axis_name=axis_name, feedback="error")
    optimizer = optax.chain(tx, optax.sgd(0.1))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
      state = optimizer.init(params)
    step = gradcomp.make_train_step(loss_fn, optimizer, axis_name=axis_name, mesh=mesh)
    results.append(train(step, params, state, batch, steps=3)[0])
  assert_same_bits(*results)
