"""Gradients stay per worker, and the train step that is built on them trains."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits

WORKERS = 4


def loss_fn(params, batch):
  hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
  return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def problem(seed=0):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {"w": normal(16, 256) / 4, "b": normal(256), "v": normal(256, 32) / 16}
  batch = {"x": normal(8 * WORKERS, 16), "y": normal(8 * WORKERS, 32)}
  return jax.tree.map(jnp.asarray, params), batch


def local_gradients(params, batch):
  """Each worker's gradient, computed one after the other without any axis."""
  parts = jax.tree.map(lambda x: np.split(x, WORKERS), batch)
  return [
    jax.grad(loss_fn)(params, {"x": x, "y": y})
    for x, y in zip(parts["x"], parts["y"], strict=True)
  ]


def per_worker(mode, grad_fn, params, batch):
  """The function's result on each worker, stacked, in one of the modes."""
  shaped = jax.tree.map(lambda x: jnp.reshape(x, (WORKERS, -1, x.shape[1])), batch)
  if mode == "pmap":
    return jax.pmap(grad_fn, axis_name="data", in_axes=(None, 0))(params, shaped)
  if mode == "vmap":
    return jax.vmap(grad_fn, axis_name="data", in_axes=(None, 0))(params, shaped)

  def local(params, batch):
    return jax.tree.map(lambda x: x[None], grad_fn(params, batch))

  return jax.jit(
    jax.shard_map(
      local,
      mesh=modes.mesh(WORKERS),
      in_specs=(P(), P("data")),
      out_specs=P("data"),
      check_vma=mode == "shard_map",
    )
  )(params, batch)


@pytest.mark.parametrize("mode", modes.MODES)
def test_value_and_grad_stays_per_worker(mode):
  params, batch = problem()
  grad_fn = gradcomp.value_and_grad(loss_fn, axis_name="data")
  losses, grads = per_worker(mode, grad_fn, params, batch)
  # Batched matrix products add in another order: 1e-6 is 8 ulp of values about 1.
  np.testing.assert_allclose(
    losses, np.full(WORKERS, loss_fn(params, batch)), rtol=1e-6
  )
  for i, expected in enumerate(local_gradients(params, batch)):
    got = jax.tree.map(lambda leaf, i=i: leaf[i], grads)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", modes.MODES)
def test_defer_reduction_keeps_jax_grad_local(mode):
  params, batch = problem()

  def grad_fn(params, batch):
    return jax.grad(loss_fn)(gradcomp.defer_reduction(params, axis_name="data"), batch)

  grads = per_worker(mode, grad_fn, params, batch)
  for i, expected in enumerate(local_gradients(params, batch)):
    np.testing.assert_allclose(grads["w"][i], expected["w"], rtol=1e-5, atol=1e-7)


def test_value_and_grad_takes_argnums_and_aux():
  def loss(scale, params, x):
    value = jnp.mean(scale * params["w"] * x)
    return value, {"largest": jnp.max(x)}

  grad_fn = gradcomp.value_and_grad(
    loss, axis_name="data", argnums=(0, 1), has_aux=True
  )
  x = jnp.arange(8.0).reshape(4, 2)
  run = jax.vmap(grad_fn, axis_name="data", in_axes=(None, None, 0))
  (losses, aux), (scale_grad, grads) = run(jnp.float32(2), {"w": jnp.float32(3)}, x)
  np.testing.assert_array_equal(losses, np.full(4, 21.0))
  np.testing.assert_array_equal(aux["largest"], [1, 3, 5, 7])
  np.testing.assert_array_equal(scale_grad, 3 * np.array([0.5, 2.5, 4.5, 6.5]))
  np.testing.assert_array_equal(grads["w"], 2 * np.array([0.5, 2.5, 4.5, 6.5]))


def test_without_an_axis_it_is_jaxs_own():
  params, batch = problem()
  ours = gradcomp.value_and_grad(loss_fn, axis_name=None)(params, batch)
  assert_same_bits(ours, jax.value_and_grad(loss_fn)(params, batch))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_dense_train_step_is_ordinary_training(kind):
  """The trajectory of plain jit on the whole batch, to rounding."""
  params, batch = problem()
  mesh = jax.make_mesh((WORKERS,), ("data",), (kind,), devices=jax.devices()[:WORKERS])
  optimizer = optax.chain(gradcomp.dense(axis_name="data"), optax.adam(1e-2))
  plain = optax.adam(1e-2)
  with jax.set_mesh(mesh):
    # A copy, because the step donates what may be the same buffer.
    placed = jax.device_put(jax.tree.map(np.array, params), NamedSharding(mesh, P()))
    state = optimizer.init(placed)
  chex.clear_trace_counter()
  counted = chex.assert_max_traces(loss_fn, n=1)  # nothing is traced a second time
  step = gradcomp.make_train_step(counted, optimizer, axis_name="data", mesh=mesh)
  plain_state = plain.init(params)

  @jax.jit
  def plain_step(params, state):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = plain.update(grads, state)
    return optax.apply_updates(params, updates), state, loss

  for _ in range(10):
    placed, state, metrics = step(placed, state, batch)
    params, plain_state, loss = plain_step(params, plain_state)
    # The mean of 4 means against one mean: a few ulp, which 10 Adam steps carry on.
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
  chex.assert_trees_all_close(placed, params, rtol=1e-7, atol=1e-3)


