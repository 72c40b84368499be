"""Sub-batches of a sharded layer: equal gradients, and the next one comes meanwhile."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.lib.sharded.sub_batches import sub_batches
from gradcomp.codecs import Dense, EightBit
from tests.plugins.slow_cases import slow
from tests.support.cases.parallel import mapped, numbers

N = 4
EIGHT = EightBit(bucket_size=64)
WEIGHTS = numbers(12, 16) / np.float32(12**0.5)


@pytest.mark.parametrize("mode", ["shard_map", *slow("vmap")])
def test_passes_have_equal_gradients(mode):
  """Of the weights and of the features, with and without fetching ahead."""
  params, x = np.stack(np.split(WEIGHTS, N, axis=1)), numbers(N, 8, 12, seed=9)

  def grads(w, x):
    def loss(w, x, passes, prefetch):
      layer = lambda x, s: jnp.sum(jnp.tanh(x @ w) ** 2)
      options = dict(axis_name="data", codec=Dense())
      sums = sub_batches(layer, x, passes=passes, prefetch=prefetch, **options)
      assert sums.shape == (passes,)
      return jnp.sum(sums)

    cases = [(1, True), (2, True), (4, True), (4, False)]
    return [jax.grad(loss, (0, 1))(w, x, *case) for case in cases]

  first, *others = mapped(mode, grads, N)(params, x)
  each = x.reshape(N * 8, 12)
  want = 2 * np.tanh(each @ WEIGHTS) * (1 - np.tanh(each @ WEIGHTS) ** 2) @ WEIGHTS.T
  np.testing.assert_allclose(first[1], want.reshape(x.shape), rtol=1e-5, atol=1e-5)
  for other in others:
    for got, want in zip(other, first, strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_sub_batches_are_those_that_the_page_says():
  x = np.arange(N * 4, dtype=np.float32).reshape(N, 4)

  def passes(x):
    keep = lambda batch, s: (batch, s)
    options = dict(axis_name="data", codec=Dense())
    return sub_batches(keep, x, passes=2, **options)

  batches, numbers = mapped("vmap", passes, N)(x)
  assert batches[1].tolist() == [
    [0, 1, 4, 5, 8, 9, 12, 13],
    [2, 3, 6, 7, 10, 11, 14, 15],
  ]
  assert numbers[0].tolist() == [0, 1]


def needs(body):
  """What each instruction of a computation needs, directly or not, by their names."""
  found = {}
  for line in body.splitlines()[1:]:
    if match := re.match(r"\s+(?:ROOT )?(%\S+) = ", line):
      operands = re.findall(r"%[\w.-]+", line[match.end() :].split(", metadata")[0])
      each = (found.get(name, {name}) for name in operands)
      found[match[1]] = {match[1]}.union(*each)
  return found


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_next_sub_batch_is_gathered_under_the_product(prefetch):
  """In the loop of the optimized program neither of the two waits for the other."""
  x, w = numbers(N, 32, 64), numbers(N, 64, 64)

  def layer(w, x):
    options = dict(axis_name="data", passes=4, codec=EIGHT, prefetch=prefetch)
    return sub_batches(lambda x, s: x @ w, x, **options)

  text = mapped("shard_map", layer, N).lower(w, x).compile().as_text()
  loops = [part for part in text.split("\n\n") if " all-gather(" in part]
  (body,) = [part for part in loops if "ENTRY" not in part]
  # The first one stands before the loop.
  assert text.count(" all-gather(") == len(loops) == 1 + prefetch

  def named(pattern):
    lines = [line for line in body.splitlines() if re.search(pattern, line)]
    return {re.search(r"%[\w.-]+", line)[0] for line in lines}

  (gather,) = named(r" all-gather\(")
  (product,) = named(r'/dot_general"')
  found = needs(body)
  assert (gather in found[product]) != prefetch
  assert product not in found[gather]
