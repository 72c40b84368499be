"""Trainings of local steps: states, train steps, reports, and islands of chips."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.mesh import agreement
from gradcomp.codecs import QSGD, BlockTop, Dense, TopK
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits
from tests.support.cases.local import ADAM, NESTEROV, N, local
from tests.support.cases.reshard import unstacked
from tests.support.cases.zero import gradients, last, loss_fn, train, tree
from tests.support.cases.zero import sharded as placed

PLAIN = optax.sgd(1.0)
DENSE = optax.chain(gradcomp.dense(axis_name="data"), optax.sgd(0.1))


def test_one_program_sends_in_a_branch_and_nothing_elsewhere():
  """It sends what explain says, and an inspection measures what that step changes."""
  tx = local(optax.sgd(0.5), NESTEROV, QSGD(bits=4))
  params, state, mesh = placed(tx, tree(0, {"w": (64, 512)}))
  given = dict(mesh=mesh, options=gradcomp.TrainOptions(report=True), donate=False)
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", **given)
  batch = jax.device_put(jnp.ones(N), jax.NamedSharding(mesh, P("data")))
  report = gradcomp.wire_report(step.lower(params, state, batch))
  assert report.collectives and all(x.in_branch for x in report.collectives)
  found = gradcomp.explain(tx, params, workers=N)
  assert report.bytes_sent == found.bytes_sent
  assert "a round of 3 steps" in str(found) and "2.03 bits" in str(found)
  for i in range(6):
    before, (params, state, metrics) = (params, state), step(params, state, batch)
    assert (metrics["update_norm"] > 0) == (i % 3 == 2)
  assert metrics["loss"].shape == metrics["gradient_norm"].shape == (N,)
  np.testing.assert_allclose(metrics["bytes_sent"], found.bytes_sent / 3)
  assert step._cache_size() == 1
  for start, sends in ((params, state), False), (before, True):
    inspection = step(*start, batch, inspect=True)[2]["inspection"]
    error = float(inspection.total.relative_error)
    assert 0 < error < 1 if sends else np.isnan(error)


def test_an_error_of_the_loss_is_raised_once():
  """Not as the context of itself, for the step is traced unchecked after it."""
  tx = local(optax.sgd(0.5), NESTEROV, Dense())
  params, state, mesh = placed(tx, tree(0, {"w": (8,)}))

  def wrong(params, batch):
    raise TypeError("of the user") from KeyError("its cause")

  step = gradcomp.make_train_step(wrong, tx, axis_name="data", mesh=mesh)
  with pytest.raises(TypeError, match="of the user") as caught:
    step(params, state, jnp.ones(N))
  chain, error = [], caught.value
  while error := error.__cause__ or error.__context__:
    chain.append(str(error))
  assert "of the user" not in chain and "'its cause'" in chain


def test_a_step_that_is_traced_again_has_one_record(monkeypatch):
  """Its parts are those of the trace that JAX takes."""
  records = []
  monkeypatch.setattr(agreement, "is_alone", lambda: False)
  monkeypatch.setattr(agreement, "processes_of", lambda mesh: (0, 1))
  monkeypatch.setattr(agreement, "_compare", lambda parts, _: records.append(parts))
  plateau = optax.contrib.reduce_on_plateau(patience=1)
  for inner in (optax.sgd(0.5), optax.chain(optax.sgd(0.5), plateau)):
    tx = local(inner, NESTEROV, Dense())
    params, state, mesh = placed(tx, tree(0, {"w": (8,)}))
    records.clear()
    step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
    jax.eval_shape(step, params, state, jnp.ones(N))
    (record,) = records
    names = [part["transformation"] for part in record]
    ours = "local.local_steps", "compress", "make_train_step"
    assert names == [f"gradcomp.{name}" for name in ours]


def test_another_number_of_workers_goes_on_behind_an_exchange():
  """Residuals keep their sum, and new workers get the inner state of old ones."""
  tx = local(ADAM, NESTEROV, TopK(density=0.1))
  params = tree(0, {"w": (20, 50)})
  _, state = last("shard_map", tx, params, gradients(3, {"w": (20, 50)}))
  state = unstacked(state)
  how = dict(axis_name="data", old_workers=N, workers=6)
  moved = gradcomp.reshard_state(tx, params, state, **how)
  old, new = (x.own.inner_state[0].mu["w"] for x in (state, moved))
  assert_same_bits(new.reshape(6, -1), old.reshape(N, -1)[[0, 1, 2, 3, 0, 1]])
  old, new = (x.fragments[0].exchange.residual["w"] for x in (state, moved))
  assert_same_bits(new.reshape(6, -1).sum(0), old.reshape(N, -1).sum(0))
  away = jax.tree.map(lambda x: x + 1, state.own.by_axes[("data",)][0])
  own = {("data",): (away, state.own.inner_state)}
  state = state._replace(own=state.own._replace(by_axes=own))
  with pytest.raises(ValueError, match="must be a state after an exchange"):
    gradcomp.reshard_state(tx, params, state, **how)


def stepped(tx, axes, params, loss_fn=loss_fn, **options):
  """A train step over all axes of a mesh, and what it takes."""
  mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
  over = {"axis_name": tuple(axes), "mesh": mesh}
  params = jax.device_put(params, jax.NamedSharding(mesh, P()))
  specs = jax.tree.map(lambda _: P(), params)
  state = gradcomp.init_state(tx, params, param_specs=specs, **over)
  step = gradcomp.make_train_step(loss_fn, tx, **over, **options)
  cut = jax.NamedSharding(mesh, P(tuple(axes)))
  return step, params, state, lambda batch: jax.device_put(batch, cut)


@functools.cache
def compiled(tx, shape, axes):
  """Returns what the wire has of a train step, and what its metrics say of that."""
  options = gradcomp.TrainOptions(report=True)
  params = {"w": np.zeros(shape, np.float32)}
  step, *given, put = stepped(tx, dict(axes), params, options=options)
  given = *given, put(np.ones(math.prod(dict(axes).values()), np.float32))
  program = step.lower(*given).compile()
  *_, metrics = program(*given)
  found = gradcomp.wire_report(program, mesh=given[-1].sharding.mesh)
  return found, metrics["bytes_sent"]


BY_SENDERS = BlockTop(block_size=512), {"exchange": "all_gather", "merge": "senders"}


@pytest.mark.parametrize(
  "codec, options", [(BlockTop(), {"exchange": "two_shot"}), BY_SENDERS]
)
def test_the_wire_has_4000_times_fewer_bytes_in_rounds_of_30_steps(codec, options):
  """Than plain means in float32: both numbers are those of the compiled program."""
  workers, elements = (("data", 8),), 16 * 8192  # a tile for each owner, and more
  tx = local(optax.sgd(0.1), PLAIN, codec, every=30, **options)
  found, told = compiled(tx, (elements,), workers)
  dense, _ = compiled(DENSE, (elements,), workers)
  assert found.collectives and all(x.in_branch for x in found.collectives)
  assert dense.bytes_sent >= 2 * 7 / 8 * 4 * elements
  assert dense.bytes_sent >= 4000 * found.bytes_sent / 30
  np.testing.assert_allclose(told, found.bytes_sent / 30)


def test_a_report_says_the_bytes_behind_the_first_steps():
  """Data-parallel steps are not those that a table of a long training is about."""
  params = tree(0, {"w": (6, 50)})
  told = lambda tx: gradcomp.explain(tx, params, workers=N)
  tx = local(optax.adam(0.1), PLAIN, Dense(), 10, start=100)
  assert told(tx).bytes_per_step == told(DENSE).bytes_sent / 10


def test_gradients_may_be_collected_for_a_local_step():
  """By MultiSteps: four gradients are two local steps, and one round."""
  tx = optax.MultiSteps(local(optax.sgd(0.5), PLAIN, Dense(), every=2), 2)
  loss_fn = lambda params, x: jnp.mean(jnp.sum((params["w"] - x) ** 2, 1)) / 2
  params = {"w": np.zeros(8, np.float32)}
  step, params, state, put = stepped(tx, {"data": N}, params, loss_fn)
  got = []
  for target in np.float32([1, 3, 2, 4]):
    batch = np.outer(target * np.arange(N), np.ones(8)).astype(np.float32)
    params, state, _ = step(params, state, put(batch))
    got.append(float(params["w"][0]))
  # Halfway to 2 times a worker's number, then halfway to 3 times it: 2 times its mean.
  assert got == [0.0, 0.0, 0.0, 2.0 * 1.5]


def test_leaves_that_a_mask_leaves_out_are_those_that_all_workers_have():
  """Workers move the others: gradients are computed at both."""
  inside = local(optax.sgd(0.5), PLAIN, Dense(), every=2)
  tx = optax.masked(inside, {"w": True, "v": False})
  shapes = {"w": (5,), "v": (3,)}
  params, grads = tree(0, shapes), tree(1, shapes, N)

  def step(grads):
    _, state = tx.update(grads, tx.init(params), params)
    return gradcomp.local.local_params(params, state)

  own = jax.jit(jax.vmap(step, axis_name="data"))(grads)
  assert_same_bits(own["w"], params["w"] - 0.5 * grads["w"])
  assert_same_bits(own["v"], np.stack([params["v"]] * N))


@pytest.mark.parametrize("codec", [QSGD(bits=8), *slow(Dense())], ids=repr)
def test_islands_average_in_every_step_and_step_alone_between(codec):
  """Two axes: a compressed exchange inside of the worker's optimizer."""
  how = {"axis_name": "chip", "feedback": "error", "exchange": "two_shot"}
  inside = optax.chain(gradcomp.qsgd(bits=8, **how), optax.sgd(0.25))
  over = {"axis_name": "island", "codec": codec, "every": 2}
  tx = gradcomp.local.local_steps(inside, PLAIN, **over)
  away = lambda params, target: jnp.sum((params["w"] - target) ** 2, (1, 2))
  loss_fn = lambda *args: jnp.mean(away(*args)) / 2
  params, target = tree(0, {"w": (4, 256)}), tree(1, {"w": (4, 256)}, N)["w"]
  axes = {"island": 2, "chip": 2}
  step, got, state, put = stepped(tx, axes, params, loss_fn, donate=False)
  for number in range(2):
    got, state, metrics = step(got, state, put(target))
    # What an island's chips moved by is of the same bits, and what all have, too.
    ((leaf, _),) = state.own.by_axes.values()
    shards = sorted(leaf["w"].addressable_shards, key=lambda x: x.device.id)
    moved = [np.asarray(x.data) for x in shards]
    assert_same_bits(np.stack(moved[::2]), np.stack(moved[1::2]))
    assert np.any(moved[0] != moved[2]) == (number == 0)
    for shard in got["w"].addressable_shards:
      assert_same_bits(shard.data, np.asarray(got["w"]))
  expected = params["w"] * 9 / 16 + target.mean(axis=0) * 7 / 16
  # A step of 8 bits is at most 8/127. Two quarters of it, and a half at an owner's.
  np.testing.assert_allclose(got["w"], expected, atol=0.1, rtol=0)
  assert metrics["loss"].shape == (4,)


