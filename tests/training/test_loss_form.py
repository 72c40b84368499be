"""Losses with weights are those of all tokens on one device; aux is of numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.cases.steps import OVER, N, dense, put

ROWS = 8  # the examples of each worker


def loss_fn(params, batch):
  """The sum of squares of all examples that count, and their number."""
  y = jnp.tanh(batch["x"] @ params["w"]) - batch["x"][:, ::-1]
  losses = jnp.mean(y**2, axis=-1)
  return jnp.sum(batch["weight"] * losses), jnp.sum(batch["weight"])


def problem():
  """Workers of which the first has 1 example that counts, and the second has none."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  counts = np.arange(ROWS) < np.array([1, 0, 5, 8])[:, None]
  weight = (rng.permuted(counts, axis=1) * 3).reshape(-1).astype(np.int32)
  return {"w": normal(16, 16) / 4}, {"x": normal(N * ROWS, 16), "weight": weight}


@jax.jit
def on_one_device(params, batch):
  def mean(params):
    total, weight = loss_fn(params, batch)
    return total / weight

  return jax.value_and_grad(mean)(params)


def assert_close(got, expected):
  """To a few units of float32 in the largest element."""
  (loss, grads), (true_loss, true) = got, expected
  np.testing.assert_allclose(loss, true_loss, rtol=5e-7)
  largest = np.abs(true["w"]).max()
  np.testing.assert_allclose(grads["w"], true["w"], rtol=0, atol=6e-7 * largest)


def across(mode, step, params, batch):
  """What a step returns in one of the places where workers are."""
  if mode == "vmap":
    rows = jax.tree.map(lambda x: x.reshape(N, ROWS, *x.shape[1:]), batch)
    each = jax.vmap(step, axis_name="data", in_axes=(None, 0))
    return jax.tree.map(lambda x: x[0], jax.jit(each)(params, rows))
  kind = AxisType.Explicit if mode == modes.EXPLICIT else AxisType.Auto
  mesh = modes.mesh(N, kind)
  if mode == "shard_map":
    step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
  with jax.set_mesh(mesh):
    placed = jax.device_put(params, P()), jax.device_put(batch, P("data"))
    return jax.jit(step)(*placed)


def weighted(**options):
  """The loss and the mean gradient."""

  def step(params, batch):
    grad_fn = gradcomp.value_and_grad(loss_fn, has_weight=True, **OVER, **options)
    loss, grads = grad_fn(params, batch)
    return loss, dense.update(grads, dense.init(params))[0]

  return step


@pytest.mark.parametrize(
  "mode", ["vmap", modes.EXPLICIT, *slow(modes.AUTO, "shard_map")]
)
def test_it_is_the_mean_over_all_that_counts(mode):
  """Of whole batches, and of micro-batches; where nothing counts, nothing moves."""
  params, batch = problem()
  none = batch | {"weight": np.zeros_like(batch["weight"])}
  steps = [weighted(accumulate=count) for count in (1, 4)]
  run = lambda params, batches: [[step(params, x) for step in steps] for x in batches]
  found, still = across(mode, run, params, [batch, none])
  for each in found:
    assert_close(each, on_one_device(params, batch))
  assert not any(map(np.any, jax.tree.leaves(still)))


def trained(kind, has_aux, **options):
  params, batch = problem()
  mesh = modes.mesh(N, kind)
  placed = put(params, mesh)
  tx = options.pop("tx", optax.chain(dense, optax.sgd(1.0)))
  loss = lambda *args: (loss_fn(*args), jnp.mean(args[1]["x"]))
  with jax.set_mesh(mesh):
    state = tx.init(placed)
  options = gradcomp.TrainOptions(has_weight=True, has_aux=has_aux, **options)
  made = {"axis_name": "data", "mesh": mesh, "donate": False, "options": options}
  step = gradcomp.make_train_step(loss if has_aux else loss_fn, tx, **made)
  return params, batch, *step(placed, state, batch)


@pytest.mark.parametrize(
  "kind, has_aux, accumulate",
  [
    (AxisType.Explicit, True, 4),
    *slow((AxisType.Explicit, False, 1), (AxisType.Auto, False, 2)),
  ],
)
def test_a_train_step_takes_it(kind, has_aux, accumulate):
  params, batch, after, _, metrics = trained(kind, has_aux, accumulate=accumulate)
  step = {"w": params["w"] - after["w"]}
  assert_close((metrics["loss"], step), on_one_device(params, batch))
  if has_aux:
    np.testing.assert_allclose(metrics["aux"], batch["x"].mean(), rtol=1e-5)


