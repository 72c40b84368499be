"""Rounding draws bits of its own for every leaf, step, worker and transformation."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slow_cases import slow

import gradcomp

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


def assert_independent(streams):
  """Correlations of independent errors are 1 / sqrt(SIZE) at one sigma.

  Of some hundred pairs, one is beyond 5 sigma with probability 1e-4.
  """
  for one, other in itertools.combinations(streams.values(), 2):
    assert abs(np.corrcoef(one - X, other - X)[0, 1]) < 5 / SIZE**0.5


COMPOSITIONS = ["one", "partition", "partition, other bits", "masked"]


@pytest.mark.parametrize("how", COMPOSITIONS)
def test_leaves_workers_and_steps_are_independent(how):
  assert_independent(outputs(composed(how, exchange="local")))


@pytest.mark.parametrize("exchange", ["two_shot", *slow("ring")])
def test_later_stages_are_independent(exchange):
  """Each encodes sums again. All workers have the same mean."""
  found = outputs(composed("partition", exchange=exchange))
  assert_independent({key: x for key, x in found.items() if key[1] == 0})


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
