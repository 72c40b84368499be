"""States go from one mesh to another: live, by a checkpoint, and over other axes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp.exchange import Hierarchical
from tests.plugins import slow_cases
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases import reshard as cases

rng = np.random.default_rng(0)
PARAMS = {"w": rng.standard_normal((40, 32), np.float32), "b": np.ones(7, np.float32)}


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)


def batch(seed):
  return np.random.default_rng(seed).standard_normal((24, 40)).astype(np.float32)


def optimizer_over(axis_name="data", exchange="two_shot"):
  exchange = gradcomp.compress(
    cases.FOUR_BITS,
    axis_name=axis_name,
    exchange=exchange,
    feedback="error",
    min_leaf_size=0,
  )
  return optax.chain(exchange, optax.sgd(0.1, momentum=0.9))


WHOLE = P()


def placed(tree, mesh, spec=WHOLE):
  return jax.device_put(tree, NamedSharding(mesh, spec))


def trained(optimizer, mesh, steps=2, axis_name="data"):
  """Parameters and state after some steps on a mesh."""
  params = placed(PARAMS, mesh)
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  return run(optimizer, mesh, params, state, steps, axis_name)


def run(optimizer, mesh, params, state, steps=1, axis_name="data"):
  train = gradcomp.make_train_step(
    loss_fn, optimizer, axis_name=axis_name, mesh=mesh, donate=False
  )
  for seed in range(steps):
    params, state, _ = train(params, state, batch(seed))
  return params, state


def reshard(state, optimizer, old, new, **options):
  return cases.reshard(state, optimizer, old, new, PARAMS, **options)


@pytest.mark.parametrize("new", [2, *slow_cases.slow(6)])
def test_a_training_goes_on_on_another_mesh(new, tmp_path):
  """From live arrays, and from a checkpoint that is read without the old mesh."""
  optimizer = optimizer_over()
  params, state = trained(optimizer, modes.mesh(4))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    shapes = gradcomp.checkpoint.state_shapes(
      optimizer, PARAMS, workers=4, axis_name="data"
    )
    like = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    restored = checkpointer.restore(tmp_path / "state", like)
  mesh = modes.mesh(new)
  live = reshard(state, optimizer, 4, new, mesh=mesh)
  with jax.set_mesh(mesh):
    read = reshard(restored, optimizer, 4, new)
    like = optimizer.init(placed(PARAMS, mesh))
  on_host = reshard(restored, optimizer, 4, new)
  assert_same_bits(read, live)
  assert_same_bits(on_host, live)
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(on_host))
  for moved in (live, read):
    chex.assert_trees_all_equal_shapes_and_dtypes(moved, like)
    assert all(
      x.sharding.is_equivalent_to(y.sharding, x.ndim)
      for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(like), strict=True)
    )
  summed = lambda x, n: np.asarray(x).reshape(n, *PARAMS["w"].shape).sum(0)
  np.testing.assert_allclose(
    # Three additions of numbers below 1, each rounded by 2**-24.
    summed(live[0].residual["w"], new),
    summed(state[0].residual["w"], 4),
    atol=1e-6,
  )
  after, _ = run(optimizer, mesh, placed(params, mesh), live)
  expected, _ = run(optimizer, modes.mesh(4), params, state)
  assert np.isfinite(np.asarray(after["w"])).all()
  # Means of the same batch, encoded in 4 bits: no further than two of their steps.
  step = float(jnp.abs(expected["w"] - params["w"]).max()) / 7
  assert np.abs(after["w"] - np.asarray(expected["w"])).max() < 2 * step


@pytest.mark.parametrize("sizes", [(4, 2), *slow_cases.slow(((1, 2),))])
def test_two_axes(sizes):
  """The owner of a share is counted over both axes, the first one first."""
  axes = ("host", "chip")
  optimizer = optimizer_over(axes, Hierarchical())
  devices = jax.devices()
  meshes = [
    jax.make_mesh(x, axes, (AxisType.Auto,) * 2, devices=devices[: x[0] * x[1]])
    for x in ((2, 2), sizes)
  ]
  params, state = trained(optimizer, meshes[0], axis_name=axes)
  new = sizes[0] * sizes[1]
  moved = reshard(state, optimizer, 4, new, mesh=meshes[1], axis_name=axes)
  rows = [
    np.asarray(x[0].server_residual[axes][0]).reshape(-1)[: PARAMS["w"].size]
    for x in (state, moved)
  ]
  assert rows[0].any()
  np.testing.assert_array_equal(rows[1], rows[0] * np.float32(4 / new))
  assert moved[0].residual["w"].sharding.spec == P(axes)
  run(optimizer, meshes[1], placed(params, meshes[1]), moved, axis_name=axes)


@pytest.mark.parametrize("new", [8, *slow_cases.slow(2)])
def test_sums_under_explicit_axes(new):
  """There owners keep a part of the sum, which has no number of workers in it."""
  tx = cases.compressed("two_shot", "error")
  meshes = {n: modes.mesh(n, AxisType.Explicit) for n in (4, new)}
  update = jax.jit(lambda given, state: tx.update(unreduce(given, "data"), state))

  def step(state, n, seed):
    given = cases.gradients(n, seed)
    output, state = update(placed(given, meshes[n], P("data")), state)
    return output, state, {key: x.sum(axis=0) for key, x in given.items()}

  with jax.set_mesh(meshes[4]):
    state = tx.init(placed(cases.PARAMS, meshes[4]))
  _, state, _ = step(state, 4, 1)
  before = cases.waiting(state, 4, weight=1)
  moved = cases.reshard(state, tx, 4, new, mesh=meshes[new], keep="addends")
  output, after, came = step(moved, new, 2)
  waits = cases.waiting(after, new, weight=1)
  for key, x in before.items():
    # Sums of at most 8 numbers of about 5, each rounded by 2**-24.
    np.testing.assert_allclose(
      np.asarray(output[key]) + waits[key], x + came[key], atol=2e-5
    )


@pytest.mark.parametrize("manual", [False, True])
def test_parameters_that_are_cut_over_another_axis(manual):
  """Each place along it has owners of its own, with the rows of its part."""
  axes = ("data", "model")
  kind = AxisType.Auto if manual else AxisType.Explicit
  old, new = (
    jax.make_mesh((n, 2), axes, (kind,) * 2, devices=jax.devices()[: 2 * n])
    for n in (2, 3)
  )
  tx = gradcomp.compress(
    cases.FOUR_BITS, axis_name="data", exchange="two_shot", feedback="error"
  )
  params, specs = {"w": jnp.ones((64, 40))}, {"w": P(None, "model")}
  cut = placed(params, old, specs["w"])
  options = {"param_specs": specs} if manual else {}
  if manual:
    first = gradcomp.init_state(
      tx, params, axis_name="data", param_specs=specs, mesh=old
    )
  else:
    with jax.set_mesh(old):
      first = tx.init(cut)
  rng = np.random.default_rng(0)
  whole = rng.standard_normal((64, 40)).astype(np.float32)  # what owners keep

  def owned(n):
    """The parts along the model axis, in rows, sharded over n workers."""
    parts = [whole[:, :20].reshape(-1), whole[:, 20:].reshape(-1)]
    share = -(-parts[0].size // (n * cases.TILE))
    filling = np.zeros(n * share * cases.TILE - parts[0].size, np.float32)
    rows = [np.concatenate([x, filling]) for x in parts]
    return np.stack([x.reshape(n, -1) for x in rows], axis=1)

  like = first.server_residual[axes][0]
  server = jax.device_put(
    owned(2).reshape(like.shape).astype(np.float32), like.sharding
  )
  state = first._replace(server_residual={axes: (server,)})
  moved = cases.reshard(state, tx, 2, 3, cut, mesh=new, **options)
  np.testing.assert_array_equal(
    np.asarray(moved.server_residual[axes][0]).reshape(3, 2, -1),
    owned(3).astype(np.float32) * np.float32(2 / 3),
  )
  assert moved.server_residual[axes][0].sharding.spec == P(axes)
  assert moved.residual["w"].sharding.spec == P("data", "model")
  assert moved.residual["w"].shape == (192, 40)
  # What a checkpoint gives is placed alike.
  read = jax.tree.map(np.asarray, state)
  read = cases.reshard(read, tx, 2, 3, cut, mesh=new, **options)
  assert_same_bits(read, moved)
  for x, y in zip(jax.tree.leaves(read), jax.tree.leaves(moved), strict=True):
    assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.parametrize(
  "name",
  [
    "zero",
    *slow_cases.slow("around", "messages", "two_shot momentum", "powersgd all_gather"),
    *slow_cases.slow("levels two_shot", "sampled all_gather", "threshold two_shot"),
  ],
)
def test_a_train_step_takes_what_comes(name):
  tx, params, mesh = cases.CASES[name](), cases.params_of(name), modes.mesh(2)
  state = jax.tree.map(np.abs, cases.filled(tx, 4, params))  # Adam takes a root
  state = cases.reshard(state, tx, 4, 2, params, mesh=mesh)

  def loss_fn(params, batch):
    return sum(jnp.mean((leaf - batch[0, 0]) ** 2) for leaf in jax.tree.leaves(params))

  step = gradcomp.make_train_step(
    loss_fn, tx, axis_name="data", mesh=mesh, donate=False
  )
  params, *_ = step(placed(params, mesh), state, batch(0))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_a_donated_state_leaves_the_old_one():
  optimizer, mesh = optimizer_over(), modes.mesh(2)
  _, state = trained(optimizer, mesh, steps=0)
  same = reshard(state, optimizer, 2, 2, mesh=mesh)
  jax.jit(lambda x: x, donate_argnums=0)(same)
  assert not any(x.is_deleted() for x in jax.tree.leaves(state))
  assert_same_bits(jax.tree.leaves(state)[0], np.int32(0))
