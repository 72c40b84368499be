"""Sub-batches of a sharded layer: equal gradients, and the next one comes meanwhile."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.lib.cut_layers import sub_batches
from gradcomp.codecs import Dense, EightBit
from tests.plugins.slow_cases import slow
from tests.support import hlo_order
from tests.support.cases.parallel import mapped, numbers

N = 4
EIGHT = EightBit(bucket_size=64)
WEIGHTS = numbers(12, 16) / np.float32(12**0.5)


@pytest.mark.parametrize("mode", ["shard_map", *slow("vmap")])
def test_passes_have_equal_gradients(mode):
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
  each = np.tanh(x.reshape(N * 8, 12) @ WEIGHTS)
  want = (2 * each * (1 - each**2) @ WEIGHTS.T).reshape(x.shape)
  for other in (*others, (first[0], want)):
    chex.assert_trees_all_close(tuple(other), tuple(first), rtol=1e-5, atol=1e-5)


def test_the_sub_batches_are_those_that_the_page_says():
  x = np.arange(N * 4, dtype=np.float32).reshape(N, 4)

  def passes(x):
    keep = lambda batch, s: (batch, s)
    return sub_batches(keep, x, axis_name="data", codec=Dense(), passes=2)

  batches, numbers = mapped("vmap", passes, N)(x)
  first, second = [0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]
  assert batches[1].tolist() == [first, second]
  assert numbers[0].tolist() == [0, 1]


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_next_sub_batch_is_gathered_under_the_product(prefetch):
  x, w = numbers(N, 32, 64), numbers(N, 64, 64)

  def layer(w, x):
    options = dict(axis_name="data", passes=4, codec=EIGHT, prefetch=prefetch)
    return sub_batches(lambda x, s: x @ w, x, **options)

  text = mapped("shard_map", layer, N).lower(w, x).compile().as_text()
  loops = [part for part in text.split("\n\n") if " all-gather(" in part]
  (body,) = [part for part in loops if "ENTRY" not in part]
  # The first one stands before the loop.
  assert text.count(" all-gather(") == len(loops) == 1 + prefetch
  instructions = hlo_order.entry_instructions("\nENTRY " + body)
  named = lambda word: [x for x, (_, line) in instructions.items() if word in line]
  (gather,), (product,) = named(" all-gather("), named('/dot_general"')
  assert (gather in hlo_order.ancestors(instructions, product)) != prefetch
  assert product not in hlo_order.ancestors(instructions, gather)