@pytest.mark.parametrize("feedback", ["error", *slow(None)])
@pytest.mark.parametrize("kind", [AxisType.Explicit, *slow(AxisType.Auto)])
def test_compressed_train_step_learns(kind, feedback):
  params, batch = problem()
  mesh = jax.make_mesh((WORKERS,), ("data",), (kind,), devices=jax.devices()[:WORKERS])
  optimizer = optax.chain(
    gradcomp.qsgd(bits=4, axis_name="data", feedback=feedback), optax.adam(1e-2)
  )
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
    step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data")
  before = loss_fn(params, batch)
  for _ in range(30):
    params, state, metrics = step(params, state, batch)
  assert metrics["loss"] < 0.5 * before
  assert int(state[0].count) == 30


def with_key(w, x):
  return jnp.sum(w * x), {"loss": w, "state": [jax.random.key(0)]}


def gradients_with_key(kind=None, **options):
  """The shapes of gradients of one device, or of plain jit over axes of a kind."""
  axes = {"axis_name": None if kind is None else "data"}
  place = None if kind is None else NamedSharding(modes.mesh(WORKERS, kind), P("data"))
  grad_fn = gradcomp.value_and_grad(with_key, has_aux=True, **axes, **options)
  x = jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=place)
  return jax.eval_shape(grad_fn, jnp.float32(1), x)


def step_with_key(**options):
  mesh, tx = modes.mesh(WORKERS), gradcomp.dense(axis_name="data")
  options = gradcomp.TrainOptions(has_aux=True, **options)
  made = {"axis_name": "data", "mesh": mesh, "options": options}
  step = gradcomp.make_train_step(with_key, tx, **made)
  w = jnp.float32(1)
  step.trace(w, tx.init(w), jnp.ones((8, 3)))


@pytest.mark.parametrize(
  "averaged",
  [
    lambda: gradients_with_key(AxisType.Auto),
    lambda: gradients_with_key(AxisType.Explicit),
    lambda: gradients_with_key(accumulate=2),
    step_with_key,
    lambda: step_with_key(accumulate=2),
  ],
  ids=["auto", "explicit", "micro-batches", "step", "step of micro-batches"],
)
def test_what_is_no_number_is_named_where_aux_is_averaged(averaged):
  with pytest.raises(
    TypeError, match=r"`aux`\['state'\]\[0\] .* got key<fry>\[\]; let"
  ):
    averaged()


def test_any_aux_is_returned_where_it_is_not_averaged():
  (_, aux), _ = gradients_with_key()
  assert jnp.issubdtype(aux["state"][0].dtype, jax.dtypes.prng_key)


def test_train_step_reports_aux_and_donates():
  def with_aux(params, batch):
    return loss_fn(params, batch), jnp.mean(batch["x"])

  params, batch = problem()
  mesh = modes.mesh(WORKERS)
  optimizer = optax.chain(gradcomp.qsgd(bits=8, axis_name="data"), optax.sgd(0.1))
  placed = jax.device_put(params, NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    state = optimizer.init(placed)
  make = functools.partial(
    gradcomp.make_train_step,
    with_aux,
    optimizer,
    axis_name="data",
    mesh=mesh,
    options=gradcomp.TrainOptions(has_aux=True),
  )
  kept = make(donate=False)(placed, state, batch)
  # A mean of 4 means and a mean of all are within a few ulp of about 1.
  np.testing.assert_allclose(kept[2]["aux"], batch["x"].mean(), atol=1e-6)
  assert not placed["w"].is_deleted()
  donated = make()(placed, state, batch)
  assert placed["w"].is_deleted()
  assert_same_bits(kept, donated)


def test_train_step_on_one_device():
  params, batch = problem()
  optimizer = optax.chain(gradcomp.qsgd(bits=4), optax.sgd(0.1))
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name=None)
  before = loss_fn(params, batch)
  state = optimizer.init(params)
  for _ in range(20):
    params, state, metrics = step(params, state, batch)
  assert metrics["loss"] < before


def test_init_inside_and_outside_the_map_agree():
  """Inside: the worker's own; outside, under the mesh: all of them, sharded."""
  mesh = modes.mesh(WORKERS)
  tx = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
  params = {"w": jnp.ones((6, 5)), "s": jnp.float32(1)}
  specs = gradcomp.state_specs(jax.eval_shape(tx.init, params), axis_name="data")
  inside = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs))(
    params
  )
  with jax.set_mesh(mesh):
    outside, traced = tx.init(params), jax.jit(tx.init)(params)
  for state in (inside, outside, traced):
    residual = state.residual
    chex.assert_shape([residual["w"], residual["s"]], [(WORKERS * 6, 5), (WORKERS,)])
    for leaf in jax.tree.leaves(state.residual):
      assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), leaf.ndim)


@pytest.mark.parametrize(
  "bits, options",
  [
    (6, {"levels": "uniform", "norm": "l2", "feedback": "error"}),
    (8, {"bucket_size": None, "rounding": "nearest"}),
  ],
)
def test_users_may_forbid_promotion(bits, options):
  """JAX's strictest settings, which some projects train with."""
  params, batch = problem()
  mesh = modes.mesh(WORKERS)
  optimizer = optax.chain(
    gradcomp.qsgd(bits=bits, axis_name="data", **options), optax.sgd(0.1)
  )
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  rank, dtype = jax.numpy_rank_promotion, jax.numpy_dtype_promotion
  with rank("raise"), dtype("strict"), jax.set_mesh(mesh):
    params = jax.tree.map(jnp.asarray, params) | {"b": jnp.zeros((1, 256))}
    step(params, optimizer.init(params), batch)
