"""zero: every worker optimizes an Nth of the parameters, and all see the same ones."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, Dense, FloatCast, OneBit, PowerSGD, Ternary, TopK
from gradcomp.parallel import zero
from tests.plugins.slow_cases import slow
from tests.support import laws
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.zero import (
  FOUR_BITS,
  LEAVES,
  TILE,
  N,
  coded,
  gradients,
  last,
  loss_fn,
  masters,
  plain,
  sharded,
  train,
  tree,
  wire,
)

ADAM = optax.adamw(optax.linear_schedule(0.1, 0.01, 3), weight_decay=0.1)


def test_in_float32_it_is_adam():
  """Up to rounding: a sum of workers in their order, and ``p + (m - p)`` for ``m``.

  An ulp of a parameter below 4 is 2.4e-7, and each step may add one or two.
  """
  params, given = tree(0, LEAVES), gradients(3, LEAVES)
  got, _ = last("shard_map", coded(ADAM, Dense()), params, given)
  expected = plain(ADAM, params, given)
  for name, leaf in expected.items():
    for copy in got[name]:
      np.testing.assert_allclose(copy, leaf, atol=2e-6, rtol=0)


@pytest.mark.parametrize("codec", [FOUR_BITS, *slow(OneBit(bucket_size=64))])
def test_all_workers_hold_the_same_bits(codec):
  """Nothing proves it here, and everyone's own copy comes back."""
  given = gradients(3, LEAVES)
  tx = coded(ADAM, codec)
  for params, _ in train("shard_map_unchecked", tx, tree(0, LEAVES), given):
    for leaf in jax.tree.leaves(params):
      assert np.isfinite(leaf).all()
      assert_same_bits(leaf, np.stack([leaf[0]] * N))


@pytest.mark.parametrize(
  "codec",
  [
    FOUR_BITS,
    laws.kept(Ternary()),
    *slow(
      OneBit(per_column=True),
      QSGD(bits=2, norm="rms", levels="uniform", rotate=8, bucket_size=64),
      QSGD(bits=2, levels="nonuniform", bucket_size=64),
      FloatCast(accumulate="float32"),
      Ternary(bucket_size=64, share_scale=False),
    ),
  ],
  ids=laws.name,
)
def test_owners_add_what_workers_would_gather(codec):
  """With the same residuals. Each step of SGD rounds, and so does ``p + (m - p)``."""
  params, given = tree(0, LEAVES), gradients(3, LEAVES)
  options = dict(feedback="error", key=5)
  tx = coded(optax.sgd(0.1), codec, Dense(), **options)
  got, state = last("vmap", tx, params, given)
  gathered = gradcomp.compress(
    codec, axis_name="data", exchange="all_gather", **options
  )
  expected, other = last("vmap", optax.chain(gathered, optax.sgd(0.1)), params, given)
  chex.assert_trees_all_close(got, expected, atol=2e-6)
  chex.assert_trees_all_close(state.gradients.residual, other[0].residual, atol=2e-6)


@pytest.mark.parametrize(
  "mode", ["explicit", *slow("auto", "pmap", "vmap", "shard_map_unchecked")]
)
def test_all_modes_train_alike(mode):
  params, given = tree(0, LEAVES), gradients(2, LEAVES)
  tx = coded(
    optax.sgd(0.1, momentum=0.5), QSGD(bits=4, bucket_size=64), feedback="error"
  )
  got, state = last(mode, tx, params, given)
  expected, other = last("shard_map", tx, params, given)
  chex.assert_trees_all_close(got, expected, atol=1e-6)
  chex.assert_trees_all_close(state.unsent, other.unsent, atol=1e-6)


def test_what_the_owner_knows_is_half_a_step_away_at_most():
  """A level of a bucket is a seventh of its largest difference, ties included.

  Rounding of ``p + d`` adds half an ulp of a parameter below 8.
  """
  shapes = {"w": (N * TILE,)}
  params, given = tree(0, shapes), gradients(4, shapes)
  before = np.asarray(params["w"])
  for held, state in train("shard_map", coded(ADAM, min_leaf_size=0), params, given):
    after, master = held["w"][0], masters(held, state)
    largest = np.abs((master - before).reshape(-1, 64)).max(axis=1, keepdims=True)
    gap = np.abs((master - after).reshape(-1, 64))
    assert (gap <= largest / 7 / 2 + 2**-22).all()
    assert gap.max() > 0.9 * largest.max() / 7 / 2 / 2
    before = after