def test_islands_are_told_the_bytes_of_each_axis():
  """Chips average in each step, islands in one of ten: the page's example."""
  inside = optax.chain(gradcomp.dense(axis_name="chip"), optax.adamw(1e-2))
  over = {"axis_name": "island", "codec": QSGD(bits=4), "every": 10}
  tx = gradcomp.local.local_steps(inside, NESTEROV, **over)
  axes = {"island": 2, "chip": 4}
  report, told = compiled(tx, (256, 256), tuple(axes.items()))
  every = report.by_axis["chip"].bytes_sent, report.by_axis["island"].bytes_sent
  assert [x.in_branch for x in report.collectives] == [False, True]
  assert sum(every) == report.bytes_sent
  found = gradcomp.explain(tx, {"w": jnp.zeros((256, 256))}, workers=axes)
  assert [leaf.bytes_sent for leaf in found.leaves] == list(every)
  assert found.bytes_sent == report.bytes_sent
  assert told == found.bytes_per_step == every[0] + every[1] / 10 == 396_544
  text = str(found)
  assert "Bytes that each of 8 workers sends in a step that sends all." in text
  assert "In a round of 10 steps it sends 3,965,440. That is 48.4 bits" in text


@pytest.mark.parametrize(
  "mode, dtype",
  [
    ("shard_map_unchecked", "bfloat16"),
    *slow(("vmap", "float32"), ("pmap", "bfloat16"), ("shard_map", "float32")),
  ],
)
def test_muloco_with_two_bits_trains_and_brings_all_workers_together(mode, dtype):
  """Muon takes the matrix, and Adam the vector; each worker has a target of its own."""
  inner = optax.contrib.muon(0.05, adam_learning_rate=0.05)
  codec = QSGD(bits=2, bucket_size=128)
  tx = local(inner, NESTEROV, codec, every=4, min_leaf_size=100)

  def update(target, state, params):
    own = gradcomp.local.local_params(params, state)
    return tx.update(jax.tree.map(jnp.subtract, own, target), state, params)

  shapes = {"w": (16, 32), "v": (300,)}
  cast = lambda x: x.astype(dtype)
  params, goal, noise = tree(0, shapes), tree(1, shapes), tree(2, shapes, N)
  targets = jax.tree.map(lambda x, y: cast(x + y / 4), goal, noise)
  towards = optax.GradientTransformation(tx.init, update)
  found = train(mode, towards, jax.tree.map(cast, params), [targets] * 24)
  for number, (got, state) in enumerate(found, 1):
    ((moved, _),) = state.own.by_axes.values()
    for name, leaf in got.items():
      assert leaf.dtype == dtype
      assert_same_bits(leaf, np.stack([leaf[0]] * N))
      assert np.any(moved[name]) == (number % 4 > 0)
  for name, leaf in got.items():
    away = lambda x, name=name: np.linalg.norm(np.asarray(x) - np.asarray(goal[name]))
    assert away(leaf[0]) < 0.6 * away(params[name])


def test_a_mean_of_models_in_each_step_is_refused():
  """All workers would average statistics of parameters that are each one's own."""
  tx, loss = local(ADAM, NESTEROV, Dense()), lambda p, m, x: (jnp.sum(p["w"]), m)
  params, state, mesh = placed(tx, {"w": jnp.ones(3)})
  given = dict(axis_name="data", mesh=mesh)
  given |= {"options": gradcomp.TrainOptions(model_state="mean")}
  step = gradcomp.make_train_step(loss, tx, **given)
  with pytest.raises(ValueError, match='`model_state` must be "local" or None'):
    step.eval_shape(params, state, jnp.ones(1), jnp.ones(N))
