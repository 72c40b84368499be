"""Layers that are cut by their outputs or inputs train as whole ones, by sums."""

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


cut = lambda w, axis=1: np.stack(np.split(w, N, axis=axis))
COLUMNS = [cut(w) for w in PARAMS]
PAIR = [COLUMNS[0], cut(PARAMS[1], 0)]
with_x = lambda model: jax.value_and_grad(model, (0, 1))


@pytest.mark.parametrize(
  "mode", ["shard_map", "vmap", *slow("shard_map_unchecked", "pmap")]
)
def test_layers_that_are_cut_have_the_gradients_of_whole_ones(mode):
  x = jnp.asarray(X)
  run = lambda columns, pair: (with_x(by_outputs)(columns, x), with_x(by_both)(pair, x))
  found = mapped(mode, run, N)(COLUMNS, PAIR)
  (values, (columns, _)), (_, ((first, second), dx)) = found
  want = jax.jit(lambda *given: (with_x(whole)(*given), with_x(whole)(PARAMS[:2], X)))
  (value, (params, _)), (_, (pair, of_x)) = jax.device_get(want(PARAMS, X))
  np.testing.assert_allclose(values, [value] * N, rtol=1e-5)
  given = [*map(cut, params), cut(pair[0]), cut(pair[1], 0), np.stack([of_x] * N)]
  for got, expected in zip([*columns, first, second, dx], given, strict=True):
    largest = np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * largest)


def test_a_pair_of_layers_sends_one_sum_in_each_direction():
  grad = lambda pair: with_x(by_both)(pair, jnp.asarray(X))[1]
  report = gradcomp.wire_report(mapped("shard_map", grad, N).lower(PAIR).compile())
  assert [c.kind for c in report.collectives] == ["all-to-all", "all-gather"] * 2