def test_what_was_not_sent_comes_later():
  """The gradient is zero behind the first step, and the differences go on."""
  shapes = {"w": (N * TILE,)}
  params, (first,) = tree(0, shapes), gradients(1, shapes)
  nothing = jax.tree.map(np.zeros_like, first)
  tx = coded(optax.sgd(0.1), FOUR_BITS, min_leaf_size=0)
  given = [first] + [nothing] * 3
  held, states = zip(*train("shard_map", tx, params, given), strict=True)
  known = [masters(*both) for both in zip(held, states, strict=True)]
  gaps = [np.abs(m - x["w"][0]).max() for m, x in zip(known, held, strict=True)]
  assert_same_bits(known[-1], known[0])
  assert gaps[0] > 1e-3
  # Each step leaves a fourteenth of the largest difference.
  assert gaps[2] < gaps[0] / 100


def test_each_leaf_is_rounded_as_its_types_say():
  """They share a matrix. What bfloat16 parameters or updates round, owners keep.

  Steps of less than half an ulp would never move such a parameter by itself.
  """
  shapes = {"u": jnp.float32, "v": jnp.float32, "w": jnp.bfloat16}
  params = {name: np.ones(N * TILE, dtype) for name, dtype in shapes.items()}
  types = shapes | {"u": jnp.bfloat16}
  given = [{name: np.ones((N, N * TILE), dtype) for name, dtype in types.items()}] * 5
  rate = 2.0**-10 + 2.0**-20
  held, state = last("shard_map", coded(optax.sgd(rate), Dense()), params, given)
  ((unsent,),) = state.unsent.arrays.values()
  for name, waits in zip("uvw", unsent.reshape(3, -1), strict=True):
    assert waits.any() == (name != "v") and np.abs(waits).max() <= 2.0**-8
    assert held[name].dtype == shapes[name] and (held[name] < 1).all()
    known = held[name][0].astype(np.float32) + waits
    np.testing.assert_array_equal(known, np.float32(1 - 5 * rate))


def bytes_of(tree):
  """On the first device."""
  first = lambda x: x.addressable_shards[0].data.nbytes
  return sum(map(first, jax.tree.leaves(tree)))


def test_a_worker_keeps_an_nth_of_the_optimizer():
  params = {"w": np.ones((64, N * TILE), np.float32)}
  tx = coded(optax.adam(0.1), feedback="error")
  params, state, _ = sharded(tx, params)
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
  codec = QSGD(bits=4)
  params = {"w": (256, 4096), "b": (100,), "s": ()}
  params = {name: np.ones(shape, np.float32) for name, shape in params.items()}
  tx = coded(optax.adam(0.1), codec)
  report = wire(tx, params)
  sent = [x for x in report.collectives if x.dtype == "u32"]
  assert [x.kind for x in sent] == ["all-to-all", "all-gather"]
  assert [x.dtype for x in report.collectives if x not in sent] == ["f32"]
  total = sum(x.bytes_sent for x in sent)
  size = 2**20
  arithmetic = 2 * (N - 1) / N * size * (4 + 32 / 512) / 8
  assert abs(total / arithmetic - 1) < 0.01
  assert 8 * total * N / (N - 1) / size == pytest.approx(8.13, abs=0.05)
  assert report.ratio < 0.13
  assert gradcomp.explain(tx, params, workers=N).bytes_sent == total


ODD = {
  "1": (1,),
  "7": (7,),
  "N-1": (N - 1,),
  "N+1": (N + 1,),
  "p": (4099,),
  "q": (13, 61),
}


