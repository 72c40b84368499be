"""Frozen parameters are not exchanged, and stay as they are to the bit."""

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
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.steps import N, explicit_mesh, put

LABELS = {"body": "frozen", "head": "train"}
TRAINED = {"body": False, "head": True}
FROZEN = {"body": True, "head": False}
exchange = gradcomp.qsgd(
  bits=4, bucket_size=64, rounding="nearest", min_leaf_size=0, axis_name="data"
)
allowed = gradcomp.wrappers.allow_frozen
train = {"train": optax.chain(exchange, optax.adam(0.1))}
partitioned = optax.partition({**train, "frozen": optax.set_to_zero()}, LABELS)
# One transformation over all leaves is behind the zeros: it sees both.
masked = optax.chain(
  optax.masked(exchange, TRAINED),
  optax.masked(optax.set_to_zero(), FROZEN),
  optax.clip_by_global_norm(100.0),
  optax.adam(0.1),
)


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["body"]) @ params["head"] - x) ** 2)


def problem():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  return {"body": normal(64, 64), "head": normal(64, 64)}, normal(8 * N, 64)


def compiled(mode, optimizer, params, x):
  """A compiled step of a mode with one program, and its arguments."""
  explicit = mode.endswith("explicit")
  mesh = modes.mesh(N, AxisType.Explicit if explicit else AxisType.Auto)
  params, x = put(params, mesh), put(x, mesh, "data")
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  run = modes.user_step(loss_fn, optimizer)
  if mode.startswith("train_step"):
    options = {"axis_name": "data", "mesh": mesh, "donate": False}
    run = gradcomp.make_train_step(loss_fn, optimizer, **options)
  elif mode not in (modes.AUTO, modes.EXPLICIT):
    specs = gradcomp.state_specs(state, axis_name="data")
    places = dict(in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P()))
    run = jax.shard_map(run, mesh=mesh, check_vma=mode == "shard_map", **places)
  run = run if hasattr(run, "lower") else jax.jit(run)
  return run.lower(params, state, x).compile(), (params, state, x)


DOORS = (modes.EXPLICIT, modes.AUTO, "shard_map", "train_step")
FAST = [*((mode, "partition") for mode in DOORS), ("train_step_explicit", "masked")]
SLOW = [*((mode, "masked") for mode in DOORS[:3]), ("shard_map_unchecked", "partition")]


@pytest.mark.parametrize("mode, kind", [*FAST, *slow(*SLOW)])
def test_a_frozen_leaf_stays_and_is_not_sent(mode, kind):
  optimizer = partitioned if kind == "partition" else masked
  if mode in (modes.AUTO, modes.EXPLICIT, "shard_map"):
    optimizer = allowed(optimizer)
  params, x = problem()
  run, (before, state, rows) = compiled(mode, optimizer, params, x)
  after, state, _ = run(before, state, rows)
  after, *_ = run(after, state, rows)
  assert_same_bits(after["body"], params["body"])
  assert np.abs(after["head"] - params["head"]).mean() > 0.1  # two steps of Adam
  explained = gradcomp.explain(optimizer, params, workers=N)
  assert [leaf.path for leaf in explained.leaves] == ["['head']"]
  # Beside it there is the mean of the loss: an all-reduce of 4 bytes sends 6.
  assert gradcomp.wire_report(run).bytes_sent == explained.bytes_sent + 6


def test_weights_of_a_frozen_leaf_decay_as_optax_says():
  """Its gradient is not read, but its update is not zero."""
  params, x = problem()
  decayed = optax.chain(partitioned, optax.add_decayed_weights(-0.5))
  run, args = compiled(modes.EXPLICIT, allowed(decayed), params, x)
  np.testing.assert_array_equal(run(*args)[0]["body"], 0.5 * params["body"])


def test_a_train_step_refuses_a_leaf_that_nobody_has_averaged():
  """The norm in front reads the gradient of the frozen leaf."""
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), partitioned)
  with pytest.raises(ValueError, match=says("`optimizer`", "['body']", "set_to_zero")):
    compiled("train_step", optimizer, *problem())


def test_a_frozen_leaf_that_another_axis_cuts_stays_so():
  mesh = explicit_mesh((2, 2), ("data", "model"))
  params, x = problem()
  params = {"head": put(params["head"], mesh, None, "model")}
  params["body"] = put(x[0], mesh, "model")
  loss = lambda params, x: jnp.mean((x @ params["head"]) * params["body"])
  optimizer = allowed(partitioned)
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  step = jax.jit(modes.user_step(loss, optimizer))
  after, *_ = step(params, state, put(x, mesh, "data"))
  assert_same_bits(after["body"], params["body"])
  for name, leaf in params.items():
    assert after[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_a_leaf_that_no_exchange_sees_is_named_in_the_errors_of_jax():
  """Under Explicit axes JAX refuses to multiply its addends by a rate."""
  parts = {"train": exchange, "frozen": optax.inject_hyperparams(optax.sgd)(0.1)}
  with pytest.raises(Exception, match="reduced") as error:
    compiled(modes.EXPLICIT, allowed(optax.partition(parts, LABELS)), *problem())
  assert "optax.partition" in "".join(error.value.__notes__)
