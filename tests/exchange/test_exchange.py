"""Every exchange gives all workers the same bits, in every mode, and loses nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp._src.codecs.sums.codes import sum_dtype
from gradcomp._src.exchange.auto import as_exchange
from gradcomp._src.exchange.layout import plan_rows
from gradcomp._src.exchange.plan import PlanOptions, plan_messages
from gradcomp._src.testing.conservation import nothing_is_lost
from gradcomp._src.testing.steps import same_bits_in_every_mode, workers_agree
from gradcomp.codecs import QSGD, Dense
from gradcomp.exchange import AllGather, AllReduce, Auto, TwoShot, choose
from tests.plugins.slow_cases import slow
from tests.specs import dithers, qsgd
from tests.specs import exchange as oracle_exchange
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.exchange import (
  CASES,
  IN_MODES,
  KINDS_OF_SUM,
  MORE_NUMBERS,
  NUMBERS,
  PLAIN,
  SHARED,
  case_name,
  gradients,
  plain_and_slow,
  small_gradients,
  transformation,
)


@pytest.mark.parametrize(
  "codec, exchange, workers",
  plain_and_slow(
    MORE_NUMBERS + [(*case, 3) for case in CASES],
    *((*case, 3) for case in PLAIN),
    *NUMBERS,
  ),
)
def test_nothing_is_lost_and_all_workers_have_the_same_bits(codec, exchange, workers):
  """Over two steps, so that residuals are used.

  N times the outputs, the residuals, and N times the residuals of the second stage, are
  together the sum of all gradients. Codecs take their references, which run here in any
  case; in the next test they choose.
  """
  tx = transformation(laws.here(codec), exchange, workers, feedback="error")
  steps = [small_gradients(workers, seed) for seed in range(2)]
  sent = plan_messages(
    [leaf[0] for leaf in jax.tree.leaves(steps[0])],
    [()] * len(steps[0]),
    [()] * len(steps[0]),
    PlanOptions(codec, as_exchange(exchange), feedback=True),
    axis_name="data",
    workers=workers,
  )
  workers_agree(tx, steps)
  nothing_is_lost(tx, steps, plan=sent)
  _, _, owned = modes.run_all("vmap", tx, steps)
  again = codec.agree(jnp.ones(3)) is None and not codec.facts.own_units
  twice = exchange in ("two_shot", "hierarchical") and again
  assert bool(owned) == twice


EVERY_MODE = tuple(mode for mode in modes.modes_for(4) if mode != "vmap")


def placed(case, workers, *places, mark=()):
  """A case that is compared in some places with emulated workers."""
  where = "+".join(places) if len(places) < len(EVERY_MODE) else "everywhere"
  name = "-".join(map(case_name, (*case, workers, where)))
  return pytest.param(*case, workers, places, id=name, marks=mark)


@pytest.mark.parametrize(
  "codec, exchange, workers, places",
  [
    placed(KINDS_OF_SUM[0], 4, *EVERY_MODE, mark=pytest.mark.bits),
    *(
      placed(case, 4, "shard_map", modes.EXPLICIT, mark=pytest.mark.bits)
      for case in KINDS_OF_SUM[1:]
    ),
    # A third is no binary fraction: an optimizer may round products with it elsewhere.
    placed(CASES[2], 3, "shard_map", mark=pytest.mark.bits),
    *(placed(case, 4, mode) for case, mode in IN_MODES),
    *(
      placed(case, 4, *EVERY_MODE, mark=pytest.mark.slow)
      for case in CASES
      if case != KINDS_OF_SUM[0]
    ),
    *(
      placed(case, 3, *modes.modes_for(3), mark=pytest.mark.slow)
      for case in CASES[:4] + CASES[16:19]
    ),
  ],
)
def test_every_mode_has_the_same_bits(codec, exchange, workers, places):
  """Outputs and all that is kept, over two steps, on every worker."""
  tx = transformation(codec, exchange, workers, feedback="error")
  steps = [small_gradients(workers, seed) for seed in range(2)]
  same_bits_in_every_mode(tx, steps, places)


def sent_values(codec, tree, workers, seed):
  """Each worker's values by the oracle alone, in the first step."""
  layout = plan_rows([leaf[0] for leaf in jax.tree.leaves(tree)], codec)
  values = []
  for worker in range(workers):
    leaves = []
    paths = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), slot in zip(paths, layout.slots, strict=True):
      x = np.asarray(leaf[worker])
      if layout.codecs[slot.group] != codec:
        leaves.append(x)
        continue
      hyper = dict(bits=codec.bits, bucket_size=codec.bucket_size)
      rows = qsgd.encode(
        x,
        key=dithers.leaf_dither(seed, 0, jax.tree_util.keystr(path), worker),
        norm=codec.norm,
        levels=codec.levels,
        rounding=codec.rounding,
        **hyper,
      )
      value = qsgd.decode(rows, x.size, levels=codec.levels, **hyper)
      leaves.append(value.reshape(x.shape))
    values.append(leaves)
  return values


