"""What a train step takes beside parameters and a batch, and what it reports."""

import inspect

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
from tests.support.option_fields import with_options

WORKERS = 4
ROWS = 8  # of a worker
KINDS = [AxisType.Explicit, *slow(AxisType.Auto)]
exchange = gradcomp.qsgd(
  bits=8, bucket_size=64, rounding="nearest", min_leaf_size=0, axis_name="data"
)
dense = gradcomp.dense(axis_name="data")
each_kind = pytest.mark.parametrize("kind", KINDS)


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["w"]) - x[:, ::-1]) ** 2)


def problem():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  return {"w": normal(16, 16)}, normal(ROWS * WORKERS, 16)


def run(loss_fn, tx, *args, kind=AxisType.Explicit, steps=1, rng=None, **options):
  """What ``step`` returns after some steps that each take what the last returned."""
  params, x = problem()
  mesh = modes.mesh(WORKERS, kind)
  params = jax.device_put(params, NamedSharding(mesh, P()))
  optimizer = optax.chain(tx, optax.sgd(0.5))
  with jax.set_mesh(mesh):
    opt_state = optimizer.init(params)
  step = gradcomp.make_train_step(
    loss_fn,
    optimizer,
    axis_name="data",
    mesh=mesh,
    donate=False,
    **with_options(gradcomp.TrainOptions, options),
  )
  keys = {} if rng is None else {"rng": rng}
  if "model_state" not in options:
    for _ in range(steps):
      params, opt_state, metrics = step(params, opt_state, x, *args, **keys)
    return params, metrics
  state, *extra = args
  for _ in range(steps):
    params, opt_state, state, metrics = step(
      params, opt_state, state, x, *extra, **keys
    )
  return params, state, metrics


@each_kind
def test_further_arguments_are_the_same_on_all_workers(kind):
  def scaled(params, x, scale, base):
    return loss_fn({"w": params["w"] + base["w"]}, scale * x)

  base = {"w": np.full((16, 16), 0.1, np.float32)}
  ours = run(scaled, exchange, jnp.float32(2), base, kind=kind)
  expected = run(lambda p, x: scaled(p, x, 2.0, base), exchange, kind=kind)
  assert_same_bits(ours, expected)


@each_kind
def test_micro_batches_are_the_whole_batch(kind):
  with_aux = lambda params, x: (loss_fn(params, x), {"first": jnp.mean(x[:, 0])})
  whole = run(with_aux, dense, kind=kind, has_aux=True)
  parts = run(with_aux, dense, kind=kind, has_aux=True, accumulate=4)
  # Means of 2 rows, and of 4 of them, against means of 8: a few ulp of values about 1.
  chex.assert_trees_all_close(whole, parts, rtol=0, atol=1e-6)


def lowered(loss_fn, tx, **options):
  params, x = problem()
  mesh = modes.mesh(WORKERS, AxisType.Explicit)
  with jax.set_mesh(mesh):
    state = tx.init(params)
  options = with_options(gradcomp.TrainOptions, options)
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh, **options)
  return step.lower(params, state, x)


def test_micro_batches_share_one_exchange():
  chex.clear_trace_counter()
  counted = chex.assert_max_traces(loss_fn, n=1)
  report = gradcomp.wire_report(lowered(counted, exchange, accumulate=4).compile())
  whole = gradcomp.wire_report(lowered(loss_fn, exchange).compile())
  assert report.bytes_sent == whole.bytes_sent > 0


@pytest.mark.parametrize("mode", ["plain", "vmap", *slow("shard_map", "alone")])
def test_gradients_of_micro_batches_in_a_step_of_ones_own(mode):
  params, x = problem()
  axis_name = None if mode == "alone" else "data"
  grad_fn = gradcomp.value_and_grad(loss_fn, axis_name=axis_name, accumulate=2)
  expected = jax.value_and_grad(loss_fn)(params, x)

  def mean_gradient(params, x):
    loss, grads = grad_fn(params, x)
    if mode == "alone":
      return loss, grads
    return loss, dense.update(grads, dense.init(params))[0]

  if mode == "vmap":
    rows = x.reshape(WORKERS, ROWS, 16)
    transformed = jax.vmap(mean_gradient, in_axes=(None, 0), axis_name="data")
    got = jax.tree.map(lambda leaf: leaf[0], transformed(params, rows))
  else:
    kind = AxisType.Explicit if mode == "plain" else AxisType.Auto
    mesh = modes.mesh(WORKERS, kind)
    if mode == "shard_map":
      mean_gradient = jax.shard_map(
        mean_gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
      )
    if mode != "alone":
      x = jax.device_put(x, NamedSharding(mesh, P("data")))
    got = jax.jit(mean_gradient)(params, x)
  chex.assert_trees_all_close(got, expected, rtol=0, atol=1e-6)


