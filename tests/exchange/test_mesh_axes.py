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
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits
from tests.support.modes import train, user_step

BOTH = ("host", "chip")
SGD = optax.sgd(0.1, momentum=0.9)
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


@functools.cache
def plain_training():
  params, batch = problem()
  step = jax.jit(user_step(loss_fn, SGD, None))
  return train(step, params, SGD.init(params), batch)


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
  options = {} if codec == "dense" else {"exchange": "two_shot", "feedback": "error"}
  tx = gradcomp.compress(CODECS[codec], axis_name="data", **options)
  mesh, optimizer = model_mesh(kinds), optax.chain(tx, SGD)
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
  places = dict(in_specs=(SPECS, specs, P("data")), out_specs=(SPECS, specs, P()))
  step = user_step(manual_loss_fn, optimizer)
  step = jax.shard_map(step, mesh=mesh, check_vma=True, **places)
  return train(jax.jit(step), placed, state, batch)


def name(x):
  """In the name of a test."""
  return x if isinstance(x, str) else "-".join(kind.name for kind in x)


@pytest.mark.parametrize(
  "where, kinds, codec",
  [
    *(("train_step", kinds, "dense") for kinds in KINDS),
    *(("user_map", kinds, "dense") for kinds in (KINDS[0], KINDS[-1])),
    # Plain jit needs types that say what the data axis has not summed yet.
    *(("plain_jit", x, "dense") for x in KINDS if x[0] == AxisType.Explicit),
    ("train_step", KINDS[0], "qsgd"),
    ("user_map", KINDS[-1], "qsgd"),
    *slow(*(("train_step", kinds, "qsgd") for kinds in KINDS[1:-1])),
  ],
  ids=name,
)
def test_training_is_ordinary_and_keeps_the_model_sharding(where, kinds, codec):
  params, state, losses = trained(where, kinds, codec)
  expected, _, expected_losses = plain_training()
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


def test_vmap_over_chips_inside_vmap_over_hosts_is_groups_on_one_axis():
  """Workers are numbered row by row, and chips of a host are a group."""
  shape = (2, 4)
  given = laws.tree({"w": (40, 30)}, 8, seed=1) | {"s": np.ones(8)}
  make = functools.partial(gradcomp.qsgd, bits=4, bucket_size=64, feedback="error")
  tx = make(axis_name=BOTH, exchange="hierarchical")
  nested = lambda f: jax.jit(jax.vmap(jax.vmap(f, axis_name="chip"), axis_name="host"))
  split = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), given)
  flat = make(axis_name="data", exchange=modes.grouped("hierarchical", shape[1]))
  two = nested(tx.update)(split, nested(tx.init)(split))
  two = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), two)
  one = modes.run_with_state("vmap", flat, [given])
  # Axes are in the keys of what owners keep.
  assert_same_bits(jax.tree.leaves(two), jax.tree.leaves(one))


@pytest.mark.parametrize("kind", [AxisType.Explicit, *slow(AxisType.Auto)])
def test_train_step_over_two_axes(kind):
  """The same step, to the bit, as over one axis of the same devices."""
  results = []
  grid = jax.make_mesh((2, 2), BOTH, (kind,) * 2, devices=jax.devices()[:4])
  for mesh, axis_name in ((grid, BOTH), (modes.mesh(4), "data")):
    params, batch = problem()
    tx = gradcomp.qsgd(bits=4, axis_name=axis_name, feedback="error")
    optimizer = optax.chain(tx, optax.sgd(0.1))
    params, state = modes.placed(optimizer, params, mesh)
    step = gradcomp.make_train_step(loss_fn, optimizer, axis_name=axis_name, mesh=mesh)
    results.append(train(step, params, state, batch, steps=3))
  (params, _, losses), (expected, _, own) = results
  assert_same_bits(params, expected)
  np.testing.assert_allclose(losses, own, rtol=1e-6)  # a mean in another order
