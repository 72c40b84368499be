"""States go from one mesh to another, and trainings go on with them."""

import functools
import math

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
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases import reshard as cases
from tests.support.cases.zero import coded

rng = np.random.default_rng(0)
PARAMS = {"w": rng.standard_normal((40, 32), np.float32), "b": np.ones(7, np.float32)}
WHOLE = P()


def placed(tree, mesh, spec=WHOLE):
  return jax.device_put(tree, NamedSharding(mesh, spec))


def mesh_of(axes, sizes, kind):
  devices = jax.devices()[: math.prod(sizes)]
  return jax.make_mesh(sizes, axes, (kind,) * 2, devices=devices)


def zeros(*args):
  return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), cases.shapes(*args))


def explicit_step(tx, state, gradients):
  """``cases.step`` of sums, in plain jit under Explicit axes."""
  mesh = modes.mesh(len(gradients["w"]), AxisType.Explicit)
  update = jax.jit(lambda given, state: tx.update(unreduce(given, "data"), state))
  specs = gradcomp.state_specs(state, axis_name="data")
  state = gradcomp.checkpoint.put_on_mesh(state, mesh, specs)
  return update(placed(gradients, mesh, P("data")), state)


@pytest.mark.parametrize(
  "name, pair, explicit",
  [
    ("two_shot error", (4, 3), False),
    ("hierarchical error", (8, 4), False),
    ("two_shot error", (4, 8), True),
    *slow(("messages", (2, 4), False), ("two_shot error", (1, 4), False)),
    *slow(("psum error", (2, 8), False)),
  ],
)
def test_a_step_sends_what_waited_in_other_workers(name, pair, explicit):
  """Gradients that came in = what M workers sent + what still waits, in each element.

  A row that another owner had in another place would be sent as another element. Under
  Explicit axes owners keep a part of the sum, which has no number of workers in it.
  """
  old, new = pair
  tx, step = cases.CASES[name](), explicit_step if explicit else cases.step
  _, state = step(tx, zeros(tx, old), cases.gradients(old, 1))
  weight = 1 if explicit else None
  before = cases.waiting(state, old, weight)
  assert all(np.any(x) for x in (before["v"], before["w"]))
  moved = cases.reshard(state, tx, old, new, keep="addends" if explicit else "sum")
  given = cases.gradients(new, 2)
  output, after = step(tx, moved, given)
  waits = cases.waiting(after, new, weight)
  for key, x in before.items():
    came = x + np.asarray(given[key], np.float64).sum(axis=0)
    sent = (1 if explicit else new) * np.asarray(output[key])
    # Sums of at most 8 numbers of about 5, each rounded by 2**-24.
    np.testing.assert_allclose(sent + waits[key], came, atol=2e-5)


def test_zero_goes_on_as_one_that_never_changed():
  """In float32 both ways the rows of M owners are Adam's, whoever had them before."""
  tx = coded(optax.adam(0.1), gradcomp.codecs.Dense())
  params = {"v": jnp.ones((3, 100)), "w": jnp.ones((40, 32))}
  gradient = {k: cases.gradients(1, 5)[k][0] for k in params}

  def stepped(params, state, workers):
    alike = jax.tree.map(lambda g: np.stack([g] * workers), gradient)
    update, state = cases.step(tx, state, alike, params)
    return optax.apply_updates(params, update), state

  init = jax.vmap(tx.init, in_axes=None, axis_size=4, axis_name="data")
  state = cases.unstacked(jax.jit(init)(params))
  params, state = stepped(params, state, 4)
  expected, _ = stepped(params, state, 4)
  got, _ = stepped(params, cases.reshard(state, tx, 4, 3, params), 3)
  # Means of N and of M equal gradients are each rounded by at most 8 times 2**-24.
  chex.assert_trees_all_close(got, expected, rtol=1e-5)


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)


def optimizer_over(axis_name="data", exchange="two_shot"):
  options = {"exchange": exchange, "feedback": "error", "min_leaf_size": 0}
  tx = gradcomp.compress(cases.FOUR_BITS, axis_name=axis_name, **options)
  return optax.chain(tx, optax.sgd(0.1, momentum=0.9))


def trained(optimizer, mesh, steps=2, axis_name="data"):
  """Parameters and state after some steps on a mesh."""
  params = placed(PARAMS, mesh)
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  return run(optimizer, mesh, params, state, steps, axis_name)