@pytest.mark.parametrize("least, dense", [(None, 4), (0, 0)])
def test_leaves_of_any_size_share_two_messages(least, dense):
  """Small ones in float32, exactly; the others within a few levels of the codec."""
  params, given = tree(0, ODD), gradients(2, ODD)
  inner = optax.sgd(0.1)
  codec = QSGD(bits=8, bucket_size=32, rounding="nearest")
  tx = coded(inner, codec, min_leaf_size=least)
  got, _ = last("shard_map", tx, params, given)
  expected = plain(inner, params, given)
  told = gradcomp.explain(tx, params, workers=N).leaves
  exact = {x.path for x in told if x.codec == Dense()}
  assert len(exact) == dense
  for name, leaf in expected.items():
    tolerance = 1e-6 if f"['{name}']" in exact else 0.01
    np.testing.assert_allclose(got[name][0], leaf, atol=tolerance)
  kinds = [x.kind for x in wire(tx, params).collectives if x.dtype == "u32"]
  assert kinds == ["all-to-all", "all-gather"]


def test_what_fills_rows_up_is_never_sent():
  """Levels without zero move it. It would take the scale of the last bucket with it."""
  last_one = np.eye(1, TILE + 1, TILE, dtype=np.float32)
  params = {"w": last_one[0] * np.float32(-1.9)}
  given = [{"w": np.repeat(last_one, N, 0)}] * 3
  # The one element of the last bucket moves a twentieth of what its gradient says.
  inner = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1e-3))
  codec = QSGD(bits=1, levels="uniform", bucket_size=64)
  options = dict(min_leaf_size=0, dither="independent")
  tx = coded(inner, codec, FOUR_BITS, **options)
  held, _ = last("shard_map", tx, params, given)
  moved = held["w"][0] - params["w"]
  np.testing.assert_allclose(moved[-1], -1.5e-4, rtol=5e-3)
  assert not moved[:-1].any()


def test_what_is_not_finite_stays_out_of_the_state():
  """Its bucket of the updates is NaN for all, and the step behind it is a sound one."""
  shapes = {"w": (N * TILE,)}
  params, (first, then) = tree(0, shapes), gradients(2, shapes)
  bad = {"w": np.array(first["w"])}
  bad["w"][1, 3], bad["w"][2, -1] = np.nan, np.inf
  tx = coded(optax.adam(0.1), min_leaf_size=0, feedback="error")
  (held, state), _ = train("shard_map_unchecked", tx, params, [bad, then])
  broken = np.isnan(held["w"])
  assert broken[:, :64].all() and broken[:, -64:].all()
  assert broken.sum() == N * 2 * 64
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
  assert not any(x.reshape(-1)[:64].any() for x in jax.tree.leaves(state.unsent))
  mu = state.inner_state[0].mu.arrays[("data",)][0].reshape(-1)
  assert not mu[:64].any() and mu[64:128].any()


def test_a_guard_around_it_leaves_everything_as_it_was():
  shapes = {"w": (N * TILE,)}
  params, (first,) = tree(0, shapes), gradients(1, shapes)
  bad = {"w": np.array(first["w"])}
  bad["w"][1, 3] = np.nan
  tx = coded(optax.adam(0.1), min_leaf_size=0)
  guarded = gradcomp.skip_nonfinite(tx, 5, axis_name="data")
  (expected, other), (got, state) = train("shard_map", guarded, params, [first, bad])
  assert_same_bits(got, expected)
  assert_same_bits(state.inner_state, other.inner_state)


