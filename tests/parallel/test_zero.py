"""zero: every worker optimizes an Nth of the parameters, and all see the same ones."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, Dense, EightBit, OneBit, Ternary
from tests.plugins.slow_cases import slow
from tests.support import laws
from tests.support.assertions import assert_same_bits, says
from tests.support.cases import zero as cases
from tests.support.cases.zero import FOUR_BITS, LEAVES, TILE, N, coded, last, sharded
from tests.support.hlo_order import ancestors, compiled, weight_gradients

of = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
ADAM = optax.adamw(optax.linear_schedule(0.1, 0.01, 3), weight_decay=0.1)
NONUNIFORM = QSGD(bits=2, levels="nonuniform", bucket_size=64)
TERNARY = laws.kept(Ternary(bucket_size=64))
ADDED = [FOUR_BITS, TERNARY, *slow(OneBit(per_column=True), NONUNIFORM)]


@pytest.mark.parametrize("codec", ADDED, ids=laws.name)
def test_owners_add_what_workers_would_gather(codec):
  """With the same residuals. Each step of SGD rounds, and so does ``p + (m - p)``."""
  params, given = cases.tree(0, LEAVES), cases.gradients(3, LEAVES)
  options = dict(feedback="error", key=5)
  tx = coded(optax.sgd(0.1), codec, Dense(), **options)
  got, state = last("vmap", tx, params, given)
  gathered = laws.compressed(codec, "all_gather", **options)
  expected, other = last("vmap", optax.chain(gathered, optax.sgd(0.1)), params, given)
  chex.assert_trees_all_close(got, expected, atol=2e-6)
  chex.assert_trees_all_close(state.gradients.residual, other[0].residual, atol=2e-6)


def test_an_owner_knows_what_was_not_sent_and_sends_it_later():
  """It is half a step at most: a level is a seventh of the largest difference.

  Rounding of ``p + d`` adds half an ulp of a parameter below 8. The last gradients are
  zero, and the differences go on.
  """
  shapes = {"w": (N * TILE,)}
  params, given = cases.tree(0, shapes), cases.gradients(3, shapes)
  given += [jax.tree.map(np.zeros_like, given[0])] * 3
  before, known, gaps = np.asarray(params["w"]), [], []
  tx = coded(optax.sgd(0.1), min_leaf_size=0)
  for held, state in cases.train("shard_map", tx, params, given):
    after, master = held["w"][0], cases.masters(held, state)
    largest = np.abs((master - before).reshape(-1, 64)).max(axis=1, keepdims=True)
    gap = np.abs((master - after).reshape(-1, 64))
    assert (gap <= largest / 7 / 2 + 2**-22).all()
    before, known, gaps = after, [*known, master], [*gaps, gap.max()]
  np.testing.assert_allclose(known[-1], known[2], rtol=0, atol=2**-21)
  # Each step leaves a fourteenth of the largest difference.
  assert gaps[2] > 1e-3 and gaps[4] < gaps[2] / 100


def test_each_leaf_is_rounded_as_its_types_say():
  """Owners keep what bfloat16 parameters or updates round.

  Steps of less than half an ulp would never move such a parameter by itself.
  """
  shapes = {"u": jnp.float32, "v": jnp.float32, "w": jnp.bfloat16}
  params = {name: np.ones(N * TILE, dtype) for name, dtype in shapes.items()}
  types = shapes | {"u": jnp.bfloat16}
  given = [{name: np.ones((N, N * TILE), dtype) for name, dtype in types.items()}] * 5
  rate = 2.0**-10 + 2.0**-20
  held, state = last("shard_map", coded(optax.sgd(rate), Dense()), params, given)
  for name in shapes:
    waits = state.unsent[name].arrays["data",].reshape(-1)
    assert waits.any() == (name != "v") and np.abs(waits).max() <= 2.0**-8
    assert held[name].dtype == shapes[name] and (held[name] < 1).all()
    known = held[name][0].astype(np.float32) + waits
    np.testing.assert_array_equal(known, np.float32(1 - 5 * rate))


def test_a_scale_of_the_whole_tensor_is_that_of_a_leaf():
  """Steps of a millionth are not those of another leaf, which are below its levels."""
  sizes = {"large": 1.0, "small": 2.0**-20}
  params = {name: np.zeros(N * TILE, np.float32) for name in sizes}
  given = [{k: np.full((N, N * TILE), x, np.float32) for k, x in sizes.items()}]
  tx = coded(optax.sgd(1.0), Dense(), QSGD(bits=8, bucket_size=None))
  held, _ = last("vmap", tx, params, given)
  for name, size in sizes.items():
    np.testing.assert_allclose(held[name], -size, rtol=2**-7)


def bytes_of(tree):
  """On the first device."""
  return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def test_a_worker_keeps_an_nth_of_the_optimizer():
  params = {"w": np.ones((64, N * TILE), np.float32)}
  params, state, _ = sharded(coded(optax.adam(0.1), feedback="error"), params)
  whole = bytes_of(params)
  adam = state.inner_state[0]
  assert bytes_of(adam.mu) == bytes_of(adam.nu) == bytes_of(state.unsent) == whole / N
  assert bytes_of(state.gradients.residual) == whole
  assert sum(x.nbytes for x in jax.tree.leaves(state.unsent)) == whole  # of all workers
  assert bytes_of(state) == whole * (1 + 3 / N) + 4 * 4  # two counts, two words of key
  _, state, _ = sharded(coded(optax.adam(0.1)), params)
  assert bytes_of(state) == whole * 3 / N + 4 * 4


def test_eight_bits_a_parameter_are_sent():
  """4 + 4 and the scales, in two messages of words. The loss takes four bytes more."""
  params = {"w": (256, 4096), "b": (100,), "s": ()}
  params = {name: np.ones(shape, np.float32) for name, shape in params.items()}
  tx = coded(optax.adam(0.1), QSGD(bits=4))
  report = gradcomp.wire_report(cases.wired(tx, params))
  sent = [x for x in report.collectives if x.dtype == "u32"]
  assert [x.kind for x in sent] == ["all-to-all", "all-gather"]
  assert [x.dtype for x in report.collectives if x not in sent] == ["f32"]
  total, size = sum(x.bytes_sent for x in sent), 2**20
  arithmetic = 2 * (N - 1) / N * size * (4 + 32 / 512) / 8
  assert abs(total / arithmetic - 1) < 0.01
  assert 8 * total * N / (N - 1) / size == pytest.approx(8.13, abs=0.05)
  assert report.ratio < 0.13
  assert gradcomp.explain(tx, params, workers=N).bytes_sent == total


def test_a_leaf_is_filled_up_to_as_many_rows_of_each_worker():
  """A small leaf has as many elements, so that it is sent with few zeros."""
  words = {"['five']": 8 * (64 + 8), "['seven']": 8}
  tx = coded(optax.sgd(0.1), min_leaf_size=100)
  told = gradcomp.explain(tx, {"five": of(5 * TILE), "seven": of(7)}, workers=N).leaves
  both_ways = {x: 2 * (N - 1) / N * 4 * n for x, n in words.items()}
  assert {x.path: x.bytes_sent for x in told} == both_ways


@pytest.mark.parametrize("least, dense", [(None, 4), (0, 0)])
def test_leaves_of_any_size_are_within_a_few_levels(least, dense):
  """And small ones in float32, exactly; messages are counted below."""
  shapes = {"1": (1,), "7": (7,), "N-1": (N - 1,), "N+1": (N + 1,)}
  shapes |= {"p": (4099,), "q": (13, 61)}
  params, given = cases.tree(0, shapes), cases.gradients(2, shapes)
  inner = optax.sgd(0.1)
  codec = QSGD(bits=8, bucket_size=32, rounding="nearest")
  tx = coded(inner, codec, min_leaf_size=least)
  got, _ = last("shard_map", tx, params, given)
  told = gradcomp.explain(tx, params, workers=N).leaves
  exact = {x.path for x in told if x.codec == Dense()}
  assert len(exact) == dense
  for name, leaf in cases.plain(inner, params, given).items():
    tolerance = 1e-6 if f"['{name}']" in exact else 0.01
    np.testing.assert_allclose(got[name][0], leaf, atol=tolerance)


def test_what_fills_rows_up_is_never_sent():
  """Levels without zero move it. It would take the scale of the last bucket with it."""
  last_one = np.eye(1, TILE + 1, TILE, dtype=np.float32)
  params = {"w": last_one[0] * np.float32(-1.9)}
  # The one element of the last bucket moves a twentieth of what its gradient says.
  inner = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1e-3))
  codec = QSGD(bits=1, levels="uniform", bucket_size=64)
  tx = coded(inner, codec, FOUR_BITS, min_leaf_size=0, dither="independent")
  held, _ = last("shard_map", tx, params, [{"w": np.repeat(last_one, N, 0)}] * 3)
  moved = held["w"][0] - params["w"]
  np.testing.assert_allclose(moved[-1], -1.5e-4, rtol=5e-3)
  assert not moved[:-1].any()


def test_what_is_not_finite_stays_out_of_the_state():
  """Its bucket of the updates is NaN for all, and the step behind it is a sound one.

  A guard around it leaves everything as it was.
  """
  shapes = {"w": (N * TILE,)}
  params, (first, then) = cases.tree(0, shapes), cases.gradients(2, shapes)
  bad = {"w": np.array(first["w"])}
  bad["w"][1, 3], bad["w"][2, -1] = np.nan, np.inf
  tx = coded(optax.adam(0.1), min_leaf_size=0, feedback="error")
  (held, state), _ = cases.train("shard_map_unchecked", tx, params, [bad, then])
  broken = np.isnan(held["w"])
  assert broken[:, :64].all() and broken[:, -64:].all()
  assert broken.sum() == N * 2 * 64
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
  assert not any(x.reshape(-1)[:64].any() for x in jax.tree.leaves(state.unsent))
  mu = state.inner_state[0].mu["w"].arrays["data",].reshape(-1)
  assert not mu[:64].any() and mu[64:128].any()
  given = gradcomp.skip_nonfinite(tx, 5, axis_name="data"), params, [then, bad]
  (expected, other), (got, state) = cases.train("shard_map", *given)
  assert_same_bits(got, expected)
  assert_same_bits(state.inner_state, other.inner_state)


def test_a_state_that_does_not_fit_is_refused():
  params, tx = {"w": np.ones((8, TILE), np.float32)}, coded(ADAM)
  with pytest.raises(ValueError, match="it is unknown which Nth .* jax.set_mesh"):
    tx.init(params)
  params, state, mesh = sharded(tx, params)
  update = jax.vmap(tx.update, in_axes=None, axis_name="data", axis_size=N)
  with pytest.raises(TypeError, match="`state` must be a gradcomp.state.ZeroState"):
    update(params, (), params)
  with pytest.raises(ValueError, match="`params` must be given to update"):
    update(params, state)
  _, other, _ = sharded(tx, {"w": np.ones((80, TILE), np.float32)})
  step = gradcomp.make_train_step(cases.loss_fn, tx, axis_name="data", mesh=mesh)
  with pytest.raises(ValueError, match=says("`state.unsent` must", "got", "20")):
    step(params, other, np.ones(N, np.float32))


# In several messages.
LAYERS = 4
WIDTH = 64
BYTES = 1200  # of 4 bits: the leaf "w" needs more, and others share a message
OTHERS = OneBit(), EightBit(), Ternary(share_scale=False)
PIECES = [(FOUR_BITS, "shard_map"), *slow((FOUR_BITS, "vmap"), (FOUR_BITS, "explicit"))]
PIECES += slow(*((replace(x, bucket_size=64), "shard_map") for x in OTHERS))


@pytest.mark.parametrize("codec, mode", PIECES, ids=str)
def test_pieces_have_the_bits_of_the_whole(codec, mode):
  """Keys are those of leaves, scales those of buckets, and owners add in one order."""
  params, given = cases.tree(0, LEAVES), cases.gradients(2, LEAVES)
  inner = optax.sgd(0.1, momentum=0.5)
  make = lambda size: coded(inner, codec, FOUR_BITS, message_bytes=size)
  txs = make(None), make(BYTES)
  messages = [gradcomp.explain(tx, params, workers=N).messages for tx in txs]
  assert messages[0] == 1 < messages[1]
  assert_same_bits(*[last(mode, tx, params, given) for tx in txs])


def test_each_message_has_two_collectives_and_takes_its_own_memory():
  params = {f"w{i}": np.ones((64, 2 * TILE), np.float32) for i in range(LAYERS)}
  each = 4 * 33 * 64 * 2 * 4  # words of 128 rows, of a leaf's codes and its scales
  programs = {}
  for size, count in ((None, 1), (2 * each, 2), (0, LAYERS)):
    tx = coded(optax.adam(0.1), message_bytes=size)
    programs[count] = cases.wired(tx, params).compile()
    report = gradcomp.wire_report(programs[count])
    sent = [x for x in report.collectives if x.dtype == "u32"]
    kinds = ["all-gather"] * count + ["all-to-all"] * count
    assert sorted(x.kind for x in sent) == kinds
    told = gradcomp.explain(tx, params, workers=N)
    assert told.messages == count
    assert told.bytes_sent == sum(x.bytes_sent for x in sent)
  # Without pieces all rows, all means and all differences are there at once.
  temps = {n: x.memory_analysis().temp_size_in_bytes for n, x in programs.items()}
  assert temps[LAYERS] < 0.75 * temps[1]


def test_a_piece_waits_for_its_own_leaves_alone():
  """Both its collectives: the gradients' and that of the differences."""
  tx = coded(optax.adam(0.1), message_bytes=0, min_leaf_size=0)
  params, state, mesh = sharded(tx, [np.eye(WIDTH, dtype=np.float32)] * LAYERS)
  specs = gradcomp.state_specs(state, axis_name="data")

  def loss_of(params, x):
    for w in params:
      x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

  def step(params, state, x):
    grads = gradcomp.value_and_grad(loss_of, axis_name="data")(params, x)[1]
    return tx.update(grads, state, params)[0]

  places = dict(in_specs=(P(), specs, P("data")), out_specs=P())
  mapped = jax.shard_map(step, mesh=mesh, **places)
  instructions = compiled(mapped, params, state, np.ones((8 * N, WIDTH), np.float32))
  products = set(weight_gradients(instructions, WIDTH))
  for kind in ("all-to-all", "all-gather"):
    named = [n for n, (_, line) in instructions.items() if f" {kind}(" in line]
    needed = [len(ancestors(instructions, name) & products) for name in named]
    assert needed == [1] * LAYERS, kind
