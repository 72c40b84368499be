"""Losses with weights are those of all tokens on one device; aux is of numbers."""

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
from tests.support.cases.recipe import RECIPES, make

N, ROWS = 4, 8  # workers, and the examples of each
dense = gradcomp.dense(axis_name="data")


def loss_fn(params, batch):
  """The sum of squares of all examples that count, and their number."""
  y = jnp.tanh(batch["x"] @ params["w"]) - batch["x"][:, ::-1]
  losses = jnp.mean(y**2, axis=-1)
  return jnp.sum(batch["weight"] * losses), jnp.sum(batch["weight"])


def problem(kind=np.int32):
  """Workers of which the first has 1 example that counts, and the second has none."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  counts = np.arange(ROWS) < np.array([1, 0, 5, 8])[:, None]
  weight = (rng.permuted(counts, axis=1) * 3).reshape(-1).astype(kind)
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
  if mode in ("vmap", "pmap"):
    rows = jax.tree.map(lambda x: x.reshape(N, ROWS, *x.shape[1:]), batch)
    each = getattr(jax, mode)(step, axis_name="data", in_axes=(None, 0))
    return jax.tree.map(lambda x: x[0], jax.jit(each)(params, rows))
  explicit = mode == modes.EXPLICIT
  mesh = modes.mesh(N, AxisType.Explicit if explicit else AxisType.Auto)
  if not explicit and mode != modes.AUTO:
    checked = mode == "shard_map"
    specs = dict(in_specs=(P(), P("data")), out_specs=P(), check_vma=checked)
    step = jax.shard_map(step, mesh=mesh, **specs)
  with jax.set_mesh(mesh):
    placed = jax.device_put(params, P()), jax.device_put(batch, P("data"))
    return jax.jit(step)(*placed)


def weighted(tx, **options):
  """The loss and the mean gradient."""

  def step(params, batch):
    grad_fn = gradcomp.value_and_grad(
      loss_fn, axis_name="data", has_weight=True, **options
    )
    loss, grads = grad_fn(params, batch)
    return loss, tx.update(grads, tx.init(params))[0]

  return step


@pytest.mark.parametrize(
  "mode",
  [
    "vmap",
    modes.EXPLICIT,
    *slow(modes.AUTO, "pmap", "shard_map", "shard_map_unchecked"),
  ],
)
def test_it_is_the_mean_over_all_that_counts(mode):
  """Of whole batches, and of micro-batches; where nothing counts, nothing moves."""
  params, batch = problem()
  none = batch | {"weight": np.zeros_like(batch["weight"])}
  steps = [weighted(dense, accumulate=count) for count in (1, 4)]
  run = lambda params, batches: [[step(params, x) for step in steps] for x in batches]
  found, still = across(mode, run, params, [batch, none])
  for each in found:
    assert_close(each, on_one_device(params, batch))
  assert not any(map(np.any, jax.tree.leaves(still)))


def test_every_recipe_has_it_in_its_dense_mean():
  options = {"axis_name": "data", "min_leaf_size": 10**6}
  own = {"redsync": {"momentum": None}}
  txs = {x: make(x, **options, **own.get(x, {})) for x in RECIPES if x != "dense"}
  steps = {name: weighted(tx) for name, tx in txs.items()}
  run = lambda params, batch: {x: step(params, batch) for x, step in steps.items()}
  params, batch = problem(np.float32)
  for found in across("vmap", run, params, batch).values():
    assert_close(found, on_one_device(params, batch))


def trained(kind, has_aux, **options):
  params, batch = problem()
  mesh = modes.mesh(N, kind)
  placed = jax.device_put(params, NamedSharding(mesh, P()))
  tx = options.pop("tx", optax.chain(dense, optax.sgd(1.0)))
  loss = lambda *args: (loss_fn(*args), jnp.mean(args[1]["x"]))
  with jax.set_mesh(mesh):
    state = tx.init(placed)
  step = gradcomp.make_train_step(
    loss if has_aux else loss_fn,
    tx,
    axis_name="data",
    mesh=mesh,
    donate=False,
    options=gradcomp.TrainOptions(has_weight=True, has_aux=has_aux, **options),
  )
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
  grad_fn = gradcomp.value_and_grad(
    lambda w, x: (w * jnp.sum(x), w), axis_name=None, has_weight=True
  )
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


def with_key(w, x):
  return jnp.sum(w * x), {"loss": w, "state": [jax.random.key(0)]}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["none", "auto", "explicit", "step"])
def test_what_is_no_number_is_named_where_aux_is_averaged(kind, accumulate):
  """Without workers and micro-batches any aux is returned."""
  over = {"axis_name": None if kind == "none" else "data"}
  options = {"has_aux": True, "accumulate": accumulate}
  if kind == "step":
    options = gradcomp.TrainOptions(**options)
    made = {"mesh": modes.mesh(N), "options": options} | over
    step = gradcomp.make_train_step(with_key, dense, **made)
    w = jnp.float32(1)
    run = lambda: step.eval_shape(w, dense.init(w), np.ones((8, 3), np.float32))
  else:
    mesh = modes.mesh(N, AxisType.Explicit if kind == "explicit" else AxisType.Auto)
    place = NamedSharding(mesh, P("data")) if kind != "none" else None
    grad_fn = gradcomp.value_and_grad(with_key, **over, **options)
    x = jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=place)
    run = lambda: jax.eval_shape(grad_fn, jnp.float32(1), x)
  if kind == "none" and accumulate == 1:
    (_, aux), _ = run()
    assert jnp.issubdtype(aux["state"][0].dtype, jax.dtypes.prng_key)
    return
  with pytest.raises(
    TypeError, match=r"`aux`\['state'\]\[0\] .* got key<fry>\[\]; let"
  ):
    run()
