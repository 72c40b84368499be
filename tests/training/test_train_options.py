"""What a train step takes beside parameters and a batch, and what it reports."""

import functools
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
  optimizer = optax.chain(tx, optax.sgd(0.5))
  with jax.set_mesh(mesh):
    held = [jax.device_put(params, P()), optimizer.init(params)]
  made = dict(axis_name="data", mesh=mesh, donate=False)
  made |= with_options(gradcomp.TrainOptions, options)
  step = gradcomp.make_train_step(loss_fn, optimizer, **made)
  if "model_state" in options:
    held, args = [*held, args[0]], args[1:]
  keys = {} if rng is None else {"rng": rng}
  for _ in range(steps):
    *held, metrics = step(*held, x, *args, **keys)
  del held[1]
  return *held, metrics


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
  mean = 0.9 * state["mean"] + 0.1 * jnp.mean(x, axis=0)
  return loss_fn(params, scale * (x - mean)), {"mean": mean}


@each_kind
def test_a_model_state_is_the_mean_of_the_workers(kind):
  """In its own dtype, as aux is; and further arguments are the same on all."""
  _, x = problem()
  first = {"mean": np.zeros(16, np.float32), "half": jnp.ones(16, jnp.bfloat16)}

  def with_aux(params, state, x, base):
    loss, mean = centered({"w": params["w"] + base["w"]}, state, x)
    return loss, (state | mean, jnp.max(x))

  base = {"w": np.full((16, 16), 0.1, np.float32)}
  options = dict(kind=kind, model_state="mean", has_aux=True, steps=2)
  after, state, metrics = run(with_aux, dense, first, base, **options)
  closed = lambda params, state, x: with_aux(params, state, x, base)
  assert_same_bits(run(closed, dense, first, **options)[0], after)
  assert state["mean"].sharding.is_fully_replicated
  np.testing.assert_allclose(state["mean"], 0.19 * x.mean(0), rtol=1e-5, atol=1e-7)
  assert state["half"].dtype == jnp.bfloat16 and (state["half"] == 1).all()
  largest = x.reshape(WORKERS, -1).max(1).mean()
  np.testing.assert_allclose(metrics["aux"], largest, rtol=1e-6)


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
  names, options = tuple(axes), gradcomp.TrainOptions(report=True)
  mesh = jax.make_mesh(tuple(axes.values()), names, (AxisType.Auto,) * 2)
  make = functools.partial(gradcomp.qsgd, bucket_size=64, min_leaf_size=0)
  parts = {"chip": make(bits=8, axis_name="chip")}
  parts["island"] = make(bits=4, axis_name="island")
  optimizer = optax.chain(*parts.values(), optax.sgd(0.5))
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  given = dict(axis_name=names, mesh=mesh, options=options)
  step = gradcomp.make_train_step(loss_fn, optimizer, **given)
  program = step.lower(params, state, x).compile()
  placed = jax.device_put((params, state), NamedSharding(mesh, P()))
  *_, metrics = program(*placed, jax.device_put(x, NamedSharding(mesh, P(names))))
  by_axis = gradcomp.wire_report(program, mesh=mesh).by_axis
  each = 0
  for name, exchange in parts.items():
    told = gradcomp.explain(exchange, params, workers=axes[name]).bytes_sent
    assert by_axis[name].bytes_sent == told
    each += told
  told = gradcomp.explain(optimizer, params, workers=axes).bytes_sent
  assert metrics["bytes_sent"] == told == each


def test_all_of_it_on_one_device():
  params, x = problem()
  optimizer = optax.chain(gradcomp.qsgd(bits=8), optax.sgd(0.5))

  def noisy(params, state, x, scale, *, rng):
    x = scale * x + 0.01 * jax.random.normal(rng, x.shape)
    loss, state = centered(params, state, x)
    return loss, (state, jnp.max(x))

  options = dict(has_aux=True, model_state="mean", accumulate=2, report=True)
  made = dict(axis_name=None, donate=False, options=gradcomp.TrainOptions(**options))
  step = gradcomp.make_train_step(noisy, optimizer, **made)
  given = params, optimizer.init(params), {"mean": jnp.zeros(16)}
  for i in range(3):
    *given, metrics = step(*given, x, jnp.float32(1), rng=jax.random.key(i))
  names = {"loss", "aux", "bytes_sent", "gradient_norm", "update_norm"}
  assert metrics.keys() == names and metrics["bytes_sent"] == 0


def test_a_scaled_loss_gives_the_same_step():
  """A power of two, taken back behind the exchange: no bit differs."""
  scale = 2.0**10
  scaled = lambda params, x: (scale * loss_fn(params, x), loss_fn(params, x))
  behind = optax.chain(exchange, optax.scale(1 / scale))
  ours, metrics = run(scaled, behind, has_aux=True)
  expected, plain = run(loss_fn, exchange)
  assert_same_bits(ours, expected)
  assert_same_bits(metrics["aux"], plain["loss"])


@pytest.mark.parametrize("donate, model_state", [(True, None), (False, "mean")])
def test_a_step_names_its_keywords(model_state, donate):
  """In its signature, and in the error of one that is misspelled."""
  options = gradcomp.TrainOptions(model_state=model_state)
  made = dict(axis_name=None, donate=donate, options=options)
  step = gradcomp.make_train_step(loss_fn, optax.sgd(0.5), **made)
  found = inspect.signature(step).parameters.values()
  named = [x.name for x in found if x.kind is inspect.Parameter.KEYWORD_ONLY]
  assert named == ["rng", "extra_args", "inspect"]
  with pytest.raises(TypeError, match=r"\.step(_with_state)?\(\) .*'rgn'"):
    step(*problem(), (), (), rgn=jax.random.key(0))
