"""optimizers.adam with local steps: workers move alone between two exchanges."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.codecs import Dense, TopK
from gradcomp.local import local_params
from gradcomp.optimizers import DoublingGaps
from tests.plugins.slow_cases import slow
from tests.specs.methods import adam as oracle
from tests.support.assertions import assert_same_bits
from tests.support.cases.adam import BUCKET, MODES, ONE_BIT, dense_steps, make, settled
from tests.support.cases.zero import N, gradients, sharded, train, tree

LEAVES = {"w": (6, 50), "one": ()}


def rounds_of(steps, warmup, gap, dense):
  """The steps behind which momenta are exchanged, by the rule of gaps in Python."""
  sent, synced = set(), warmup
  for step in range(warmup, steps):
    if step in dense:
      synced = step + 1
    elif step + 1 - synced >= gap(synced - warmup) or step + 1 in dense:
      sent.add(step)
      synced = step + 1
  return sent


CASES = {
  "exact": (Dense(), 3, "frozen", 12),
  "doubling": (ONE_BIT, DoublingGaps(every=5, most=4), "frozen", 24),
  "variance": (ONE_BIT, 2, "doubling", 75),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_that_of_the_paper(name):
  """At the parameters that each worker has, with a rate that falls, and decay."""
  codec, local, variance, steps = CASES[name]
  rate = optax.linear_schedule(0.1, 0.05, steps)
  exact = codec == Dense()
  how = {"variance": variance, "b2": 0.9, "min_leaf_size": 0, "weight_decay": 0.1}
  tx = make(local, codec, rate, warmup=3, **how)
  rng = np.random.default_rng(0)
  noise = np.float32(rng.standard_normal((steps, N, 2 * BUCKET)))
  start = np.float32(rng.standard_normal(2 * BUCKET))

  def worker(noise):
    def step(carry, noise):
      params, state = carry
      gradient = noise + 0.25 * local_params(params, state)
      updates, state = tx.update(gradient, state, params)
      params = optax.apply_updates(params, updates)
      return (params, state), (params, local_params(params, state))

    first = jnp.asarray(start)
    return jax.lax.scan(step, (first, tx.init(first)), noise)[1]

  mapped = jax.jit(jax.vmap(worker, in_axes=1, axis_name="data"))
  shared, own = mapped(jnp.asarray(noise))
  dense = set(range(3)) if variance == "frozen" else dense_steps(3, steps)
  lengths = (lambda t: min(4, 2 ** (t // 5))) if name == "doubling" else lambda t: local
  sent = rounds_of(steps, 3, lengths, dense)
  assert 0 < len(sent) < steps - len(dense)
  loss_at = lambda i, x: noise[i] + 0.25 * x
  rates = [*map(float, map(rate, range(steps)))]
  how = {"b1": 0.9, "b2": 0.9, "decay": 0.1, "bucket": None if exact else BUCKET}
  expected = oracle.zero_one(start, loss_at, rates, dense, sent, **how)
  all_of, each = map(np.stack, zip(*expected, strict=True))
  # Parameters stay below 16, and a step adds less than twenty roundings to each.
  close = {"rtol": 0, "atol": steps * 20 * 2.0**-20}
  np.testing.assert_allclose(shared[0], all_of, **close)
  np.testing.assert_allclose(np.swapaxes(own, 0, 1), each, **close)
  assert_same_bits(shared, np.stack([shared[0]] * N))


@pytest.mark.parametrize(
  "mode, variance", [("shard_map", "frozen"), *slow(("pmap", "doubling"))]
)
def test_with_gaps_of_one_step_it_is_one_bit_adam(mode, variance):
  how = {"weight_decay": 0.1, "variance": variance}
  params, given = tree(0, LEAVES), gradients(5, LEAVES)
  held = (train(mode, make(x, **how), params, given) for x in (None, 1))
  for (expected, _), (got, _) in zip(*held, strict=True):
    assert_same_bits(got, expected)


@pytest.mark.parametrize(
  "mode", ["shard_map", *slow(*(x for x in MODES if x != "shard_map"))]
)
def test_workers_meet_at_the_same_parameters(mode):
  """To the bit, in each mode; in local steps nothing that they share moves."""
  params, given = tree(0, LEAVES), gradients(8, LEAVES)
  before = jax.tree.map(lambda x: np.stack([x] * N), params)
  for step, (got, state) in enumerate(train(mode, make(3), params, given)):
    moved = state.own.moved["w"]
    met = step < 2 or step in (4, 7)
    assert (moved != 0).any() != met and (moved[0] != moved[1]).any() != met
    assert (got["w"] != before["w"]).any() == met
    for leaf in jax.tree.leaves(got):
      assert_same_bits(leaf, np.stack([leaf[0]] * N))
    before = got


def test_nothing_of_a_momentum_is_lost():
  """Means that were sent and residuals add up to the workers' mean momenta.

  With an equal rate, and an exchange without owners, whose residuals are elsewhere.
  """
  tx = settled(make(3, TopK(density=0.1), exchange="all_gather", min_leaf_size=0))
  shapes = {"v": (300,)}
  given = gradients(9, shapes)
  m, u, total, sent = np.zeros((N, 300)), 0.0, 0.0, 0.0
  held = train("vmap", tx, tree(0, shapes), given)
  for step, (gradient, (_, state)) in enumerate(zip(given, held, strict=True), 1):
    m = 0.9 * m + (1 - 0.9) * np.float64(gradient["v"])
    u = u + m
    if step % 3 == 0:
      m = np.float64(state.moments.mu["v"])
      total, sent, u = total + u.sum(axis=0) / 3, sent + N * m[0], 0.0
      kept = np.float64(state.moments.exchange.residual["v"]).sum(axis=0)
      # Sums of some float32 numbers below 4, each rounded by at most 2**-23.
      np.testing.assert_allclose(sent + kept, total, rtol=0, atol=1e-5)


def test_nothing_moves_without_a_rate_or_a_variance():
  """A gap of rates of zero keeps the last momentum, and is no division by zero.

  Without a variance, workers do not move alone: all do, by the first mean momentum.
  """
  rate = lambda count: jnp.where(count < 4, 0.0, 0.1)
  params, given = jax.device_get((tree(0, LEAVES), gradients(6, LEAVES)))
  live = np.arange(50) % 3 > 0
  given = [x | {"w": np.where(live, x["w"], 0)} for x in given[:4]] + given[4:]
  held = [*train("vmap", make(2, Dense(), rate), params, given)]
  for got, _ in held[:5]:
    assert_same_bits(got["w"], np.stack([params["w"]] * N))
  before, after = (held[i][1].own for i in (3, 4))
  assert_same_bits(before.moved["w"], np.zeros_like(before.moved["w"]))
  assert np.isfinite(before.inner_state["w"]).all()
  mean = 0.9 * held[1][1].moments.mu["w"][0]
  mean = 0.9 * (mean + 0.1 * given[2]["w"]) + 0.1 * given[3]["w"]
  # Some roundings of numbers below two.
  close = {"rtol": 0, "atol": 1e-6}
  kept = before.inner_state["w"][0][:, live]
  np.testing.assert_allclose(kept, mean.mean(axis=0)[:, live], **close)
  assert (after.moved["w"][..., ~live] == 0).all()
  assert (after.moved["w"][..., live] != 0).all()
  assert (held[5][0]["w"] != held[4][0]["w"]).all()
  # Both gradients of the gap are in the first momentum, with the weights of both.
  mean = (0.9 * given[4]["w"] + given[5]["w"]).mean(axis=0) / (1 + 0.9)
  root = np.sqrt(held[5][1].moments.nu["w"][0] / (1 - 0.999**2))
  # 0.999**2 is rounded to 2**-24, and what is left of 1 is 0.002.
  np.testing.assert_allclose(root[:, ~live], np.abs(mean)[:, ~live], rtol=1e-4)


def test_nothing_is_sent_outside_of_the_branches():
  """A program's bytes are its warm-up's, and explain counts that of one in H steps."""
  tx = make(DoublingGaps(every=10, most=8), min_leaf_size=None)
  params, state, mesh = sharded(tx, {"w": jnp.ones((64, 256))})
  loss_fn = lambda params, batch: jnp.mean((params["w"] - batch) ** 2)
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  program = gradcomp.wire_report(step.lower(params, state, jnp.ones(N)))
  assert program.collectives and all(x.in_branch for x in program.collectives)
  coded = gradcomp.onebit_sgd(BUCKET, axis_name="data", exchange="two_shot")
  each = gradcomp.explain(coded, params, workers=N).bytes_sent
  dense = gradcomp.explain(gradcomp.dense(axis_name="data"), params, workers=N)
  assert program.bytes_sent == dense.bytes_sent
  ratios = {frozenset((x, each / dense.bytes_sent)) for x in (0, 1)}
  assert {*map(frozenset, program.branch_ratios.values())} == ratios
  found = gradcomp.explain(tx, params, workers=N)
  assert found.bytes_sent == each and found.bytes_per_step == each / 8
