"""The exchange: the mean of what was sent, the same bits everywhere, in every mode."""

import jax
import jax.numpy as jnp
import laws
import modes
import numpy as np
import oracle
import pytest
import wire_decoder

import gradcomp
from gradcomp.codecs import QSGD, Dense
from gradcomp.exchange import choose
from gradcomp.layout import plan

CODECS = [
  QSGD(bits=4, bucket_size=64),
  QSGD(bits=3, bucket_size=None, norm="l2", levels="uniform"),
  QSGD(bits=8, bucket_size=32, rounding="nearest"),
  Dense(dtype=jnp.bfloat16),
]


def gradients(workers, seed=0):
  """A large ragged leaf, a matrix, small leaves, a scalar and an empty leaf."""
  rng = np.random.default_rng(seed)
  shapes = {"a": (70, 71), "b": (37,), "c": (), "d": (0, 3), "w": (3, 3, 16, 8)}
  return {
    name: jnp.asarray(rng.standard_normal((workers, *shape)), jnp.float32)
    for name, shape in shapes.items()
  }


def assert_trees_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
@pytest.mark.parametrize("codec", CODECS, ids=laws.name)
@pytest.mark.parametrize("workers", [3, 8])
def test_same_bits_in_every_mode_and_on_every_worker(codec, exchange, workers):
  tx = gradcomp.compress(codec, axis_name="data", exchange=exchange, feedback="error")
  steps = [gradients(workers, seed) for seed in range(2)]
  expected, residual = modes.run("vmap", tx, steps)
  for output in expected:
    for leaf in jax.tree.leaves(output):
      np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
  for mode in modes.MODES:
    got, got_residual = modes.run(mode, tx, steps)
    assert_trees_equal(got, expected)
    assert_trees_equal(got_residual, residual)


def sent_rows(codec, tree, workers, exchange_keys):
  """Each worker's rows and values by the oracle alone, for the leaves of one codec."""
  layout = plan(jax.tree.map(lambda leaf: leaf[0], tree), codec)
  values = []
  for worker in range(workers):
    leaves = []
    for i, (leaf, slot) in enumerate(
      zip(jax.tree.leaves(tree), layout.slots, strict=True)
    ):
      x = np.asarray(leaf[worker])
      if layout.codecs[slot.group] != codec:
        leaves.append(x)
        continue
      hyper = dict(bits=codec.bits, bucket_size=codec.bucket_size)
      rows = oracle.qsgd_encode(
        x,
        key=exchange_keys(i, worker),
        norm=codec.norm,
        levels=codec.levels,
        rounding=codec.rounding,
        **hyper,
      )
      value = wire_decoder.decode_qsgd(rows, x.size, levels=codec.levels, **hyper)
      leaves.append(value.reshape(x.shape))
    values.append(leaves)
  return values


def documented_key(seed, step):
  def key(leaf, worker):
    fold = jax.random.fold_in
    folded = fold(fold(fold(jax.random.key(seed), step), leaf), worker)
    return np.asarray(jax.random.key_data(folded))

  return key


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_all_gather_is_the_mean_of_the_decoded_payloads(workers):
  codec = QSGD(bits=4, bucket_size=64)
  tree = gradients(workers)
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather", key=5)
  (output,), _ = modes.run("shard_map", tx, [tree])
  values = sent_rows(codec, tree, workers, documented_key(5, 0))
  for i, leaf in enumerate(jax.tree.leaves(output)):
    expected = oracle.exchange_all_gather(np.stack([value[i] for value in values]))
    np.testing.assert_array_equal(leaf[0], expected)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_two_shot_is_the_owners_encoding_of_the_mean(workers):
  """The whole arithmetic of the page, in NumPy, for one compressed leaf."""
  codec = QSGD(bits=4, bucket_size=64)
  x = np.stack(
    [laws.gaussian(5 * codec.tile_size + 9, seed) for seed in range(workers)]
  )
  tx = gradcomp.compress(codec, axis_name="data", exchange="two_shot", key=7)
  (output,), _ = modes.run("shard_map", tx, [{"w": jnp.asarray(x)}])
  key = documented_key(7, 0)
  hyper = dict(bits=4, bucket_size=64)
  rule = dict(norm="max", levels="sign_magnitude", rounding="stochastic", **hyper)
  decode = lambda rows: wire_decoder.decode_qsgd(
    rows, len(rows) * codec.tile_size, levels="sign_magnitude", **hyper
  ).reshape(len(rows), codec.tile_size)
  first = np.stack(
    [decode(oracle.qsgd_encode(x[i], key=key(0, i), **rule)) for i in range(workers)]
  )
  recode = lambda mean, owner: decode(
    oracle.qsgd_encode(mean.ravel(), key=key(1, owner), **rule)
  )
  expected = oracle.exchange_two_shot(first, recode).ravel()[: x.shape[1]]
  np.testing.assert_array_equal(output["w"][0], expected)


