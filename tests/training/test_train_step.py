"""A step trains alike wherever it runs: by make_train_step, in maps, in plain jit."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.core.state import is_state
from gradcomp._src.testing.modes import _of_sums
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases import steps
from tests.support.cases.steps import OPTIMIZERS, OVER, N, dense
from tests.support.option_fields import with_options

# Where an optimizer runs beside vmap, and on how many workers.
ROWS = [
  ("feedback", modes.AUTO, 3),
  ("feedback", modes.EXPLICIT, 1),
  ("local", modes.AUTO, N),
  ("local", modes.EXPLICIT, N),
  ("local", "shard_map", N),
  ("zero", "shard_map", N),
  ("injected codec", "step", N),
  ("behind", "step", N),
  ("around", "shard_map", N),
]
IN_MAPS = ("flatten", "masks", "partition", "around")
SLOW = [(name, place, N) for name in OPTIMIZERS for place in ("step", "shard_map")]
SLOW += [(x, modes.AUTO, N) for x in OPTIMIZERS if x not in IN_MAPS]
NOT_EXPLICIT = (*IN_MAPS, "frozen around", "scaled")  # JAX has no rule for the last
SLOW += [(x, modes.EXPLICIT, N) for x in OPTIMIZERS if x not in NOT_EXPLICIT]
SLOW += [("feedback", "pmap", N)]


@functools.cache
def by_vmap(name, workers):
  return list(steps.trained("vmap", OPTIMIZERS[name], workers))


@pytest.mark.parametrize(
  "name, place, workers", [*ROWS, *slow(*(x for x in SLOW if x not in ROWS))]
)
def test_a_training_has_the_bits_of_vmap(name, place, workers):
  """Parameters and states, where each worker's own are typed so, and all others equal.

  Under Explicit axes residuals are in the units of addends, which are gradients over N,
  but where an optimizer is in a map.
  """
  around = name.endswith("around")
  found = list(steps.trained(place, OPTIMIZERS[name], workers, around=around))
  for got, expected in zip(found, by_vmap(name, workers), strict=True):
    assert_same_bits(got.params, expected.params)
    state = got.state
    if place == modes.EXPLICIT and name != "local":
      scaled = lambda x: _of_sums(x, workers) if is_state(x) else x
      state = jax.tree.map(scaled, state, is_leaf=is_state)
    assert_same_bits(state, expected.state)
  specs = gradcomp.state_specs(expected.state, **OVER)
  pairs = zip(*map(jax.tree.leaves, (expected.state, specs)), strict=True)
  differing = [spec for x, spec in pairs if np.any(x != x[:1])]
  assert set(differing) <= {P("data")}
  assert differing or workers == 1 or name in ("terngrad", "switch", "behind")


@pytest.mark.parametrize("name", ["clip", *slow("centralize")])
def test_a_norm_or_a_mean_in_allow_frozen_is_that_of_each_worker(name):
  front = {"clip": optax.clip_by_global_norm(0.1), "centralize": optax.centralize()}
  chain = optax.chain(front[name], dense, optax.sgd(0.1))
  tx = gradcomp.wrappers.allow_frozen(chain)
  last = lambda place, tx: list(steps.trained(place, tx))[-1].params
  got, expected = last(modes.AUTO, tx), last("vmap", chain)
  for leaf, x in expected.items():
    # Sums of 8,192 squares in another order.
    np.testing.assert_allclose(got[leaf], x, rtol=0, atol=1e-6, err_msg=leaf)


def test_a_step_averages_aux_and_donates_what_it_has_taken():
  """An error leaves parameters and state as they were."""
  with_aux = lambda params, x: (steps.loss_fn(params, x), jnp.mean(x["w"]))
  mesh, options = modes.mesh(N), gradcomp.TrainOptions(has_aux=True)
  tx = OPTIMIZERS["feedback"]
  (params, state), targets = steps.begun(tx, mesh), steps.targets_of(mesh, 1)
  given = dict(mesh=mesh, options=options, **OVER)
  step = gradcomp.make_train_step(with_aux, tx, donate=False, **given)
  kept = step(params, state, targets)
  # A mean of 4 means and a mean of all are within a few ulp of about 1.
  np.testing.assert_allclose(kept[2]["aux"], np.mean(targets["w"]), atol=1e-6)
  step = gradcomp.make_train_step(with_aux, tx, **given)
  with pytest.raises(ValueError, match="workers can share equally"):
    step(params, state, jax.tree.map(lambda x: np.asarray(x)[1:], targets))
  assert not params["w"].is_deleted()
  assert_same_bits(step(params, state, targets), kept)
  assert params["w"].is_deleted()


def test_users_may_forbid_promotion():
  """JAX's strictest settings, which some projects train with."""
  norms = gradcomp.qsgd(bits=6, levels="uniform", norm="l2", feedback="error", **OVER)
  nearest = gradcomp.qsgd(bits=8, bucket_size=None, rounding="nearest", **OVER)
  mesh = modes.mesh(N)
  for tx in (norms, nearest):
    tx = optax.chain(tx, optax.sgd(0.1))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
      step = gradcomp.make_train_step(steps.loss_fn, tx, mesh=mesh, **OVER)
      step.eval_shape(*steps.begun(tx, mesh), steps.targets_of(mesh, 1))


