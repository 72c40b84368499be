"""zero in several messages has the bits of one, and each waits for its own leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, EightBit, OneBit, Ternary
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.zero import (
  LEAVES,
  TILE,
  N,
  coded,
  gradients,
  last,
  loss_fn,
  sharded,
  tree,
)
from tests.support.hlo_order import ancestors, entry_instructions, weight_gradients

LAYERS = 4
WIDTH = 64
BYTES = 1200  # of 4 bits: the leaf "w" needs more, and others share a message


@pytest.mark.parametrize(
  "codec, mode",
  [
    (QSGD(bits=4, bucket_size=64), "shard_map"),
    *slow(
      (QSGD(bits=4, bucket_size=64), "vmap"),
      (QSGD(bits=4, bucket_size=64), "explicit"),
      (OneBit(bucket_size=64), "shard_map"),
      (EightBit(bucket_size=64), "shard_map"),
      (Ternary(bucket_size=64, share_scale=False), "shard_map"),
    ),
  ],
  ids=str,
)
def test_pieces_have_the_bits_of_the_whole(codec, mode):
  """Keys are those of leaves, scales those of buckets, and owners add in one order."""
  params, given = tree(0, LEAVES), gradients(2, LEAVES)
  inner = optax.sgd(0.1, momentum=0.5)
  whole, pieces = (
    coded(inner, codec, QSGD(bits=4, bucket_size=64), message_bytes=size)
    for size in (None, BYTES)
  )
  messages = [
    gradcomp.explain(tx, params, workers=N).messages for tx in (whole, pieces)
  ]
  assert messages[0] == 1 < messages[1]
  got, state = last(mode, pieces, params, given)
  expected, other = last(mode, whole, params, given)
  assert_same_bits(got, expected)
  assert_same_bits(state.gradients, other.gradients)
  # A message has a matrix for each pair of codecs in it.
  assert len(state.unsent.arrays["data",]) > len(other.unsent.arrays["data",])


def compiled(tx, params):
  params, state, mesh = sharded(tx, params)
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  return step.lower(params, state, np.ones(N, np.float32)).compile()


def test_each_message_has_two_collectives_and_takes_its_own_memory():
  params = {f"w{i}": np.ones((64, 2 * TILE), np.float32) for i in range(LAYERS)}
  each = 4 * 33 * 64 * 2 * 4  # words of 128 rows, of a leaf's codes and its scales
  programs = {}
  for size, count in ((None, 1), (2 * each, 2), (0, LAYERS)):
    tx = coded(optax.adam(0.1), message_bytes=size)
    programs[count] = compiled(tx, params)
    report = gradcomp.wire_report(programs[count])
    sent = [x for x in report.collectives if x.dtype == "u32"]
    assert (
      sorted(x.kind for x in sent) == ["all-gather"] * count + ["all-to-all"] * count
    )
    told = gradcomp.explain(tx, params, workers=N)
    assert told.messages == count
    assert told.bytes_sent == sum(x.bytes_sent for x in sent)
  # Without pieces all rows, all means and all differences are there at once.
  temps = {n: x.memory_analysis().temp_size_in_bytes for n, x in programs.items()}
  assert temps[LAYERS] < 0.75 * temps[1]


def test_a_piece_waits_for_its_own_leaves_alone():
  """Both its collectives: the gradients' and that of the differences."""
  tx = coded(optax.adam(0.1), message_bytes=0, min_leaf_size=0)
  weights = [np.eye(WIDTH, dtype=np.float32)] * LAYERS
  params, state, mesh = sharded(tx, weights)
  specs = gradcomp.state_specs(state, axis_name="data")

  def loss_of(params, x):
    for w in params:
      x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

  def step(params, state, x):
    grads = gradcomp.value_and_grad(loss_of, axis_name="data")(params, x)[1]
    return tx.update(grads, state, params)[0]

  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=P()
  )
  lowered = jax.jit(mapped).lower(params, state, np.ones((8 * N, WIDTH), np.float32))
  instructions = entry_instructions(lowered.compile().as_text())
  products = set(weight_gradients(instructions, WIDTH))
  for kind in ("all-to-all", "all-gather"):
    named = [n for n, (_, line) in instructions.items() if f" {kind}(" in line]
    needed = [len(ancestors(instructions, name) & products) for name in named]
    assert needed == [1] * LAYERS, kind


def test_another_size_needs_another_state():
  params = dict.fromkeys("wv", np.ones((8, TILE), np.float32))
  params, state, mesh = sharded(coded(optax.sgd(0.1)), params)
  tx = coded(optax.sgd(0.1), message_bytes=0)
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  with pytest.raises(ValueError, match=says("`state.unsent` must", "message_bytes")):
    step(params, state, np.ones(N, np.float32))