TWO = {"w": np.ones((8, TILE), np.float32), "b": np.ones(3, np.float32)}
INJECTED = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 9))
WRAPPED = {
  "chain": lambda tx: optax.chain(
    gradcomp.wrappers.clip_by_local_norm(1.0, axis_name="data"), tx
  ),
  "masked": lambda tx: optax.chain(
    optax.masked(tx, {"w": True, "b": False}),
    optax.masked(optax.set_to_zero(), {"w": False, "b": True}),
  ),
  "partition": lambda tx: optax.partition(
    {"a": tx, "b": coded(optax.sgd(0.1), Dense())}, {"w": "a", "b": "b"}
  ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_it_goes_where_optimizers_go(name):
  tx = WRAPPED[name](coded(INJECTED, feedback="error"))
  params, state, mesh = sharded(tx, TWO)
  step = gradcomp.make_train_step(
    loss_fn, tx, axis_name="data", mesh=mesh, donate=False
  )
  for _ in range(2):
    params, state, metrics = step(params, state, np.ones(N, np.float32))
  assert metrics["loss"] < 1.9
  # A step of Adam is as long as its rate, which is 0.1 and then 0.09; of SGD it is a
  # tenth of the gradient.
  np.testing.assert_allclose(params["w"], 0.81, atol=0.01)
  moved = {"chain": 0.81, "masked": 1.0, "partition": (1 - 0.1 * 2 / 3) ** 2}[name]
  np.testing.assert_allclose(params["b"], moved, atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parameters_may_be_cut_over_another_axis(kind):
  """Each device owns rows of its own part, or of the whole where JAX places it."""
  mesh = jax.make_mesh((N, 2), ("data", "model"), (kind,) * 2)
  params = {"w": np.full((64, TILE), 2, np.float32), "b": np.full(7, 2, np.float32)}
  cut = {"w": P(None, "model"), "b": P()}
  tx, whole = coded(optax.adam(0.1)), sharded(coded(optax.adam(0.1)), params)
  held = jax.tree.map(
    lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, cut
  )
  with jax.set_mesh(mesh):
    state = tx.init(held)
  losses = []
  for now, own, devices in (held, state, mesh), whole:
    step = gradcomp.make_train_step(
      loss_fn, tx, axis_name="data", mesh=devices, donate=False
    )
    for _ in range(3):
      now, own, metrics = step(now, own, np.ones(N, np.float32))
    losses.append(float(metrics["loss"]))
  assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_orbax_restores_a_state(tmp_path):
  tx = coded(INJECTED, feedback="error")
  params, state, mesh = sharded(tx, TWO)
  step = gradcomp.make_train_step(
    loss_fn, tx, axis_name="data", mesh=mesh, donate=False
  )
  batch = np.arange(1, 1 + 2 * N, dtype=np.float32)
  params, state, _ = step(params, state, batch)
  _, new, _ = sharded(tx, params)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", new)
  assert_same_bits(restored, state)
  assert_same_bits(step(params, restored, batch)[:2], step(params, state, batch)[:2])


FLATTENED = optax.flatten(optax.adam(0.1))
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)
ONE_BIT = QSGD(bits=1, levels="uniform")
NEAREST = ["`params`", "to nearest", "2 bits or more"]
WRONG = {
  "no codec": (dict(grads=4), ["`grads` must be an instance of a codec, got 4"]),
  "sparse": (dict(grads=TopK(density=0.01)), ["`grads`", "sparse codec TopK"]),
  "sparse params": (dict(params=TopK(density=0.01)), ["`params`", "sparse codec"]),
  "rounds": (dict(grads=PowerSGD(rank=1)), ["`grads`", "in the place of a leaf"]),
  "far": (dict(params=ONE_BIT), NEAREST),
  "shared": (dict(params=Ternary()), ["`params`", "alone", "share_scale=False"]),
  "size": (dict(min_leaf_size=-1), ["`min_leaf_size`", "got -1"]),
  "message": (dict(message_bytes=-1), ["`message_bytes`", "got -1"]),
  "axis": (dict(axis_name=None), ["`axis_name` must be the name of an axis"]),
  "norm": (dict(inner=CLIPPED), ["`inner` must", "clip_by_local_norm"]),
  "flatten": (dict(inner=FLATTENED), ["`inner` must", "no optax.flatten"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_work_is_refused(case):
  options, words = WRONG[case]
  given = dict(grads=FOUR_BITS, params=FOUR_BITS, axis_name="data") | options
  with pytest.raises(
    TypeError if case == "no codec" else ValueError, match=says(*words)
  ):
    sharded(zero(given.pop("inner", ADAM), **given), {"w": TWO["w"]})


def test_a_state_that_does_not_fit_is_refused():
  params = {"w": TWO["w"]}
  tx = coded(ADAM)
  with pytest.raises(ValueError, match="nobody knows which Nth .* jax.set_mesh"):
    tx.init(params)
  params, state, mesh = sharded(tx, params)
  with pytest.raises(TypeError, match="`state` must be a gradcomp.state.ZeroState"):
    tx.update(params, (), params)
  with pytest.raises(ValueError, match="`params` must be given to update"):
    tx.update(params, state)
  _, other, _ = sharded(tx, {"w": np.ones((80, TILE), np.float32)})
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  with pytest.raises(ValueError, match=says("`state.unsent` must", "got", "20")):
    step(params, other, np.ones(N, np.float32))