@pytest.mark.parametrize("workers", [8, *slow(1, 2)])
def test_all_gather_is_the_mean_of_the_decoded_payloads(workers):
  codec = QSGD(bits=4, bucket_size=64)
  tree = gradients(workers)
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather", key=5)
  (output,), _ = modes.run("shard_map", tx, [tree])
  values = sent_values(codec, tree, workers, seed=5)
  for i, leaf in enumerate(jax.tree.leaves(output)):
    expected = oracle_exchange.all_gather(np.stack([value[i] for value in values]))
    np.testing.assert_array_equal(leaf[0], expected)


@pytest.mark.parametrize("workers", [3, *slow(1, 8)])
@pytest.mark.parametrize("keeps", [True, False])
def test_two_shot_is_the_owners_encoding_of_the_mean(keeps, workers):
  """The whole arithmetic of the page, in NumPy, for one compressed leaf.

  Owners who keep nothing round by bits of their own. Others round to nearest.
  """
  codec = QSGD(bits=4, bucket_size=64)
  x = np.stack(
    [laws.gaussian(5 * codec.tile_size + 9, seed) for seed in range(workers)]
  )
  exchange = TwoShot(feedback=keeps)
  tx = gradcomp.compress(codec, axis_name="data", exchange=exchange, key=7)
  (output,), _ = modes.run("shard_map", tx, [{"w": jnp.asarray(x)}])
  hyper = dict(bits=4, bucket_size=64)
  rule = dict(norm="max", levels="sign_magnitude", **hyper)
  random, nearest = dict(rule, rounding="stochastic"), dict(rule, rounding="nearest")
  decode = lambda rows: qsgd.decode(
    rows, len(rows) * codec.tile_size, levels="sign_magnitude", **hyper
  ).reshape(len(rows), codec.tile_size)
  key = functools.partial(dithers.leaf_key, 7, 0)
  dither = functools.partial(dithers.leaf_dither, 7, 0)
  first = np.stack(
    [
      decode(qsgd.encode(x[i], key=dither("['w']", i), **random))
      for i in range(workers)
    ]
  )
  recode = lambda mean, owner: decode(
    qsgd.encode(mean.ravel(), **nearest)
    if keeps
    else qsgd.encode(mean.ravel(), key=key("['w']\n", owner), **random)
  )
  expected = oracle_exchange.two_shot(first, recode).ravel()[: x.shape[1]]
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


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot", "ring", "hierarchical"])
@pytest.mark.parametrize("bad", [np.nan, *slow(np.inf)])
def test_non_finite_gradients_reach_everyone_and_no_residual(exchange, bad):
  """The bucket is NaN on every worker, and what any worker kept of it stays."""
  workers, codec = 4, QSGD(bits=4, bucket_size=32)
  clean = small_gradients(workers)
  dirty = {**clean, "a": clean["a"].at[2, 5, 7].set(bad)}
  tx = transformation(codec, exchange, workers, feedback="error")
  _, before, owned = modes.run_all("shard_map", tx, [clean])
  outputs, after, owned_after = modes.run_all("shard_map", tx, [clean, dirty])
  start = (5 * 70 + 7) // 32 * 32
  output = np.asarray(outputs[1]["a"]).reshape(workers, -1)
  assert np.isnan(output[:, start : start + 32]).all()
  assert np.isfinite(np.delete(output, slice(start, start + 32), axis=1)).all()
  assert np.isfinite(outputs[1]["b"]).all()
  kept, old = (np.asarray(x["a"]).reshape(workers, -1) for x in (after, before))
  np.testing.assert_array_equal(kept[:, start : start + 32], old[:, start : start + 32])
  assert (kept != old).any()
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((after, owned_after)))
  if owned:  # 32 elements of a row of an owner
    ours, theirs = (np.asarray(x[("data",)][0]) for x in (owned_after, owned))
    assert (ours != theirs).any() and (ours == theirs).sum() >= 32