@pytest.mark.parametrize("exchange", ["psum", "all_gather", "two_shot"])
def test_dense_float32_is_the_plain_mean(exchange):
  workers = 4
  tree = gradients(workers)
  tx = gradcomp.compress(Dense(), axis_name="data", exchange=exchange)
  for mode in modes.MODES:
    (output,), residual = modes.run(mode, tx, [tree])
    assert residual is None
    for leaf, x in zip(jax.tree.leaves(output), jax.tree.leaves(tree), strict=True):
      # Three additions in another order: 3 half-ulps of the sum of magnitudes.
      bound = 2.0**-23 * np.abs(x).sum(axis=0)
      assert (np.abs(leaf[0] - np.mean(np.float64(x), axis=0)) <= bound).all()


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
@pytest.mark.parametrize("codec", CODECS, ids=laws.name)
def test_residuals_telescope(codec, exchange):
  """Per worker, all that was sent plus the residual is the sum of the gradients.

  With ``local`` the output is what was sent; with an exchange the residuals are the
  same, because they depend on the worker's own payload alone.
  """
  steps = [gradients(1, seed) for seed in range(20)]
  local = gradcomp.compress(codec, exchange="local", axis_name="data", feedback="error")
  outputs, residual = modes.run("vmap", local, steps)
  sent = jax.tree.map(lambda *xs: np.sum(np.float64(xs), axis=0), *outputs)
  given = jax.tree.map(lambda *xs: np.sum(np.float64(xs), axis=0), *steps)
  for s, r, g in zip(*map(jax.tree.leaves, (sent, residual, given)), strict=True):
    # Each step rounds g + e, and minus what was sent, to 2^-24 of what they are. One l2
    # norm a tensor at 3 bits makes them grow from step to step: feedback needs a codec
    # whose error is smaller than its input.
    size = max(np.abs(r).max(initial=0), 20)
    assert np.abs(s + np.asarray(r).reshape(s.shape) - g).max(initial=0) < size * 4e-6
  tx = gradcomp.compress(codec, axis_name="data", exchange=exchange, feedback="error")
  stacked = [jax.tree.map(lambda x: jnp.concatenate([x, x]), tree) for tree in steps]
  _, exchanged = modes.run("vmap", tx, stacked)
  assert_trees_equal(jax.tree.map(lambda r: r[:1], exchanged), residual)


def test_gathered_means_and_residuals_conserve_the_gradient():
  """N * sum of outputs + residuals = sum of all workers' gradients."""
  workers, codec = 4, QSGD(bits=2, bucket_size=64)
  steps = [gradients(workers, seed) for seed in range(10)]
  tx = gradcomp.compress(
    codec, axis_name="data", exchange="all_gather", feedback="error"
  )
  outputs, residual = modes.run("shard_map", tx, steps)
  out = jax.tree.map(lambda *xs: workers * np.sum(np.float64(xs), axis=0)[0], *outputs)
  given = jax.tree.map(lambda *xs: np.sum(np.float64(xs), axis=(0, 1)), *steps)
  for o, r, g in zip(*map(jax.tree.leaves, (out, residual, given)), strict=True):
    kept = np.asarray(r, np.float64).sum(axis=0).reshape(o.shape)
    # 10 steps, 4 workers, roundings below 2^-24 of about 30 each.
    assert np.abs(o + kept - g).max(initial=0) < 10 * 4 * 4e-6


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_gradients_reach_everyone_and_no_residual(bad, exchange):
  workers, codec = 4, QSGD(bits=4, bucket_size=64)
  clean = gradients(workers)
  dirty = {**clean, "a": clean["a"].at[2, 5, 7].set(bad)}
  tx = gradcomp.compress(codec, axis_name="data", exchange=exchange, feedback="error")
  for mode in ("shard_map", "vmap"):
    _, before = modes.run(mode, tx, [clean])
    outputs, after = modes.run(mode, tx, [clean, dirty])
    bucket = slice((5 * 71 + 7) // 64 * 64, (5 * 71 + 7) // 64 * 64 + 64)
    assert np.isnan(np.asarray(outputs[1]["a"]).reshape(workers, -1)[:, bucket]).all()
    kept = np.asarray(after["a"])[2].ravel()[bucket]
    np.testing.assert_array_equal(kept, np.asarray(before["a"])[2].ravel()[bucket])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    clean_leaves = {name: outputs[1][name] for name in ("b", "c", "w")}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean_leaves))


def test_sixty_four_emulated_workers():
  """Beyond the unrolled sum: the loop adds in the same order."""
  workers, codec = 64, QSGD(bits=8, bucket_size=64)
  x = np.stack([laws.gaussian(2100, seed) for seed in range(workers)])
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather", key=1)
  (output,), _ = modes.run("vmap", tx, [{"w": jnp.asarray(x)}])
  values = sent_rows(codec, {"w": x}, workers, documented_key(1, 0))
  expected = oracle.exchange_all_gather(np.stack([value[0] for value in values]))
  np.testing.assert_array_equal(output["w"][0], expected)


def test_auto_picks_by_facts_workers_and_bytes():
  small = plan({"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, QSGD(bits=4))
  large = plan({"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}, QSGD(bits=4))
  dense = plan({"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}, Dense())
  assert choose("auto", dense, 8) == "psum"
  assert choose("auto", large, 2) == "all_gather"
  assert choose("auto", large, 3) == "two_shot"
  assert choose("auto", small, 8) == "all_gather"
  assert choose("two_shot", small, 8) == "two_shot"


def test_rounding_differs_between_steps_workers_and_leaves():
  x = jnp.full((2, 4096), 0.3).at[:, ::512].set(1.0)
  tree = {"a": x, "b": x}
  tx = gradcomp.compress(QSGD(bits=4), axis_name="data", exchange="local")
  (first, second), _ = modes.run("shard_map_unchecked", tx, [tree, tree])
  draws = [
    np.asarray(t[name][i]) for t in (first, second) for name in "ab" for i in (0, 1)
  ]
  for i in range(len(draws)):
    for j in range(i):
      assert (draws[i] != draws[j]).mean() > 0.05
