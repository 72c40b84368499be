"""Levels are fitted to all workers, and pieces of a step are sent on their own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.codecs import around
from gradcomp.codecs import QSGD, OneBit
from gradcomp.exchange import TwoShot
from tests.support import hlo_order, laws, modes

WORKERS, LAYERS, WIDTH = 4, 6, 64


def test_levels_are_fitted_to_all_workers_every_few_steps():
  """To the sum of their counts, in the first step and every third."""
  codec = QSGD(bits=3, bucket_size=64, levels="nonuniform", refit_every=3)
  # One worker's gradients are nearly sparse, so that its own levels would be others.
  steps = laws.gaussian((5, WORKERS, 64 * 300))
  steps[1:4] **= 3
  steps[:, 1] **= 3
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather")
  bound = codec.bind(gradcomp.codecs.Leaf(()))
  measure, levels = jax.jit(bound.measure), bound.init().shared
  counts = lambda leaves: jnp.asarray(sum(np.asarray(measure(x)) for x in leaves))
  fit = lambda leaves: np.asarray(bound.fits.fit(counts(leaves), levels))
  fitted, alone = [fit(steps[0]), fit(steps[3])], fit(steps[0, 1:2])
  assert (fitted[0] != fitted[1]).any() and (fitted[0] != alone).any()
  run = gradcomp.testing.modes.run("vmap", tx, [{"w": step} for step in steps])
  for number, state in enumerate(run.states[1:]):
    memory = np.asarray(state.memory.shared[()][0])
    np.testing.assert_array_equal(memory, np.stack([fitted[number // 3]] * WORKERS))


def test_a_leaf_that_nobody_encodes_fits_nothing():
  """Nothing is remembered, and nothing is counted."""
  tx = gradcomp.qsgd(bits=3, levels="nonuniform", axis_name="data", min_leaf_size=10**6)
  update = jax.vmap(tx.update, axis_name="data")
  grads = {"w": jax.ShapeDtypeStruct((2, 512), jnp.float32)}
  state = jax.eval_shape(jax.vmap(tx.init, axis_name="data"), grads)
  assert jax.eval_shape(update, grads, state)[1].memory is None
  assert not re.search(r"i32\[.*psum", str(jax.make_jaxpr(update)(grads, state)))


def test_counts_of_many_workers_do_not_overflow(monkeypatch):
  """Eight times 2**30 in the first bin would be zero, as if it were empty."""
  measure = around.Fitted.measure
  monkeypatch.setattr(around.Fitted, "most_counted", 2**30)
  many = lambda codec, x: measure(codec, x).at[0].set(2**30)
  monkeypatch.setattr(around.Fitted, "measure", many)
  codec = QSGD(bits=3, bucket_size=64, levels="nonuniform", refit_every=99)
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather")
  steps = [{"w": np.stack([laws.gaussian(6400)] * 8)}]
  _, state = modes.run_with_state("vmap", tx, steps)
  fitted = np.asarray(state.memory.shared[()][0])
  # The first bin is worth two levels; what the others get is settled by what is left.
  np.testing.assert_array_equal(fitted[:, :2] * 256, np.float32([[0, 1]] * 8))


def test_alone_a_worker_fits_its_own_levels():
  tx = gradcomp.qsgd(bits=3, levels="nonuniform")
  codec = QSGD(bits=3, levels="nonuniform").bind(gradcomp.codecs.Leaf(()))
  grads = {"w": jnp.asarray(laws.gaussian(512 * 64))}
  _, state = jax.jit(tx.update)(grads, tx.init(grads))
  expected = codec.fits.fit(codec.measure(grads["w"]), codec.init().shared)
  np.testing.assert_array_equal(state.memory.shared[()][0], expected)


@pytest.mark.parametrize("exchange", ["two_shot", "ring", "hierarchical"])
def test_means_of_a_short_last_bucket_are_of_its_elements(exchange):
  """Rows know no leaf: what fills them up must not draw means to zero.

  Two elements behind two whole tiles, equal on all workers: both means are exact.
  """
  x = np.concatenate([laws.gaussian(OneBit().tile_size), np.float32([2.5, -1.5])])
  tx = gradcomp.onebit_sgd(axis_name="data", exchange=modes.grouped(exchange))
  (output,), _ = modes.run("vmap", tx, [{"w": jnp.asarray(np.stack([x] * 4))}])
  np.testing.assert_array_equal(output["w"][:, -2:], np.float32([[2.5, -1.5]] * 4))


def test_sums_of_ternary_codes_travel_in_few_bits():
  """ceil(log2(2N + 1)) bits, as many as fit in a word: 5 for 8 workers, 6 a word."""
  like = {"w": jax.ShapeDtypeStruct((16 * 512 * 24,), jnp.float32)}  # 3 rows an owner
  tx = gradcomp.terngrad(axis_name="data", exchange="two_shot")
  explained = gradcomp.explain(tx, like, workers=8)
  assert {x for c in explained.collectives for x, _ in c.operands} == {"u32", "s32"}
  first = 7 * 3 * 512 * 4  # three rows of 512 words to each other worker
  second = 7 * 8 * 512 * 4  # 48 buckets, six a word
  assert explained.bytes_sent == first + second + 7  # and one scale, all-reduced


def in_pieces(message_bytes):
  codec, exchange = QSGD(bits=4, bucket_size=32), TwoShot(feedback=False)
  return laws.compressed(codec, exchange, message_bytes=message_bytes, min_leaf_size=0)


def test_pieces_round_their_means_apart():
  """Signs are exact in the first stage: what differs is what the owners draw."""
  signs = np.random.default_rng(0).choice(np.float32([-1, 1]), (WORKERS, 1024))
  (output,), _ = modes.run("vmap", in_pieces(100), [{"a": signs, "b": signs}])
  assert (np.asarray(output["a"][0]) != np.asarray(output["b"][0])).mean() > 0.05


def test_pieces_can_go_before_the_backward_pass_is_done():
  """The last layers' message needs no weight gradient of another layer."""
  optimizer = in_pieces(2600)

  def loss_fn(params, x):
    for w in params:
      x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

  def step(params, state, x):
    grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, x)[1]
    return optimizer.update(grads, state)[0]

  places = dict(in_specs=(P(), P(), P("data")), out_specs=P())
  mapped = jax.shard_map(step, mesh=modes.mesh(WORKERS), **places)
  params = [jnp.eye(WIDTH)] * LAYERS
  args = params, optimizer.init(params), jnp.ones((32, WIDTH))
  instructions = hlo_order.compiled(mapped, *args)
  products = hlo_order.weight_gradients(instructions, WIDTH)
  assert len(products) == LAYERS
  first = hlo_order.first_collectives(instructions)
  needed = [hlo_order.ancestors(instructions, name) & set(products) for name in first]
  assert [len(x) for x in needed] == [1] * LAYERS
  # XLA has put them in this order: the first message goes before the last product.
  order = list(instructions)
  sends = [n for n, (_, line) in instructions.items() if " all-to-all(" in line]
  assert order.index(sends[0]) < order.index(products[-1])
