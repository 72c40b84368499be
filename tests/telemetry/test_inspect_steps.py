"""inspect_update finds gradcomp wherever it is, in steps of any kind, and in zero."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import gradcomp
from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp.codecs import QSGD, EightBit, OneBit, RandomK
from gradcomp.state import CompressState
from gradcomp.telemetry import inspect_update
from tests.errors import table
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits
from tests.support.cases import zero as zero_cases
from tests.support.cases.inspect import WORKERS, close, gradients, of_workers, some

QSGD4 = gradcomp.qsgd(bits=4, min_leaf_size=0)


def inspected(tx):
  """Gives what inspect shows of a first step on one device."""
  return jax.jit(lambda grads: inspect_update(tx, grads, tx.init(grads))[2])


WRAPS = {
  "chain": lambda tx: optax.chain(optax.scale(2.0), tx, optax.adam(0.1)),
  "masked": lambda tx: optax.masked(tx, {"a": True, "b": False}),
  "partition": lambda tx: optax.partition(
    {"x": tx, "y": gradcomp.qsgd(bits=8, min_leaf_size=0)}, {"a": "x", "b": "y"}
  ),
  "switch": lambda tx: gradcomp.wrappers.switch([100], [tx, optax.identity()]),
  "skip_nonfinite": lambda tx: gradcomp.skip_nonfinite(tx, 3),
  "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
  "MultiSteps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
}


@pytest.mark.parametrize("wrap", some(WRAPS, WRAPS.keys() - {"partition"}))
def test_it_is_found_wherever_it_is(wrap):
  found = inspected(wrap(QSGD4))(jax.tree.map(lambda x: x[0], gradients()))
  paths = "a" if wrap is WRAPS["masked"] else "ab"
  assert list(found.leaves) == [f"['{path}']" for path in paths]
  for metrics in (*found.leaves.values(), found.total):
    assert 0 < metrics.relative_error < 0.5
    assert 0.9 < metrics.cosine <= 1.000001


def test_the_same_leaf_may_be_sent_twice_or_not_at_all():
  """What a step does not run is NaN."""
  tx = optax.chain(gradcomp.qsgd(bits=4), gradcomp.qsgd(bits=8))
  found = jax.eval_shape(inspected(tx), {"w": jnp.zeros(4096)})
  assert list(found.leaves) == ["['w']", "['w'] #2"]
  waits = optax.MultiSteps(gradcomp.qsgd(bits=4), 2).gradient_transformation()
  assert np.isnan(inspected(waits)({"w": jnp.ones(4096)}).total.relative_error)


KEEPS = gradcomp.qsgd(bits=4, min_leaf_size=0, feedback="error")
RISING = np.linspace(-1, 1, 64, dtype=np.float32)
THREE = {"a": RISING, "b": RISING, "x": np.zeros((0, 3), np.float32)}


def test_what_is_not_finite_or_nothing_has_its_numbers():
  """Also in the table, which has a line for each leaf."""
  of_three = inspected(KEEPS)
  for bad in (np.nan, np.inf):
    found = of_three(THREE | {"a": np.where(RISING == 1, np.float32(bad), RISING)})
    for name in ("relative_error", "cosine"):
      assert np.isnan(getattr(found.leaves["['a']"], name)), name
      assert np.isnan(getattr(found.total, name)), name
      assert np.isfinite(getattr(found.leaves["['b']"], name)), name
    assert not np.isfinite(found.total.gradient_norm)
  found = of_three(jax.tree.map(np.zeros_like, THREE))
  assert found.total.zeros == 1
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(found))
  empty = inspect_update(KEEPS, {}, KEEPS.init({}))[2]
  assert empty.leaves == {} and empty.total.zeros == 0
  found = of_three(THREE)
  header, *lines = str(found).splitlines()
  assert header.split()[:3] == ["leaf", "bytes", "sent"]
  assert [line.split()[0] for line in lines] == ["['a']", "['b']", "['x']", "total"]
  for line, metrics in zip(lines, [*found.leaves.values(), found.total], strict=True):
    assert f"{float(metrics.relative_error):.4g}" in line.split()


OTHERS = slow(RandomK(density=0.1), EightBit(), OneBit(per_column=True))


@pytest.mark.parametrize("codec", [PowerSGD(rank=2), *OTHERS])
def test_any_codec_can_be_seen(codec):
  tx = gradcomp.compress(codec, min_leaf_size=0)
  grads = {"w": jnp.sin(jnp.arange(64.0 * 64)).reshape(64, 64).astype(jnp.bfloat16)}
  for leaf in jax.tree.leaves(inspected(tx)(grads)):
    assert leaf.dtype == jnp.float32 and np.all(np.isfinite(leaf))


def test_complex_gradients_are_seen_as_pairs():
  found = inspected(QSGD4)({"w": np.array([3 + 4j, 0j] * 50, np.complex64)})
  close(found.total, {"gradient_norm": 5 * np.sqrt(50)})


def test_update_takes_and_returns_states_of_their_own_type():
  """An optimizer may look at the type, and what a step keeps has no measures."""
  seen = []

  def update(updates, state, params=None):
    seen.append(type(state))
    return QSGD4.update(updates, state, params)

  optimizer = optax.GradientTransformation(QSGD4.init, update)
  before = QSGD4.init({"w": RISING})
  look = jax.jit(lambda grads, state: inspect_update(optimizer, grads, state))
  _, state, found = look({"w": RISING}, before)
  assert set(seen) == {CompressState} and type(state) is CompressState
  assert found.total.cosine > 0.9
  assert jax.tree.structure(state) == jax.tree.structure(before)


def last_step(loss_fn, optimizer, params, batches, kind=AxisType.Auto, **options):
  """What inspect shows of the last of some steps, which must change no bit of it."""
  mesh = modes.mesh(WORKERS, kind)
  options |= dict(mesh=mesh, donate=False)
  step = gradcomp.make_train_step(loss_fn, optimizer, **options)
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  for batch in batches:
    given = params, state, batch
    params, state, metrics = step(*given)
    assert "inspection" not in metrics
  *seen, metrics = step(*given, inspect=True)
  assert_same_bits(seen, [params, state])
  return metrics["inspection"]


@pytest.mark.parametrize("axis_name", ["data", *slow(None)])
def test_make_train_step_shows_a_step_and_changes_nothing(axis_name):
  """The third step is inspected in one of two runs, which end with the same bits."""
  exchange = gradcomp.qsgd(bits=4, feedback="error", axis_name=axis_name)
  loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
  batches = [jnp.sin(jnp.arange(8.0 * 64) + i).reshape(8, 64) for i in range(3)]
  optimizer, params = optax.chain(exchange, optax.adam(0.1)), {"w": jnp.ones((64, 64))}
  total = last_step(loss_fn, optimizer, params, batches, axis_name=axis_name).total
  assert 0 < total.residual_norm
  assert 0.9 < total.cosine <= 1.000001


CODEC = QSGD(bits=4, bucket_size=32, rounding="nearest")
norm = lambda x: np.linalg.norm(np.asarray(x, np.float64))
ZERO = zero_cases.coded(optax.sgd(0.1), CODEC, feedback="error", min_leaf_size=100)


@pytest.mark.parametrize("kind", [AxisType.Auto, *slow(AxisType.Explicit)])
def test_a_train_step_of_zero_shows_what_changes_too(kind):
  params = {"w": jnp.ones((20, 48)), "b": jnp.ones(7)}
  batch = jnp.arange(1.0, 1 + WORKERS)
  given = zero_cases.loss_fn, ZERO, params, [batch]
  leaves = last_step(*given, kind, axis_name="data").leaves
  assert set(leaves) == {"['b']", "['w']", "['b'] change", "['w'] change"}
  assert 0 < leaves["['w'] change"].cosine <= 1.000001


def test_numbers_of_zero_are_those_of_numpy():
  """In the second step. Of what SGD does, the mean of all corrected is known."""
  shapes = {"w": (20, 48), "b": (7,)}
  params = laws.tree(shapes)
  first, grads = (laws.tree(shapes, WORKERS, seed=seed) for seed in (1, 2))

  def step(first, grads):
    updates, old = ZERO.update(first, ZERO.init(params), params)
    before = optax.apply_updates(params, updates)
    return before, old, *inspect_update(ZERO, grads, old, before)

  before, old, updates, after, found = of_workers(step)(first, grads)
  found = jax.tree.map(lambda x: x[0], found)
  whole = {}
  for name, leaf in grads.items():
    metrics, change = (found.leaves[f"['{name}']{x}"] for x in ("", " change"))
    kept, earlier = (np.asarray(x.gradients.residual[name]) for x in (after, old))
    corrected, update = leaf + earlier, updates[name][0]
    # m of the first step is p - 0.1 times what was sent then, of zero residuals.
    master = params[name] - 0.1 * (first[name] - earlier).mean(axis=0)
    wanted = master - 0.1 * (corrected - kept).mean(axis=0) - before[name][0]
    whole[name] = owner = norm(wanted - update)
    # Differences of parameters of about 1, each rounded in float32.
    about = dict(rtol=1e-4, atol=3e-6)
    expected = dict(gradient_norm=norm(leaf) / 2, residual_norm=norm(kept) / 2)
    expected |= dict(relative_error=norm(kept) / norm(corrected))
    close(metrics, expected | {"owner_residual_norm": owner}, **about)
    assert np.isnan(metrics.cosine)
    expected = dict(gradient_norm=norm(wanted), relative_error=owner / norm(wanted))
    expected |= dict(owner_residual_norm=owner, zeros=np.mean(update == 0))
    cosine = np.sum(update * wanted) / norm(update) / norm(wanted)
    close(change, expected | {"cosine": cosine}, **about)
  owners = np.hypot(whole["w"], whole["b"])
  close(found.total, {"owner_residual_norm": owners}, rtol=1e-4, atol=2e-6)
  plan = gradcomp.explain(ZERO, params, workers=WORKERS)
  assert found.total.bytes_sent == plan.bytes_sent


W = {"w": jnp.ones(64)}
TWICE = optax.chain(QSGD4, QSGD4)
ROWS = """
inspect_update(QSGD4.update, W, ()) ->
  TypeError: `optimizer` must be an optax.Grad ... got <func
inspect_update(optax.adam(0.1), W, optax.adam(0.1).init(W)) ->
  `optimizer` must have a gradcomp tr ... init
inspect_update(QSGD4, W, ()) -> `opt_state` ... 0 states ... optimizer.init
inspect_update(TWICE, W, QSGD4.init(W)) ->
  `opt_state` must be that of `optimizer` ... 2 gradcomp ... states of 1 ... init
STEP(W, QSGD4.init(W), jnp.ones(2), inspect=50) -> `inspect` must be a bool, got 50
"""
STEP = gradcomp.make_train_step(lambda params, batch: 0.0, QSGD4, axis_name=None)
test_bad_calls = table.refused(ROWS, globals())
