"""Layers that are cut by their outputs or inputs train as whole ones, by sums."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp import parallel
from gradcomp.codecs import Dense
from tests.plugins.slow_cases import slow
from tests.support.cases.parallel import mapped, numbers

N = 4
SIZES = (12, 16, 8, 4)
SENT = dict(axis_name="data", codec=Dense())
PARAMS = [
  numbers(m, n, seed=i) / np.float32(m**0.5)
  for i, (m, n) in enumerate(itertools.pairwise(SIZES))
]
X = numbers(8, 12, seed=9)


def whole(params, x):
  for w in params:
    x = jnp.tanh(x @ w)
  return jnp.mean(x**2)


def by_outputs(params, x):
  """Each worker has columns of each matrix, and gathers what the next one needs."""
  for w in params:
    x = jnp.tanh(parallel.sum_gradients(x, **SENT) @ w)
    x = parallel.all_gather(x, axis=1, own="coded", to="invarying", **SENT)
  return jnp.mean(x**2)


def by_both(params, x):
  """Columns, then rows, whose products add up: one sum in each direction."""
  first, second = params
  x = jnp.tanh(parallel.sum_gradients(x, **SENT) @ first)
  return jnp.mean(jnp.tanh(parallel.psum(x @ second, **SENT)) ** 2)


def by_shares(params, x):
  """As by_outputs, but cotangents stay per worker: each has a share of the loss."""
  for w in params:
    x = parallel.all_gather(jnp.tanh(x @ w), axis=1, **SENT)
  return jnp.mean(x**2) / N


def cut(w, axis=1):
  return np.stack(np.split(w, N, axis=axis))


COLUMNS = [cut(w) for w in PARAMS]
PAIR = [COLUMNS[0], cut(PARAMS[1], 0)]
with_x = lambda model: jax.value_and_grad(model, (0, 1))


@pytest.mark.parametrize(
  "mode", ["shard_map", "vmap", *slow("shard_map_unchecked", "pmap")]
)
def test_layers_that_are_cut_have_the_gradients_of_whole_ones(mode):
  """By outputs, with a loss of all or a share of it for each; and by both."""

  def grads(columns, pair):
    x = jnp.asarray(X)
    each = [jax.value_and_grad(f)(columns, x) for f in (by_outputs, by_shares)]
    return *each, with_x(by_both)(pair, x)

  *each, (_, ((first, second), dx)) = mapped(mode, grads, N)(COLUMNS, PAIR)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  want = jax.jit(lambda *given: (with_x(whole)(*given), with_x(whole)(PARAMS[:2], X)))
  (value, (params, _)), (_, (pair, of_x)) = jax.device_get(want(PARAMS, X))
  for share, (got, found) in zip((1, N), each, strict=True):
    np.testing.assert_allclose(got, [value / share] * N, rtol=1e-5)
    for w, own in zip(params, found, strict=True):
      np.testing.assert_allclose(own, cut(w), rtol=1e-5, atol=1e-5 * np.abs(w).max())
  close(first, cut(pair[0]))
  close(second, cut(pair[1], 0))
  close(dx, np.stack([of_x] * N))


def test_a_pair_of_layers_sends_one_sum_in_each_direction():
  grad = lambda pair: with_x(by_both)(pair, jnp.asarray(X))[1]
  report = gradcomp.wire_report(mapped("shard_map", grad, N).lower(PAIR).compile())
  assert [c.kind for c in report.collectives] == ["all-to-all", "all-gather"] * 2
