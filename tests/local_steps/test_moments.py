"""Moments are averaged on periods of their own; first steps are data-parallel."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import gradcomp
from gradcomp.codecs import Dense, TopK
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.local import (
  LEAVES,
  NESTEROV,
  N,
  des_loc,
  dyadic,
  flat,
  local,
)
from tests.support.cases.zero import gradients, last, train, tree

MODES = ["vmap", "pmap", "shard_map", "shard_map_unchecked", "auto", "explicit"]
MOMENTUM = optax.sgd(0.5, 0.5)  # with sums that are exact for a few dyadic gradients
PLAIN = optax.sgd(1.0)


def data_parallel(inner, params, given):
  """Training by the mean of gradients; the parameters and states of all workers."""

  def step(gradient, state, params):
    updates, state = inner.update(lax.pmean(gradient, "data"), state, params)
    return optax.apply_updates(params, updates), state

  step = jax.jit(jax.vmap(step, axis_name="data"))
  params = jax.tree.map(lambda x: jnp.stack([x] * N), params)
  state = jax.vmap(inner.init)(params)
  for gradient in given:
    params, state = step(gradient, state, params)
  return params, state


def trace_of(state):
  """The momentum of each worker."""
  return flat(state.own.inner_state[0].trace)


def test_of_every_period_1_it_is_data_parallel_training():
  """With momentum, which is linear: the mean of workers' momentums is that of means."""
  params, given = tree(0, LEAVES), dyadic(3)
  tx = local(MOMENTUM, PLAIN, Dense(), every=1, sync_state={"trace": 1})
  got, state = last("vmap", tx, params, given)
  expected, (momentum, _) = data_parallel(MOMENTUM, params, given)
  for name in LEAVES:
    assert_same_bits(got[name], expected[name])
  assert_same_bits(trace_of(state), flat(momentum.trace))


def test_des_loc_is_that_of_the_paper():
  params, given = tree(0, LEAVES), gradients(13, LEAVES)
  tx = local(
    optax.adam(0.1, 0.9, 0.95), PLAIN, Dense(), 2, sync_state={"mu": 2, "nu": 3}
  )
  held = list(train("vmap", tx, params, given))
  start = flat(jax.tree.map(lambda x: np.stack([x] * N), params))[0]
  rates = {"rate": 0.1, "betas": (0.9, 0.95)}
  expected = des_loc(start, [*map(flat, given)], **rates, every=2, periods=(4, 6))
  for (got, state), (shared, mu, nu) in zip(held, expected, strict=True):
    moments = state.own.inner_state[0]
    # Sums of 13 numbers below 4, each rounded by at most 2**-23, and a quotient of
    # 1e-2 or more at the most.
    for ours, theirs in (flat(moments.mu), mu), (flat(moments.nu), nu):
      np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(flat(got)[0], shared, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", ["vmap", "shard_map", *slow(*MODES[1:2], *MODES[3:])])
def test_all_workers_have_equal_moments_behind_their_means_alone(mode):
  """In each mode with the same bits."""
  options = {"sync_state": {"trace": 2}, "fragments": 2, "delay": 1, "mixing": 0.5}
  tx = local(MOMENTUM, NESTEROV, TopK(density=0.05), 2, **options)
  params, given = tree(0, LEAVES), gradients(9, LEAVES)
  runs = zip(
    train(mode, tx, params, given), train("vmap", tx, params, given), strict=True
  )
  for number, ((got, state), (expected, kept)) in enumerate(runs, 1):
    own = trace_of(state)
    assert (own == own[0]).all() == (number % 4 == 0)
    assert_same_bits(own, trace_of(kept))
    assert_same_bits(flat(got), flat(expected))


@pytest.mark.parametrize("mode", ["vmap", *slow("shard_map", "auto", "explicit")])
def test_the_first_steps_are_data_parallel(mode):
  """Whatever the codec and the outer optimizer are, which begin behind them."""
  how = {"fragments": 2, "delay": 1, "mixing": 0.5, "sync_state": {"trace": 3}}
  make = lambda start: local(
    MOMENTUM, NESTEROV, TopK(density=0.05), 4, start=start, **how
  )
  params, given = tree(0, LEAVES), [*dyadic(3), *gradients(13, LEAVES)[3:]]
  got, state = last(mode, make(3), params, given[:3])
  expected, (momentum, _) = data_parallel(MOMENTUM, params, given[:3])
  assert_same_bits(flat(got), flat(expected))
  assert_same_bits(trace_of(state), flat(momentum.trace))
  # From there it is the same optimizer as one without such steps.
  rest = last(mode, make(3), params, given)
  step = jax.jit(
    jax.vmap(
      lambda grads, state, params: make(0).update(grads, state, params),
      axis_name="data",
    )
  )
  again = got, state._replace(count=np.zeros(N, np.int32))
  for gradient in given[3:]:
    updates, new = step(gradient, again[1], again[0])
    again = optax.apply_updates(again[0], updates), new
  assert_same_bits(flat(rest[0]), flat(again[0]))
  assert_same_bits(trace_of(rest[1]), trace_of(again[1]))


def test_a_report_says_the_bytes_of_each_period():
  """The dense mean of each field is in one of its period's steps."""
  params = tree(0, LEAVES)
  plain = gradcomp.explain(gradcomp.dense(axis_name="data"), params, workers=N)
  tx = local(optax.adam(0.1), PLAIN, Dense(), 10, sync_state={"mu": 3, "nu": 6})
  found = gradcomp.explain(tx, params, workers=N)
  assert [x.every for x in found.leaves] == [10] * 3 + [30] * 3 + [60] * 3
  assert found.bytes_sent == 3 * plain.bytes_sent
  per_step = plain.bytes_sent * (1 / 10 + 1 / 30 + 1 / 60)
  assert found.bytes_per_step == pytest.approx(per_step, rel=1e-12)
  assert "In a round of 60 steps" in str(found)
  # Data-parallel steps are not those that a table of a long training is about.
  tx = local(optax.adam(0.1), PLAIN, Dense(), 10, start=100)
  assert gradcomp.explain(tx, params, workers=N).bytes_per_step == plain.bytes_sent / 10


@pytest.mark.parametrize(
  "options, rule",
  [
    ({"sync_state": ["mu"]}, "`sync_state` must be None, or a dict"),
    ({"sync_state": {"mu": 0}}, "`sync_state\\['mu'\\]` must be a number of steps"),
    ({"start": -1}, "`start` must be a number of steps, 0 or more"),
  ],
  ids=str,
)
def test_a_bad_option_is_an_error(options, rule):
  with pytest.raises(ValueError, match=rule):
    local(MOMENTUM, PLAIN, Dense(), **options)


@pytest.mark.parametrize("name", ["trace", "count"])
def test_a_field_that_is_not_there_or_holds_no_floats_is_an_error(name):
  tx = local(optax.adam(0.1), PLAIN, Dense(), sync_state={name: 1})
  said = says("`sync_state` must name fields", f"got '{name}'", "['mu', 'nu']")
  with pytest.raises(ValueError, match=said):
    jax.vmap(tx.init, axis_name="data")({"w": jnp.ones((N, 3))})