def test_gradients_of_half_precision_add_up_in_float32():
  """Added up in bfloat16, 256 ones and more would stay 256."""
  grad_fn = gradcomp.value_and_grad(
    lambda w, x: jnp.sum(w * x), axis_name=None, accumulate=1024
  )
  _, grad = grad_fn(jnp.ones(1, jnp.bfloat16), jnp.ones(1024, jnp.bfloat16))
  assert grad.dtype == jnp.bfloat16
  np.testing.assert_array_equal(grad, [1.0])


def centered(params, state, x, scale=1.0):
  """A loss with statistics, which move by a tenth of a batch's own mean."""
  mean = 0.9 * state["mean"] + 0.1 * jnp.mean(x, axis=0).astype(state["mean"].dtype)
  return loss_fn(params, scale * (x - mean.astype(x.dtype))), {"mean": mean}


@each_kind
def test_a_model_state_is_the_mean_of_the_workers(kind):
  _, x = problem()
  state = {"mean": np.zeros(16, np.float32)}
  _, state, _ = run(centered, dense, state, kind=kind, model_state="mean", steps=2)
  assert state["mean"].sharding.is_fully_replicated
  np.testing.assert_allclose(state["mean"], 0.19 * x.mean(0), rtol=1e-5, atol=1e-7)


@each_kind
def test_a_model_state_is_each_workers_own(kind):
  """With micro-batches and further arguments."""
  _, x = problem()
  state = {"mean": np.zeros((WORKERS, 16), np.float32)}
  options = {"model_state": "local", "accumulate": 2, "steps": 2, "kind": kind}
  _, state, metrics = run(centered, dense, state, np.float32(1), **options)
  own = x.reshape(WORKERS, ROWS, 16).mean(1)
  np.testing.assert_allclose(state["mean"], 0.19 * own, rtol=1e-5, atol=1e-7)
  assert metrics.keys() == {"loss"}


def test_a_model_state_of_half_precision_is_averaged_in_float32():
  state = {"mean": jnp.zeros(16, jnp.bfloat16)}
  _, state, metrics = run(
    lambda params, state, x: (loss_fn(params, x), (state, jnp.max(x))),
    dense,
    state,
    model_state="mean",
    has_aux=True,
  )
  assert state["mean"].dtype == jnp.bfloat16
  _, x = problem()
  largest = x.reshape(WORKERS, -1).max(1)
  np.testing.assert_allclose(metrics["aux"], largest.mean(), rtol=1e-6)


@pytest.mark.parametrize("key", [jax.random.key(3), *slow(jax.random.PRNGKey(3))])
def test_each_worker_and_micro_batch_has_a_key_of_its_own(key):
  """Seen through a state that keeps what was drawn."""

  def draws(params, state, x, *, rng):
    return loss_fn(params, x), (state + jax.random.uniform(rng)) / 2

  state = np.zeros((WORKERS, 2), np.float32)
  options = {"model_state": "local", "rng": key}
  _, once, _ = run(draws, dense, state, **options)
  _, again, _ = run(draws, dense, state, **options)
  assert_same_bits(once, again)
  assert len(np.unique(once)) == WORKERS
  _, both, _ = run(draws, dense, state, **options, accumulate=2)
  assert len(np.unique(np.stack([once, both]))) == 2 * WORKERS


