"""inspect finds gradcomp wherever it is, and shows any codec and any numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.codecs import EightBit, OneBit, PowerSGD, RandomK
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.inspect import WORKERS, gradients, some


def inspected(tx, grads):
  """What inspect shows of a first step on one device."""
  return jax.jit(lambda grads: gradcomp.telemetry.inspect(tx, grads, tx.init(grads)))(
    grads
  )


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


RARE = ("chain", "skip_nonfinite", "apply_if_finite", "masked", "switch", "MultiSteps")


@pytest.mark.parametrize("wrap", some(WRAPS, RARE))
def test_it_is_found_wherever_it_is(wrap):
  tx = gradcomp.qsgd(bits=4, min_leaf_size=0)
  grads = jax.tree.map(lambda x: x[0], gradients())
  found = inspected(wrap(tx), grads)
  paths = "a" if wrap is WRAPS["masked"] else "ab"
  assert list(found.leaves) == [f"['{path}']" for path in paths]
  for metrics in found.leaves.values():
    assert 0 < metrics.relative_error < 0.5
    assert 0.9 < metrics.cosine <= 1.000001
  assert 0.9 < found.total.cosine <= 1.000001


def test_the_same_leaf_may_be_sent_twice():
  tx = optax.chain(gradcomp.qsgd(bits=4), gradcomp.qsgd(bits=8))
  look = lambda grads: gradcomp.telemetry.inspect(tx, grads, tx.init(grads))
  found = jax.eval_shape(look, {"w": jnp.zeros(4096)})
  assert list(found.leaves) == ["['w']", "['w'] #2"]


def test_what_a_step_does_not_run_is_nan():
  tx = optax.MultiSteps(gradcomp.qsgd(bits=4), 2).gradient_transformation()
  found = inspected(tx, {"w": jnp.ones(4096)})
  assert np.isnan(found.total.relative_error)


KEEPS = gradcomp.qsgd(bits=4, min_leaf_size=0, feedback="error")
# Of two leaves, and one of nothing.
of_three = jax.jit(
  lambda grads: gradcomp.telemetry.inspect(KEEPS, grads, KEEPS.init(grads))
)
EMPTY = jnp.zeros((0, 3))


@pytest.mark.parametrize("bad", [*slow(np.nan), np.inf])
def test_what_is_not_finite_makes_numbers_nan(bad):
  grads = {"a": jnp.ones(64).at[3].set(bad), "b": jnp.linspace(-1, 1, 64)}
  found = of_three(grads | {"x": EMPTY})
  for name in ("relative_error", "cosine"):
    assert np.isnan(getattr(found.leaves["['a']"], name)), name
    assert np.isnan(getattr(found.total, name)), name
    assert np.isfinite(getattr(found.leaves["['b']"], name)), name
  assert not np.isfinite(found.total.gradient_norm)


def test_zeros_and_nothing_have_numbers():
  found = of_three({"a": jnp.zeros(64), "b": jnp.zeros(64), "x": EMPTY})
  assert found.total.zeros == 1
  for leaf in jax.tree.leaves(found):
    assert np.all(np.isfinite(leaf))
  empty = gradcomp.telemetry.inspect(KEEPS, {}, KEEPS.init({}))
  assert empty.leaves == {} and empty.total.zeros == 0


def test_a_table_has_a_line_for_each_leaf():
  ones = jnp.linspace(-1, 1, 64)
  found = of_three({"a": ones, "b": ones, "x": EMPTY})
  header, *leaves, total = str(found).splitlines()
  assert header.split()[:3] == ["leaf", "bytes", "sent"]
  assert [line.split()[0] for line in leaves] == ["['a']", "['b']", "['x']"]
  assert total.startswith("total")
  shown = [*found.leaves.values(), found.total]
  for line, metrics in zip([*leaves, total], shown, strict=True):
    assert f"{float(metrics.relative_error):.4g}" in line.split()


OTHERS = {
  "power_sgd": gradcomp.compress(PowerSGD(rank=2)),
  "dense": gradcomp.dense(),
  "redsync": gradcomp.redsync(0.1, min_leaf_size=0),
  "random_k": gradcomp.compress(RandomK(density=0.1), min_leaf_size=0),
  "eight_bit": gradcomp.compress(EightBit(), min_leaf_size=0),
  "column": gradcomp.compress(OneBit(per_column=True), min_leaf_size=0),
}


@pytest.mark.parametrize(
  "tx", some(OTHERS, ("dense", "redsync", "random_k", "eight_bit", "column"))
)
def test_any_codec_can_be_seen(tx):
  grads = {"w": jnp.sin(jnp.arange(64.0 * 64)).reshape(64, 64).astype(jnp.bfloat16)}
  for leaf in jax.tree.leaves(inspected(tx, grads)):
    assert leaf.dtype == jnp.float32 and np.all(np.isfinite(leaf))


def test_complex_gradients_are_seen_as_pairs():
  tx = gradcomp.qsgd(bits=4, min_leaf_size=0)
  found = inspected(tx, {"w": jnp.array([3 + 4j, 0j] * 50)})
  np.testing.assert_allclose(found.total.gradient_norm, 5 * np.sqrt(50), rtol=1e-6)


@pytest.mark.parametrize("axis_name", ["data", *slow(None)])
def test_make_train_step_shows_a_step_and_changes_nothing(axis_name):
  """The third step is inspected in one of two runs, which end with the same bits."""
  exchange = gradcomp.qsgd(bits=4, feedback="error", axis_name=axis_name)
  optimizer = optax.chain(exchange, optax.adam(0.1))
  mesh = modes.mesh(WORKERS)
  step = gradcomp.make_train_step(
    lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
    optimizer,
    axis_name=axis_name,
    mesh=mesh,
    donate=False,
  )
  params = {"w": jnp.ones((64, 64))}
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  for i in range(3):
    given = params, state, jnp.sin(jnp.arange(8.0 * 64) + i).reshape(8, 64)
    params, state, metrics = step(*given)
    assert "inspection" not in metrics
  *seen, metrics = step(*given, inspect=True)
  assert_same_bits(seen, [params, state])
  assert 0 < metrics["inspection"].total.residual_norm
  assert 0.9 < metrics["inspection"].total.cosine <= 1.000001


QSGD4 = gradcomp.qsgd(bits=4)
W = {"w": jnp.ones(64)}


BAD = {
  "no transformation": (
    QSGD4.update,
    (),
    TypeError,
    ["`optimizer` must be an optax.Grad", "got <func"],
  ),
  "none of ours": (
    optax.adam(0.1),
    None,
    ValueError,
    ["`optimizer` must have a gradcomp tr", "init"],
  ),
  "no state": (QSGD4, (), ValueError, ["`opt_state`", "0 states", "optimizer.init"]),
  "another state": (
    optax.chain(QSGD4, QSGD4),
    QSGD4.init(W),
    ValueError,
    ["`opt_state` must be that of `optimizer`", "2 gradcomp", "states of 1", "init"],
  ),
}


@pytest.mark.parametrize("optimizer, state, error, parts", BAD.values(), ids=BAD)
def test_errors_name_the_argument_the_rule_and_the_cure(optimizer, state, error, parts):
  state = optimizer.init(W) if state is None else state
  with pytest.raises(error, match=says(*parts)):
    gradcomp.telemetry.inspect(optimizer, W, state)


def test_inspect_is_a_flag_of_a_step():
  step = gradcomp.make_train_step(lambda params, batch: 0.0, QSGD4, axis_name=None)
  with pytest.raises(ValueError, match=says("`inspect` must be a bool, got 50")):
    step(W, QSGD4.init(W), jnp.ones(2), inspect=50)
