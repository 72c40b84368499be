"""The first steps are data-parallel, as post-local SGD has it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import gradcomp
from gradcomp.codecs import Dense, TopK
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits
from tests.support.cases.local import (
  LEAVES,
  NESTEROV,
  N,
  dyadic,
  flat,
  local,
)
from tests.support.cases.zero import gradients, last, tree

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


@pytest.mark.parametrize("mode", ["vmap", *slow("shard_map", "auto", "explicit")])
def test_the_first_steps_are_data_parallel(mode):
  """Whatever the codec and the outer optimizer are, which begin behind them."""
  how = {"fragments": 2, "delay": 1, "mixing": 0.5}
  make = lambda start: local(
    MOMENTUM, NESTEROV, TopK(density=0.05), 4, start=start, **how
  )
  params, given = tree(0, LEAVES), [*dyadic(3), *gradients(13, LEAVES)[3:]]
  got, state = last(mode, make(3), params, given[:3])
  expected, (momentum, _) = data_parallel(MOMENTUM, params, given[:3])
  assert_same_bits(flat(got), flat(expected))
  # Momentum is linear, and these sums are exact: the mean of all is that of the means.
  assert_same_bits(trace_of(state).mean(axis=0), flat(momentum.trace)[0])
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


def test_a_report_says_the_bytes_behind_them():
  """Data-parallel steps are not those that a table of a long training is about."""
  params = tree(0, LEAVES)
  plain = gradcomp.explain(gradcomp.dense(axis_name="data"), params, workers=N)
  tx = local(optax.adam(0.1), PLAIN, Dense(), 10, start=100)
  assert gradcomp.explain(tx, params, workers=N).bytes_per_step == plain.bytes_sent / 10