@pytest.mark.parametrize(
  "exchange", ["two_shot", *slow("ring", "all_gather", "hierarchical")]
)
def test_guards_after_the_exchange_skip_the_step(exchange):
  """A NaN of one worker changes neither parameters nor momentum of any."""
  workers, codec = 4, QSGD(bits=4, bucket_size=32)
  sgd = optax.sgd(0.5, momentum=0.5)
  optimizer = optax.chain(
    transformation(codec, exchange, workers, feedback="error"),
    optax.apply_if_finite(sgd, 5),
  )
  clean = small_gradients(workers)
  dirty = {**clean, "a": clean["a"].at[1, 0, 0].set(np.nan)}

  @functools.partial(jax.vmap, axis_name="data")
  def train(clean, dirty):
    state = optimizer.init(clean)
    _, state = optimizer.update(clean, state)
    updates, after = optimizer.update(dirty, state)
    return updates, state[1].inner_state, after

  updates, momentum, (sent, guard) = jax.jit(train)(clean, dirty)
  assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))
  assert_same_bits(guard.inner_state, momentum)
  assert (guard.notfinite_count == 1).all()
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sent.residual))


@pytest.mark.parametrize("codec", [SHARED[0], *slow(SHARED[1])], ids=laws.name)
@pytest.mark.parametrize("workers", [2, *slow(4)])
def test_sums_of_shared_codes_are_exact(codec, workers):
  """So all exchanges agree, bit for bit: none rounds but the first encoding."""
  steps = [small_gradients(workers, seed) for seed in range(2)]
  results = [
    modes.run("vmap", transformation(codec, exchange, workers, key=3), steps)
    for exchange in ("all_gather", "two_shot", "psum", "auto")
  ]
  for result in results[1:]:
    assert_same_bits(result, results[0])


@pytest.mark.parametrize("workers, dtype", [(18, "s8"), (19, "s16")])
def test_sums_at_the_edge_of_an_integer(workers, dtype):
  """18 workers at the top level of 7 make 126; 19 would be 133 and wrap around."""
  codec = QSGD(bits=4, bucket_size=32, share_scale=True, rounding="nearest")
  assert sum_dtype(codec, workers) == {"s8": jnp.int8, "s16": jnp.int16}[dtype]
  extremes = np.where(np.arange(512) % 2, 3.0, -3.0).astype(np.float32)
  grads = {"w": jnp.asarray(np.broadcast_to(extremes, (workers, 512)))}
  tx = transformation(codec, "psum", workers)
  (output,), _ = modes.run("vmap", tx, [grads])
  # 19 * 3 * (1/19) is one rounding away from 3.
  np.testing.assert_allclose(output["w"][0], extremes, rtol=2.0**-23)


def test_sixty_four_emulated_workers():
  """Beyond the unrolled sum: the loop adds in the same order."""
  workers, codec = 64, QSGD(bits=8, bucket_size=64)
  x = np.stack([laws.gaussian(2100, seed) for seed in range(workers)])
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather", key=1)
  (output,), _ = modes.run("vmap", tx, [{"w": jnp.asarray(x)}])
  values = sent_values(codec, {"w": x}, workers, seed=1)
  expected = oracle_exchange.all_gather(np.stack([value[0] for value in values]))
  np.testing.assert_array_equal(output["w"][0], expected)


def test_auto_picks_by_facts_workers_and_bytes():
  small = plan_rows([jax.ShapeDtypeStruct((64, 64), jnp.float32)], QSGD(bits=4))
  large = plan_rows([jax.ShapeDtypeStruct((1024, 1024), jnp.float32)], QSGD(bits=4))
  dense = plan_rows([jax.ShapeDtypeStruct((1024, 1024), jnp.float32)], Dense())
  assert choose(Auto(), dense, 8).exchange == AllReduce()
  assert choose(Auto(), large, 2).exchange == AllGather()
  assert choose(Auto(), large, 3).exchange == TwoShot()
  assert choose(Auto(), small, 8).exchange == AllGather()
  assert choose(TwoShot(), small, 8) == (TwoShot(), "asked for")


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


def test_a_cpu_writes_rows_down_before_it_decodes_them():
  """Else XLA fuses encoding into decoding, and a word is encoded for each element.

  The mean is written down, too, and so are the indices of keys.
  """
  tx = gradcomp.qsgd(bits=4)
  like = jax.ShapeDtypeStruct((2**18,), jnp.float32)
  state = jax.eval_shape(tx.init, like)
  text = jax.jit(tx.update).lower(like, state).compile().as_text()
  assert text.count(" conditional(") == 3
