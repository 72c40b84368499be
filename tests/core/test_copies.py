"""Transformations that keep where parameters are, inside and around one another.

Each pair is equal to the same without this library, or is refused with a cure.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import gradcomp
from gradcomp.codecs import QSGD, Dense
from gradcomp.parallel import zero
from tests.plugins.slow_cases import one_in
from tests.support.assertions import says
from tests.support.cases.inner import (
  CODECS,
  N,
  assert_close,
  by_hand,
  plain,
  rounds,
  train,
)

SGD = optax.sgd(0.3)
PAIR = optax.LookaheadParams.init_synced
ROUNDS = dict(every=2, codec=Dense(), axis_name="data")

# What moves parameters otherwise than the updates that it is given.
AROUND = {
  "schedule free": lambda tx: contrib.schedule_free(tx, 0.3),
  "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
  "halved": lambda tx: optax.chain(tx, optax.scale(0.5)),
  "decayed": lambda tx: optax.chain(tx, optax.add_decayed_weights(-0.1)),
  "not negative": lambda tx: optax.chain(tx, optax.keep_params_nonnegative()),
  "switched": lambda tx: gradcomp.wrappers.switch([2], [tx, tx]),
  "every second": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
}


def place_of(name):
  return PAIR if name == "lookahead" else lambda params: params


@pytest.mark.parametrize("name", AROUND)
def test_zero_goes_on_from_where_parameters_are(name):
  got = train(AROUND[name](zero(SGD, **CODECS)), 4, place_of(name))
  assert_close(got, plain(AROUND[name](SGD), 4, place_of(name)))


def test_parameters_that_someone_moves_stay_moved():
  """And what was not sent before is sent as it would have been."""
  codec = QSGD(bits=4, bucket_size=64)
  tx = zero(SGD, grads=Dense(), params=codec, axis_name="data", min_leaf_size=0)
  params = jnp.zeros((N, 300))
  grads = jnp.asarray(np.random.default_rng(0).normal(size=(N, 300)), jnp.float32)
  state = jax.vmap(tx.init, axis_name="data")(params)
  update = jax.jit(jax.vmap(tx.update, axis_name="data"))
  first, state = update(grads, state, params)
  stays, moved = (update(grads, state, params + first + x)[0] for x in (0.0, 16.0))
  np.testing.assert_allclose(moved, stays, atol=1e-4)
  assert jnp.abs(stays + 0.3 * grads.mean(axis=0)).max() > 0.02  # of what waited


@pytest.mark.parametrize("name", ["lookahead", "halved"])
def test_local_steps_inside_of_what_moves_parameters(name):
  tx = gradcomp.local.local_steps(SGD, optax.sgd(1.0), **ROUNDS)
  displacement = {
    "lookahead": lambda state: state.fast_state[1],
    "halved": lambda state: state[0][1],
  }
  expected = by_hand(
    AROUND[name](rounds(SGD)), displacement[name], place=place_of(name)
  )
  assert_close(train(AROUND[name](tx), 4, place_of(name)), expected)


OUTER = {
  "schedule free": contrib.schedule_free(optax.sgd(0.7), 0.7),
  "prodigy": contrib.prodigy(0.5),
  "nesterov": optax.sgd(0.7, 0.9, nesterov=True),
}


@pytest.mark.parametrize("name", one_in(3, OUTER))
def test_what_keeps_parameters_outside_of_local_steps(name):
  outer = OUTER[name]
  tx = gradcomp.local.local_steps(SGD, outer, **ROUNDS)
  assert_close(train(tx, 4), by_hand(rounds(SGD, outer), lambda state: state[1]))


def trained(tx):
  """The parameters behind eight steps of a train step on two hosts of two chips."""
  mesh = jax.make_mesh((2, 2), ("host", "chip"))
  axes, spec = ("host", "chip"), {"w": jax.P(), "b": jax.P()}
  params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
  params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
  with jax.set_mesh(mesh):
    state = gradcomp.init_state(tx, params, axis_name=axes, param_specs=spec)

  def loss_fn(params, x):
    return jnp.mean((params["w"] - x) ** 2) + jnp.mean((params["b"] - x) ** 2)

  step = gradcomp.make_train_step(loss_fn, tx, axis_name=axes, mesh=mesh)
  for x in batches():
    params, state, _ = step(params, state, x)
    jax.block_until_ready(params)
  return jax.tree.map(np.asarray, params)


def batches():
  return np.random.default_rng(0).normal(size=(8, 4, 3)).astype(np.float32)


def test_zero_inside_of_local_steps():
  """It is the optimizer behind a dense exchange, on each host."""
  options = dict(every=4, codec=Dense(), axis_name="host")
  chip = dict(grads=Dense(), params=Dense(), axis_name="chip")
  dense = optax.chain(gradcomp.dense(axis_name="chip"), optax.adam(0.1))
  got, expected = (
    trained(gradcomp.local.local_steps(inner, optax.sgd(1.0), **options))
    for inner in (zero(optax.adam(0.1), **chip), dense)
  )
  for name, leaf in expected.items():
    np.testing.assert_allclose(got[name], leaf, atol=1e-5)


def test_local_steps_inside_of_local_steps():
  """Chips average every two steps, and hosts every four: hierarchical local SGD."""
  options = dict(outer=optax.sgd(1.0), codec=Dense())
  inner = gradcomp.local.local_steps(SGD, every=2, axis_name="chip", **options)
  got = trained(gradcomp.local.local_steps(inner, every=4, axis_name="host", **options))
  w, b = np.zeros((2, 2, 3)), np.zeros((2, 2, 1))  # hosts, chips
  for i, x in enumerate(batches()):
    x = x.reshape(2, 2, 3)
    w = w - 0.3 * 2 / 3 * (w - x)
    b = b - 0.3 * 2 * (b - x.mean(axis=-1, keepdims=True))
    if i % 2:
      w, b = (np.stack([y.mean(axis=1)] * 2, axis=1) for y in (w, b))
    if i % 4 == 3:
      w, b = (np.stack([y.mean(axis=0)] * 2) for y in (w, b))
  np.testing.assert_allclose(got["w"], w[0, 0], atol=1e-5)
  np.testing.assert_allclose(got["b"], b[0, 0, 0], atol=1e-5)


def test_zero_as_the_outer_optimizer():
  """Each owner keeps an Nth of the momentum."""
  nesterov = OUTER["nesterov"]
  tx = gradcomp.local.local_steps(SGD, zero(nesterov, **CODECS), **ROUNDS)
  assert_close(train(tx, 4), by_hand(rounds(SGD, nesterov), lambda state: state[1]))


STEPS_ALONE = {
  "local steps": gradcomp.local.local_steps(SGD, optax.sgd(1.0), **ROUNDS),
  "adam": gradcomp.optimizers.adam(0.1, axis_name="data", local=2, warmup=1),
}


@pytest.mark.parametrize("name", STEPS_ALONE)
def test_schedule_free_around_steps_alone_is_refused(name):
  """It would average parameters that stay where they are for a round."""
  text = "no optax.contrib.schedule_free around local steps", "`outer`"
  with pytest.raises(ValueError, match=says(*text)):
    train(AROUND["schedule free"](STEPS_ALONE[name]), 1)