def test_in_local_steps_a_worker_has_the_mean_of_its_own_tokens():
  """And the one without any stays where it is."""
  options = {"every": 1, "codec": gradcomp.codecs.Dense(), "axis_name": "data"}
  tx = gradcomp.local.local_steps(optax.sgd(1.0), optax.sgd(1.0), **options)
  params, batch, after, _, metrics = trained(AxisType.Explicit, False, tx=tx)
  parts = [{k: np.split(x, N)[i] for k, x in batch.items()} for i in range(N)]
  own = [on_one_device(params, part) for part in parts if part["weight"].any()]
  losses = np.insert([loss for loss, _ in own], 1, 0.0)
  np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
  mean = sum(grads["w"] for _, grads in own) / N
  np.testing.assert_allclose(params["w"] - after["w"], mean, atol=1e-6)


def test_weights_are_not_differentiated():
  loss = lambda w, x: (w * jnp.sum(x), w)
  grad_fn = gradcomp.value_and_grad(loss, axis_name=None, has_weight=True)
  assert grad_fn(jnp.float32(2), jnp.arange(3.0)) == (3.0, 1.5)


def test_sums_of_half_precision_may_be_larger_than_its_range():
  """The sum of the gradients is 20 times the largest number of float16."""
  x = np.full(4096, 320, np.float16)
  loss = lambda w, x: (jnp.sum((w * x).astype(jnp.float32)), len(x))
  for accumulate in (1, 4):
    options = {"has_weight": True, "accumulate": accumulate}
    grad_fn = jax.jit(gradcomp.value_and_grad(loss, axis_name=None, **options))
    value, grad = grad_fn(jnp.float16(1), x)
    assert (float(value), float(grad), grad.dtype) == (320, 320, jnp.float16)


def with_name(w, x):
  return jnp.sum(w * x), {"loss": w, "state": ["digits"]}


@pytest.mark.parametrize("kind", ["none", "auto", "explicit", "step"])
def test_what_is_no_number_is_named_where_aux_is_averaged(kind):
  """Without workers and micro-batches any aux is returned."""
  grads_of = functools.partial(gradcomp.value_and_grad, with_name, has_aux=True)
  w, x = jnp.float32(1), jax.ShapeDtypeStruct((8, 3), jnp.float32)
  mesh = modes.mesh(N, AxisType.Explicit if kind == "explicit" else AxisType.Auto)
  given = w, x.update(sharding=jax.NamedSharding(mesh, P("data")))
  if kind == "none":
    assert grads_of(axis_name=None)(w, np.ones(x.shape))[0][1]["state"] == ["digits"]
    step, given = grads_of(axis_name=None, accumulate=2), (w, x)
  elif kind == "step":
    made = {"options": gradcomp.TrainOptions(has_aux=True), "mesh": mesh}
    step = gradcomp.make_train_step(with_name, dense, axis_name="data", **made)
    given = w, dense.init(w), np.ones(x.shape, x.dtype)
  else:
    step = grads_of(axis_name="data")
  says = r"`aux`\['state'\]\[0\] .* got 'digits'; let"
  with pytest.raises(TypeError, match=says):
    jax.eval_shape(step, *given)


@pytest.mark.parametrize(
  ("place", "accumulate"),
  [("auto", 1), ("step", 2), *slow(("auto", 2), ("explicit", 1), ("explicit", 2))],
)
def test_keys_and_counts_in_aux_are_of_the_first_worker(place, accumulate):
  """They keep their dtypes, which modules of flax.nnx need; other numbers are means."""

  def loss_fn(w, x, key=None):
    key = jax.random.key(7) if key is None else key
    counted = x[-1, 0].astype(jnp.uint32)
    return jnp.sum(w * x), {"key": key, "count": counted, "mean": jnp.mean(x)}

  mesh = modes.mesh(N, AxisType.Explicit if place == "explicit" else AxisType.Auto)
  x = np.arange(4.0 * N, dtype=np.float32).reshape(4 * N, 1)
  w, given = jnp.float32(1), put(x, mesh, "data")
  if place == "step":
    options = gradcomp.TrainOptions(has_aux=True, accumulate=accumulate)
    step = gradcomp.make_train_step(loss_fn, dense, options=options, mesh=mesh, **OVER)
    *_, metrics = step(w, dense.init(w), given)
    aux = metrics["aux"]
  else:
    options = {"axis_name": "data", "has_aux": True, "accumulate": accumulate}
    (_, aux), _ = jax.jit(gradcomp.value_and_grad(loss_fn, **options))(w, given)
  assert (int(aux["count"]), aux["count"].dtype) == (3, np.uint32)
  assert aux["key"] == jax.random.key(7)
  assert float(aux["mean"]) == x.mean()
