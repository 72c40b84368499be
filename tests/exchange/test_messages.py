"""Several messages give the mean of one, and each can go before the others' leaves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.exchange import hierarchical
from gradcomp._src.exchange.plan import PlanOptions, plan_messages
from gradcomp.codecs import QSGD, Dense, FloatCast
from gradcomp.exchange import AllGather, AllReduce, TwoShot
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.exchange import small_gradients, transformation
from tests.support.hlo_order import (
  ancestors,
  compiled,
  first_collectives,
  weight_gradients,
)

WORKERS = 4
LAYERS = 6
WIDTH = 64
CODEC = QSGD(bits=4, bucket_size=32)


def plan(sizes, codec=CODEC, others=None, **options):
  leaves = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
  options = dict(exchange=TwoShot(), min_leaf_size=0, message_bytes=None) | options
  options = dict(feedback=True) | options
  others = [()] * len(sizes) if others is None else others
  paths = [()] * len(sizes)
  options = PlanOptions(codec, **options)
  plan = plan_messages(
    leaves, paths, others, options, axis_name="data", workers=WORKERS
  )
  return plan.messages


def test_leaves_share_a_message_up_to_its_bytes():
  """Four rows of 32 words and 8 scales are 640 bytes; a leaf is never cut."""
  four_rows = [4 * CODEC.tile_size] * 5
  assert [m.leaves for m in plan(four_rows)] == [(0, 1, 2, 3, 4)]
  two = plan(four_rows, message_bytes=1280)
  assert [m.leaves for m in two] == [(0, 1), (2, 3), (4,)]
  assert all(m.layout.nbytes <= 1280 for m in two)
  each = plan(four_rows, message_bytes=0)
  assert [m.leaves for m in each] == [(0,), (1,), (2,), (3,), (4,)]


def test_a_message_has_one_type():
  messages = plan([1024] * 3, others=[(), ("model",), ()])
  assert [(m.leaves, m.others) for m in messages] == [((0, 2), ()), ((1,), ("model",))]


def test_dense_leaves_travel_apart_from_sums():
  shared = QSGD(bits=4, bucket_size=32, share_scale=True)
  messages = plan([8, 2048], shared, exchange=AllReduce(), min_leaf_size=100)
  assert [m.leaves for m in messages] == [(0,), (1,)]
  assert [m.exchange for m in messages] == [AllGather(), AllReduce()]
  assert messages[0].layout.codecs == (Dense(),)


KAHAN = FloatCast(accumulate="kahan")


@pytest.mark.parametrize(
  "codec, names",
  [(CODEC, "abcd"), (CODEC, "e"), (KAHAN, "abcd")],
  ids=str,
)
def test_groups_that_add_piece_by_piece_have_the_bits_of_the_whole(
  codec, names, monkeypatch
):
  """Shares of several rows, zeros behind the last, in pieces of unequal length."""
  rng = np.random.default_rng(3)
  shapes = {"a": (70, 71), "b": (3,), "c": (33, 40), "d": (0,), "e": (90, 70)}
  draw = lambda shape: jnp.asarray(rng.standard_normal((WORKERS, *shape)), jnp.float32)
  steps = [{name: draw(shapes[name]) for name in names} for _ in range(2)]
  asked = []

  def run(pieces):
    patched = lambda _, share: asked.append(share) or pieces
    monkeypatch.setattr(hierarchical, "_pieces", patched)
    jax.clear_caches()  # an equal update would not be traced again
    tx = transformation(codec, "hierarchical", WORKERS, feedback="error")
    return modes.run("vmap", tx, steps)

  whole, pieces = run(1), run(3)
  assert_same_bits(whole, pieces)
  assert len(asked) == 2  # both were traced
  assert asked[0] > 3
  assert asked[0] % 3


@pytest.mark.parametrize("elements, pieces", [(2**21 - 1, 1), (2**21, 2), (2**25, 8)])
def test_groups_add_large_messages_piece_by_piece(elements, pieces):
  """Each piece is a permute inside groups of two. A small leaf does not have rows."""
  tx = transformation(CODEC, "hierarchical", WORKERS)
  like = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (elements - 8, 8)]
  found = gradcomp.explain(tx, like, workers=WORKERS).collectives
  permutes = [x for x in found if x.kind == "collective-permute"]
  assert len(permutes) == pieces + 1  # one is between groups
  sent = sum(x.bytes_in for x in permutes[:-1])
  assert 0 <= sent - 4 * elements / 2 < 4 * 4 * CODEC.tile_size


@pytest.mark.parametrize("exchange", ["psum", *slow("all_gather")])
def test_pieces_have_the_mean_of_the_whole(exchange):
  """Rounding is keyed by the leaf, so that only second stages differ."""
  codec = QSGD(bits=4, bucket_size=32, share_scale=exchange == "psum")
  pairs = [[small_gradients(WORKERS, seed)["a"] for seed in (s, s + 9)] for s in (1, 2)]
  steps = [dict(zip("ab", pair, strict=True)) for pair in pairs]
  tx = [
    transformation(codec, exchange, WORKERS, feedback="error", message_bytes=size)
    for size in (None, 100)
  ]
  whole, pieces = (modes.run("vmap", t, steps) for t in tx)
  assert_same_bits(whole, pieces)


def test_pieces_keep_the_residuals_of_their_second_stages():
  steps = [
    {f"w{i}": x["a"] for i, x in enumerate([small_gradients(WORKERS, s)] * 3)}
    for s in range(2)
  ]
  tx = transformation(CODEC, "two_shot", WORKERS, feedback="error", message_bytes=500)
  results = [modes.run_all(mode, tx, steps) for mode in ("vmap", "shard_map")]
  assert_same_bits(*results)
  outputs, residual, owned = results[0]
  assert [x.shape for x in owned[("data",)]] == [(WORKERS, 1, 8, 32)] * 3
  for name, own in zip(outputs[0], owned[("data",)], strict=True):
    size = steps[0][name][0].size
    kept = np.float64(residual[name]).sum(axis=0).ravel()
    kept += WORKERS * np.float64(own).reshape(-1)[:size]
    sent = WORKERS * sum(np.float64(o[name][0]) for o in outputs).ravel()
    given = sum(np.float64(s[name]).sum(axis=0) for s in steps).ravel()
    # At most 24 roundings of numbers below 8 an element.
    np.testing.assert_allclose(sent + kept, given, rtol=0, atol=24 * 8 * 2.0**-24)


def test_pieces_round_their_means_apart():
  """Signs are exact in the first stage: what differs is what the owners draw."""
  signs = np.random.default_rng(0).choice(np.float32([-1, 1]), (WORKERS, 1024))
  tx = transformation(CODEC, TwoShot(feedback=False), WORKERS, message_bytes=100)
  (output,), _ = modes.run("vmap", tx, [{"a": signs, "b": signs}])
  assert (np.asarray(output["a"][0]) != np.asarray(output["b"][0])).mean() > 0.05


def test_a_piece_depends_on_its_own_leaves_alone():
  tx = gradcomp.compress(
    CODEC,
    axis_name="data",
    exchange=TwoShot(feedback=False),
    message_bytes=6000,
    min_leaf_size=0,
  )
  grads = [jnp.ones((WORKERS, WIDTH, WIDTH)) for _ in range(LAYERS)]
  state = tx.init([g[0] for g in grads])

  def update(state, *grads):
    return tx.update([g[0] for g in grads], state)[0]

  mapped = jax.shard_map(
    update,
    mesh=modes.mesh(WORKERS),
    in_specs=(P(), *[P("data")] * LAYERS),
    out_specs=P(),
  )
  instructions = compiled(mapped, state, *grads)
  like = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
  messages = gradcomp.explain(tx, like, workers=WORKERS).messages
  assert messages == 3
  pieces = []
  for name in first_collectives(instructions):
    lines = [instructions[n][1] for n in ancestors(instructions, name)]
    shape = rf"f32\[1,{WIDTH},{WIDTH}\]"
    leaves = [re.search(rf"{shape}.* parameter\((\d+)\)", line) for line in lines]
    pieces.append(sorted(int(leaf[1]) for leaf in leaves if leaf))
  assert sorted(pieces) == [[2, 3], [4, 5], [6, 7]]  # after the step and the key


def test_pieces_can_go_before_the_backward_pass_is_done():
  """The last layers' message needs no weight gradient of an earlier layer."""
  optimizer = gradcomp.compress(
    CODEC,
    axis_name="data",
    exchange=TwoShot(feedback=False),
    message_bytes=2600,
    min_leaf_size=0,
  )

  def loss_fn(params, x):
    for w in params:
      x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

  def step(params, state, x):
    grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, x)[1]
    return optimizer.update(grads, state)[0]

  mapped = jax.shard_map(
    step,
    mesh=modes.mesh(WORKERS),
    in_specs=(P(), P(), P("data")),
    out_specs=P(),
  )
  params = [jnp.eye(WIDTH)] * LAYERS
  state = optimizer.init(params)
  instructions = compiled(mapped, params, state, jnp.ones((32, WIDTH)))
  products = weight_gradients(instructions, WIDTH)
  assert len(products) == LAYERS
  first = first_collectives(instructions)
  needed = [len(ancestors(instructions, name) & set(products)) for name in first]
  assert needed == [1] * LAYERS
  # XLA has put them in this order: the first message goes before the last product.
  order = list(instructions)
  sends = [n for n, (_, line) in instructions.items() if " all-to-all(" in line]
  assert order.index(sends[0]) < order.index(products[-1])
