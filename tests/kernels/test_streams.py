"""Rounding draws bits of its own for every leaf, step and transformation."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.exchange import TwoShot
from tests.plugins.slow_cases import slow

SIZE, WORKERS, STEPS = 4096, 2, 2
X = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)


def composed(how, **options):
  """One transformation of leaves a and b, or two that share the work."""
  make = functools.partial(gradcomp.qsgd, axis_name="data", **options)
  if how == "one":
    return make(bits=4)
  if how == "partition":
    parts = {"first": make(bits=4), "second": make(bits=4)}
    return optax.partition(parts, {"a": "first", "b": "second"})
  if how == "partition, other bits":
    parts = {"first": make(bits=4), "second": make(bits=2)}
    return optax.partition(parts, {"a": "first", "b": "second"})
  masks = {"a": True, "b": False}, {"a": False, "b": True}
  return optax.chain(*(optax.masked(make(bits=4), mask) for mask in masks))


def outputs(tx, names="ab"):
  """What each worker gets of equal leaves in each step, by leaf, worker and step."""
  grads = {name: jnp.stack([X] * WORKERS) for name in names}

  @functools.partial(jax.vmap, axis_name="data")
  def train(grads):
    state = tx.init(grads)
    found = []
    for _ in range(STEPS):
      output, state = tx.update(grads, state)
      found.append(output)
    return found

  return {
    (name, worker, step): np.asarray(output[name][worker])
    for step, output in enumerate(jax.jit(train)(grads))
    for name in names
    for worker in range(WORKERS)
  }


def correlations(streams):
  """Those of any two streams' errors."""
  return {
    pair: np.corrcoef(streams[pair[0]] - X, streams[pair[1]] - X)[0, 1]
    for pair in itertools.combinations(streams, 2)
  }


def assert_independent(correlations):
  """Correlations of independent errors are 1 / sqrt(SIZE) at one sigma.

  Of some hundred pairs, one is beyond 5 sigma with probability 1e-4.
  """
  for found in correlations.values():
    assert abs(found) < 5 / SIZE**0.5


COMPOSITIONS = ["one", "partition", "partition, other bits", "masked"]


@pytest.mark.parametrize("how", COMPOSITIONS)
def test_leaves_and_steps_are_independent_and_workers_opposed(how):
  """The two workers of a pair err to opposite sides, with a correlation of a half."""
  found = correlations(outputs(composed(how, exchange="local")))
  of_workers = {x for x in found if x[0][::2] == x[1][::2]}
  assert len(of_workers) == 2 * STEPS
  assert_independent({x: found[x] for x in found.keys() - of_workers})
  assert all(-0.55 < found[x] < -0.45 for x in of_workers)


@pytest.mark.parametrize("how", ["one", *slow(*COMPOSITIONS[1:])])
def test_workers_are_independent_with_independent_dithers(how):
  found = outputs(composed(how, exchange="local", dither="independent"))
  assert_independent(correlations(found))


@pytest.mark.parametrize(
  "exchange, dither",
  [(TwoShot(feedback=False), "shared"), *slow(("ring", "independent"))],
)
def test_later_stages_are_independent(exchange, dither):
  """Each encodes sums again. All workers have the same mean."""
  found = outputs(composed("partition", exchange=exchange, dither=dither))
  of_one = {key: x for key, x in found.items() if key[1] == 0}
  assert_independent(correlations(of_one))


def test_a_leaf_draws_the_same_whoever_else_is_there():
  """Alone, in front of another, behind another, in a transformation of its own."""
  expected = outputs(composed("one", exchange="local"))
  found = [
    outputs(composed("one", exchange="local"), names) for names in ("a", "ba", "0ab")
  ]
  found += [outputs(composed(how, exchange="local")) for how in ("partition", "masked")]
  for streams in found:
    for key in streams.keys() & expected.keys():
      np.testing.assert_array_equal(streams[key], expected[key])