def run(optimizer, mesh, params, state, steps=1, axis_name="data"):
  how = dict(axis_name=axis_name, mesh=mesh, donate=False)
  train = gradcomp.make_train_step(loss_fn, optimizer, **how)
  for seed in range(steps):
    batch = np.random.default_rng(seed).standard_normal((24, 40)).astype(np.float32)
    params, state, _ = train(params, state, batch)
  return params, state


def reshard(state, optimizer, old, new, **options):
  return cases.reshard(state, optimizer, old, new, PARAMS, **options)


def assert_same_places(x, y):
  for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_a_training_goes_on_on_another_mesh(tmp_path):
  """From live arrays, and from a checkpoint that is read without the old mesh."""
  optimizer = optimizer_over()
  params, state = trained(optimizer, modes.mesh(4))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", zeros(optimizer, 4, PARAMS))
  mesh = modes.mesh(2)
  live = reshard(state, optimizer, 4, 2, mesh=mesh)
  with jax.set_mesh(mesh):
    read = reshard(restored, optimizer, 4, 2)
    like = optimizer.init(placed(PARAMS, mesh))
  on_host = reshard(restored, optimizer, 4, 2)
  assert_same_bits(read, live)
  assert_same_bits(on_host, live)
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(on_host))
  for moved in (live, read):
    chex.assert_trees_all_equal_shapes_and_dtypes(moved, like)
    assert_same_places(moved, like)
  after, _ = run(optimizer, mesh, placed(params, mesh), live)
  expected, _ = run(optimizer, modes.mesh(4), params, state)
  # Means of the same batch, encoded in 4 bits: no further than two of their steps.
  step = float(np.abs(np.asarray(expected["w"]) - np.asarray(params["w"])).max()) / 7
  assert np.abs(np.asarray(after["w"]) - np.asarray(expected["w"])).max() < 2 * step