def test_the_report_agrees_with_the_wire_and_with_the_arrays():
  params, x = problem()
  after, metrics = run(loss_fn, exchange, report=True)
  explained = gradcomp.explain(exchange, params, workers=WORKERS).bytes_sent
  assert float(metrics["bytes_sent"]) == explained
  sent = gradcomp.wire_report(lowered(loss_fn, exchange).compile()).bytes_sent
  assert sent == explained + 6  # the mean of the loss
  # Norms of the same numbers, added up in another order.
  step = np.linalg.norm(after["w"] - params["w"])
  np.testing.assert_allclose(metrics["update_norm"], step, rtol=1e-5)
  own = [jax.grad(loss_fn)(params, part)["w"] for part in np.split(x, WORKERS)]
  norm = np.sqrt(np.mean([np.linalg.norm(g) ** 2 for g in own]))
  np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)


def test_each_exchange_is_reported_over_its_own_axis():
  """Chips first, and then islands: of both the wire has what the metrics say."""
  params, x = problem()
  axes = {"island": 2, "chip": 4}
  mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * 2)
  chips, islands = (
    gradcomp.qsgd(bits=bits, bucket_size=64, min_leaf_size=0, axis_name=name)
    for bits, name in ((8, "chip"), (4, "island"))
  )
  optimizer = optax.chain(chips, islands, optax.sgd(0.5))
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  step = gradcomp.make_train_step(
    loss_fn,
    optimizer,
    axis_name=tuple(axes),
    mesh=mesh,
    options=gradcomp.TrainOptions(report=True),
  )
  program = step.lower(params, state, x).compile()
  given = jax.device_put(x, NamedSharding(mesh, P(tuple(axes))))
  replicated = jax.device_put((params, state), NamedSharding(mesh, P()))
  *_, metrics = program(*replicated, given)
  by_axis = gradcomp.wire_report(program, mesh=mesh).by_axis
  each = [
    gradcomp.explain(chips, params, workers=4).bytes_sent,
    gradcomp.explain(islands, params, workers=2).bytes_sent,
  ]
  assert [by_axis[name].bytes_sent for name in ("chip", "island")] == each
  assert metrics["bytes_sent"] == sum(each)
  assert gradcomp.explain(optimizer, params, workers=axes).bytes_sent == sum(each)


def test_all_of_it_on_one_device():
  params, x = problem()
  optimizer = optax.chain(gradcomp.qsgd(bits=8), optax.sgd(0.5))
  options = gradcomp.TrainOptions(
    has_aux=True, model_state="mean", accumulate=2, report=True
  )

  def noisy(params, state, x, scale, *, rng):
    x = scale * x + 0.01 * jax.random.normal(rng, x.shape)
    loss, state = centered(params, state, x)
    return loss, (state, jnp.max(x))

  step = gradcomp.make_train_step(
    noisy, optimizer, axis_name=None, donate=False, options=options
  )
  state, opt_state = {"mean": jnp.zeros(16)}, optimizer.init(params)
  for i in range(3):
    params, opt_state, state, metrics = step(
      params, opt_state, state, x, jnp.float32(1), rng=jax.random.key(i)
    )
  assert metrics.keys() == {
    *("loss", "aux", "bytes_sent", "gradient_norm", "update_norm")
  }
  assert metrics["bytes_sent"] == 0


def test_a_scaled_loss_gives_the_same_step():
  """A power of two, taken back behind the exchange: no bit differs."""
  scale = 2.0**10
  scaled = lambda params, x: (scale * loss_fn(params, x), loss_fn(params, x))
  behind = optax.chain(exchange, optax.scale(1 / scale))
  ours, metrics = run(scaled, behind, has_aux=True)
  expected, plain = run(loss_fn, exchange)
  assert_same_bits(ours, expected)
  assert_same_bits(metrics["aux"], plain["loss"])


@pytest.mark.parametrize("model_state", [None, "mean"])
@pytest.mark.parametrize("donate", [True, False])
def test_a_step_names_its_keywords(model_state, donate):
  """In its signature, and in the error of one that is misspelled."""
  options = gradcomp.TrainOptions(model_state=model_state)
  step = gradcomp.make_train_step(
    loss_fn, optax.sgd(0.5), axis_name=None, donate=donate, options=options
  )
  found = inspect.signature(step).parameters.values()
  named = [x.name for x in found if x.kind is inspect.Parameter.KEYWORD_ONLY]
  assert named == ["rng", "extra_args", "inspect"]
  params, x = problem()
  with pytest.raises(TypeError, match=r"\.step(_with_state)?\(\) .*'rgn'"):
    step(params, (), x, x, rgn=jax.random.key(0))