EXAMPLES = 8  # of a worker
exchange = gradcomp.qsgd(
  bits=8, bucket_size=64, rounding="nearest", min_leaf_size=0, axis_name="data"
)
each_kind = pytest.mark.parametrize("kind", [AxisType.Explicit, *slow(AxisType.Auto)])


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["w"]) - x[:, ::-1]) ** 2)


def problem():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  return {"w": normal(16, 16)}, normal(EXAMPLES * N, 16)


def started(loss_fn, tx, kind=AxisType.Explicit, **options):
  """A step, and what it takes: parameters, a state and a batch."""
  params, x = problem()
  mesh, optimizer = modes.mesh(N, kind), optax.chain(tx, optax.sgd(0.5))
  given = with_options(gradcomp.TrainOptions, options)
  given |= dict(mesh=mesh, donate=False, **OVER)
  step = gradcomp.make_train_step(loss_fn, optimizer, **given)
  with jax.set_mesh(mesh):
    return step, jax.device_put(params, P()), optimizer.init(params), x


def run(loss_fn, tx, *args, kind=AxisType.Explicit, steps=1, rng=None, **options):
  """What ``step`` returns after some steps that each take what the last returned."""
  step, *held, x = started(loss_fn, tx, kind, **options)
  if "model_state" in options:
    held, args = [*held, args[0]], args[1:]
  keys = {} if rng is None else {"rng": rng}
  for _ in range(steps):
    *held, metrics = step(*held, x, *args, **keys)
  del held[1]
  return *held, metrics


@each_kind
def test_micro_batches_are_the_whole_batch_and_share_one_exchange(kind):
  with_aux = lambda params, x: (loss_fn(params, x), {"first": jnp.mean(x[:, 0])})
  chex.clear_trace_counter()
  counted = chex.assert_max_traces(with_aux, n=1)
  ends, sent = [], []
  for loss, count in (with_aux, 1), (counted, 4):
    step, *given = started(loss, dense, kind, has_aux=True, accumulate=count)
    ends.append(step(*given))
    sent.append(gradcomp.wire_report(step.lower(*given)).bytes_sent)
  # Means of 2 rows, and of 4 of them, against means of 8: a few ulp of values about 1.
  chex.assert_trees_all_close(*ends, rtol=0, atol=1e-6)
  assert sent[0] == sent[1] > 0


def test_gradients_of_half_precision_add_up_in_float32():
  """Added up in bfloat16, 256 ones and more would stay 256."""
  loss = lambda w, x: jnp.sum(w * x)
  grad_fn = gradcomp.value_and_grad(loss, axis_name=None, accumulate=1024)
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
  largest = x.reshape(N, -1).max(1).mean()
  np.testing.assert_allclose(metrics["aux"], largest, rtol=1e-6)


@each_kind
def test_a_model_state_is_each_workers_own(kind):
  _, x = problem()
  state = {"mean": np.zeros((N, 16), np.float32)}
  options = {"model_state": "local", "accumulate": 2, "steps": 2, "kind": kind}
  _, state, metrics = run(centered, dense, state, np.float32(1), **options)
  own = x.reshape(N, EXAMPLES, 16).mean(1)
  np.testing.assert_allclose(state["mean"], 0.19 * own, rtol=1e-5, atol=1e-7)
  assert metrics.keys() == {"loss"}


@pytest.mark.parametrize("key", [jax.random.key(3), *slow(jax.random.PRNGKey(3))])
def test_each_worker_and_micro_batch_has_a_key_of_its_own(key):
  """Seen through a state that keeps what was drawn."""

  def draws(params, state, x, *, rng):
    return loss_fn(params, x), (state + jax.random.uniform(rng)) / 2

  state = np.zeros((N, 2), np.float32)
  options = {"model_state": "local", "rng": key}
  _, once, _ = run(draws, dense, state, **options)
  _, again, _ = run(draws, dense, state, **options)
  assert_same_bits(once, again)
  assert len(np.unique(once)) == N
  _, both, _ = run(draws, dense, state, **options, accumulate=2)
  assert len(np.unique(np.stack([once, both]))) == 2 * N


def test_the_report_agrees_with_the_wire_and_with_the_arrays():
  (params, x), (step, *given) = problem(), started(loss_fn, exchange, report=True)
  after, _, metrics = step(*given)
  explained = gradcomp.explain(exchange, params, workers=N).bytes_sent
  assert float(metrics["bytes_sent"]) == explained
  sent = gradcomp.wire_report(started(loss_fn, exchange)[0].lower(*given))
  assert sent.bytes_sent == explained + 6  # the mean of the loss
  # Norms of the same numbers, added up in another order.
  step = np.linalg.norm(after["w"] - params["w"])
  np.testing.assert_allclose(metrics["update_norm"], step, rtol=1e-5)
  own = [jax.grad(loss_fn)(params, part)["w"] for part in np.split(x, N)]
  norm = np.sqrt(np.mean([np.linalg.norm(g) ** 2 for g in own]))
  np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)


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