def test_two_axes():
  """The owner of a share is counted over both axes, the first one first."""
  axes = ("host", "chip")
  optimizer = optimizer_over(axes, Hierarchical())
  meshes = [mesh_of(axes, x, AxisType.Auto) for x in ((2, 2), (4, 2))]
  params, state = trained(optimizer, meshes[0], axis_name=axes)
  moved = reshard(state, optimizer, 4, 8, mesh=meshes[1], axis_name=axes)
  owned = lambda state: np.ravel(state[0].server_residual[axes][0])
  rows = [owned(x)[: PARAMS["w"].size] for x in (state, moved)]
  assert rows[0].any()
  np.testing.assert_array_equal(rows[1], rows[0] * np.float32(4 / 8))
  assert moved[0].residual["w"].sharding.spec == P(axes)
  run(optimizer, meshes[1], placed(params, meshes[1]), moved, axis_name=axes)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_parameters_that_are_cut_over_another_axis(kind):
  """Each place along it has owners of its own, with the rows of its part."""
  axes = ("data", "model")
  old, new = (mesh_of(axes, (n, 2), kind) for n in (2, 3))
  tx = cases.compressed("two_shot", "error")
  params, specs = {"w": jnp.ones((64, 40))}, {"w": P(None, "model")}
  cut = placed(params, old, specs["w"])
  options = {"param_specs": specs} if kind == AxisType.Auto else {}
  if options:
    made = gradcomp.init_state(tx, params, axis_name="data", mesh=old, **options)
  else:
    with jax.set_mesh(old):
      made = tx.init(cut)
  whole = rng.standard_normal((64, 40)).astype(np.float32)  # what owners keep

  def owned(n):
    """The parts along the model axis, in rows, sharded over n workers."""
    parts = [whole[:, :20].reshape(-1), whole[:, 20:].reshape(-1)]
    share = -(-parts[0].size // (n * cases.TILE))
    filling = np.zeros(n * share * cases.TILE - parts[0].size, np.float32)
    rows = [np.concatenate([x, filling]) for x in parts]
    return np.stack([x.reshape(n, -1) for x in rows], axis=1)

  like = made.server_residual[axes][0]
  server = jax.device_put(owned(2).reshape(like.shape), like.sharding)
  state = made._replace(server_residual={axes: (server,)})
  moved = cases.reshard(state, tx, 2, 3, cut, mesh=new, **options)
  rows = moved.server_residual[axes][0]
  np.testing.assert_array_equal(
    np.asarray(rows).reshape(3, 2, -1), owned(3) * np.float32(2 / 3)
  )
  assert rows.sharding.is_equivalent_to(NamedSharding(new, P(axes)), rows.ndim)
  assert moved.residual["w"].sharding.spec == P("data", "model")
  assert moved.residual["w"].shape == (192, 40)
  # What a checkpoint gives is placed alike.
  read = jax.tree.map(np.asarray, state)
  read = cases.reshard(read, tx, 2, 3, cut, mesh=new, **options)
  assert_same_bits(read, moved)
  assert_same_places(read, moved)


@pytest.mark.parametrize("name", ["zero", *slow("around", "sampled error")])
def test_a_train_step_takes_what_comes(name):
  tx, params, mesh = cases.CASES[name](), cases.params_of(name), modes.mesh(2)
  state = jax.tree.map(np.abs, cases.filled(tx, 4, params))  # Adam takes a root
  state = cases.reshard(state, tx, 4, 2, params, mesh=mesh)
  loss_fn = lambda params, batch: optax.tree.sum(params) * batch.mean()
  how = dict(axis_name="data", mesh=mesh, donate=False)
  step = gradcomp.make_train_step(loss_fn, tx, **how)
  params, *_ = step(placed(params, mesh), state, np.ones((2, 2), np.float32))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_a_donated_state_leaves_the_old_one():
  optimizer, mesh = optimizer_over(), modes.mesh(2)
  _, state = trained(optimizer, mesh, steps=0)
  same = reshard(state, optimizer, 2, 2, mesh=mesh)
  jax.jit(lambda x: x, donate_argnums=0)(same)
  assert not any(x.is_deleted() for x in jax.tree.leaves(state))
  assert_same_bits(jax.tree.leaves(state)[0], np.int32(0))


LEARNED = {"w": jnp.zeros((64, 16)), "b": jnp.zeros(16)}
X = rng.standard_normal((3000, 64)).astype(np.float32)
Y = np.argmax(X @ rng.standard_normal((64, 16)) + rng.gumbel(size=(3000, 16)), axis=1)


def entropy(params, x, y):
  logits = x @ params["w"] + params["b"]
  return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@functools.cache
def learner(feedback):
  options = {"exchange": "two_shot", "feedback": feedback, "min_leaf_size": 0}
  tx = gradcomp.qsgd(2, bucket_size=32, axis_name="data", **options)
  momentum = None if feedback == "momentum" else 0.9
  tx = optax.chain(tx, optax.sgd(0.1, momentum=momentum))

  def step(params, state, x, y):
    updates, state = tx.update(jax.grad(entropy)(params, x, y), state)
    return optax.apply_updates(params, updates), state

  return tx, jax.jit(jax.vmap(step, axis_name="data"))


def learned(feedback, counts, seed, keep="mean"):
  """The loss over all examples after 60 steps with each number of workers."""
  tx, step = learner(feedback)
  old = counts[0]
  state = zeros(tx, old, LEARNED)
  state = (state[0]._replace(key=np.uint32([0, seed])), *state[1:])
  params = jax.tree.map(np.asarray, LEARNED)
  draw = np.random.default_rng(1)  # every training has the same batches
  for workers in counts:
    state = cases.reshard(state, tx, old, workers, LEARNED, keep=keep)
    old = workers
    given = modes.of_each(state, workers)
    copies = jax.tree.map(lambda x, n=workers: np.stack([x] * n), params)
    for _ in range(60):
      picked = draw.integers(0, len(X), (workers, 48 // workers))
      copies, given = step(copies, given, X[picked], Y[picked])
    params = jax.tree.map(lambda x: np.asarray(x)[0], copies)
    state = cases.unstacked(given)
  return float(entropy(params, X, Y))


@pytest.mark.slow
@pytest.mark.parametrize(
  "feedback, keep", [("error", "sum"), ("error", "mean"), ("momentum", "mean")]
)
def test_eight_four_and_six_workers(feedback, keep):
  """Trainings with 8 workers differ only by their random bits.

  Those that change the number of workers have no more reason to end elsewhere, but for
  rounding errors that fewer workers average: the mean of eight losses moves by less
  than two standard deviations of one. The sum of momenta would count twice in the mean
  of half as many workers: then the loss is ten standard deviations away.
  """
  alike = [learned(feedback, (8, 8, 8), seed) for seed in range(8)]
  changed = [learned(feedback, (8, 4, 6), seed, keep) for seed in range(8)]
  assert max(alike) < 0.6 < np.log(16)  # it has learned
  assert abs(np.mean(changed) - np.mean(alike)) < 2 * np.std(alike, ddof=1)
