"""optimizers.adam with local steps: workers move alone between two exchanges."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.codecs import Dense, OneBit, TopK
from gradcomp.local import local_params
from gradcomp.optimizers import DoublingGaps, adam
from gradcomp.testing import check_transformation
from tests.plugins.slow_cases import slow
from tests.specs import adam as oracle
from tests.support import modes, saved
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.zero import N, gradients, sharded, train, tree

BUCKET = 32
ONE_BIT = OneBit(bucket_size=BUCKET)
LEAVES = {"w": (6, 50), "one": ()}
MODES = ["pmap", "vmap", "shard_map", "shard_map_unchecked", "auto", "explicit"]


def alone(local=3, codec=ONE_BIT, rate=0.1, **options):
  given = {
    "axis_name": "data",
    "min_leaf_size": 10,
    "warmup": 2,
    "floor": 0.0,
  } | options
  return adam(rate, codec=codec, local=local, **given)


def settled(tx, done=0):
  """The transformation behind its warm-up and local steps, with variances of one."""

  def init(params):
    state = tx.init(params)
    nu = jax.tree.map(jnp.ones_like, state.moments.nu)
    one = jnp.ones([], jnp.int32)
    after = {"count": one + done, "dense": -one, "updates": one, "later": one, "nu": nu}
    return state._replace(moments=state.moments._replace(**after), synced=one)

  return optax.GradientTransformationExtraArgs(init, tx.update)


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


def doubled(first, steps):
  """The steps that update the variance: gaps of 1 for 16 of them, then of 2."""
  found, step = [*range(first)], first - 1
  for number in range(steps):
    step += 2 ** (number // 16)
    found.append(step)
  return {x for x in found if x < steps}


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
  how = {"variance": variance, "b2": 0.9, "min_leaf_size": 0, "weight_decay": 0.1}
  tx = alone(local, codec, rate, warmup=3, **how)
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
  dense = set(range(3)) if variance == "frozen" else doubled(3, steps)
  lengths = (lambda t: min(4, 2 ** (t // 5))) if name == "doubling" else lambda t: local
  sent = rounds_of(steps, 3, lengths, dense)
  assert 0 < len(sent) < steps - len(dense)
  expected = oracle.zero_one(
    start,
    lambda i, x: noise[i] + 0.25 * x,
    [float(rate(i)) for i in range(steps)],
    dense,
    sent,
    b1=0.9,
    b2=0.9,
    decay=0.1,
    bucket=None if codec == Dense() else BUCKET,
  )
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
  held = (train(mode, alone(x, **how), params, given) for x in (None, 1))
  for (expected, _), (got, _) in zip(*held, strict=True):
    assert_same_bits(got, expected)


@pytest.mark.parametrize(
  "mode", ["shard_map", *slow(*(x for x in MODES if x != "shard_map"))]
)
def test_workers_meet_at_the_same_parameters(mode):
  """To the bit, in each mode; in local steps nothing that they share moves."""
  params, given = tree(0, LEAVES), gradients(8, LEAVES)
  before = jax.tree.map(lambda x: np.stack([x] * N), params)
  for step, (got, state) in enumerate(train(mode, alone(), params, given)):
    moved = state.own.moved["w"]
    met = step < 2 or step in (4, 7)
    assert (moved != 0).any() != met and (moved[0] != moved[1]).any() != met
    assert (got["w"] != before["w"]).any() == met
    for leaf in jax.tree.leaves(got):
      assert_same_bits(leaf, np.stack([leaf[0]] * N))
    before = got


@pytest.mark.slow
def test_all_modes_have_the_same_moments():
  """But for sums that XLA contracts otherwise in ``jax.vmap`` and Explicit axes."""
  params, given = tree(0, LEAVES), gradients(8, LEAVES)
  expected = list(train("pmap", alone(), params, given))
  for mode in MODES[1:]:
    for (got, state), (like, kept) in zip(
      train(mode, alone(), params, given), expected, strict=True
    ):
      given_, held = ((x, y.own, y.moments.mu) for x, y in ((got, state), (like, kept)))
      # Some roundings of numbers below four, by at most 2**-23 each, in eight steps.
      chex.assert_trees_all_close(given_, held, rtol=0, atol=8e-6)


def test_nothing_of_a_momentum_is_lost():
  """Means that were sent and residuals add up to the workers' mean momenta.

  With an equal rate, and an exchange without owners, whose residuals are elsewhere.
  """
  tx = settled(alone(3, TopK(density=0.1), exchange="all_gather", min_leaf_size=0))
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
  params, given = tree(0, LEAVES), gradients(6, LEAVES)
  dead = lambda x: x.at[:, :, ::3].set(0)
  given = [x | {"w": dead(x["w"])} for x in given[:4]] + given[4:]
  held = [*train("vmap", alone(2, Dense(), rate), params, given)]
  for got, _ in held[:5]:
    assert_same_bits(got["w"], np.stack([params["w"]] * N))
  before, after = (held[i][1].own for i in (3, 4))
  assert_same_bits(before.moved["w"], np.zeros_like(before.moved["w"]))
  assert np.isfinite(before.inner_state["w"]).all()
  mean = 0.9 * held[1][1].moments.mu["w"][0]
  mean = 0.9 * (mean + 0.1 * given[2]["w"]) + 0.1 * given[3]["w"]
  live = np.arange(50) % 3 > 0
  # Some roundings of numbers below two.
  close = {"rtol": 0, "atol": 1e-6}
  kept = before.inner_state["w"][0][:, live]
  np.testing.assert_allclose(kept, mean.mean(axis=0)[:, live], **close)
  assert (after.moved["w"][..., ~live] == 0).all()
  assert (after.moved["w"][..., live] != 0).all()
  assert (held[5][0]["w"] != held[4][0]["w"]).all()
  # Both gradients of the gap are in the first momentum, with the weights of both.
  mean = (0.9 * given[4]["w"] + given[5]["w"]).mean(axis=0) / (1 + 0.9)
  root = jnp.sqrt(held[5][1].moments.nu["w"][0] / (1 - 0.999**2))
  # 0.999**2 is rounded to 2**-24, and what is left of 1 is 0.002.
  np.testing.assert_allclose(root[:, ~live], np.abs(mean)[:, ~live], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("local", [1, 3])
def test_it_keeps_all_laws(local):
  """The same bits of all workers, the bytes of explain, and NaN is seen.

  The first step is the last of a gap: XLA removes branches that it knows are not taken.
  """
  tx = settled(alone(local), done=local - 1)
  check_transformation(tx, same_bits=False, steps=local + 1)


def test_nothing_is_sent_outside_of_the_branches():
  """A program's bytes are its warm-up's, and explain counts that of one in H steps."""
  tx = alone(DoublingGaps(every=10, most=8), min_leaf_size=None)
  params, state, mesh = sharded(tx, {"w": jnp.ones((64, 256))})
  loss_fn = lambda params, batch: jnp.mean((params["w"] - batch) ** 2)
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  program = gradcomp.wire_report(step.lower(params, state, jnp.ones(N)))
  assert program.collectives and all(x.in_branch for x in program.collectives)
  coded = gradcomp.onebit_sgd(BUCKET, axis_name="data", exchange="two_shot")
  each = gradcomp.explain(coded, params, workers=N).bytes_sent
  dense = gradcomp.explain(gradcomp.dense(axis_name="data"), params, workers=N)
  assert program.bytes_sent == dense.bytes_sent
  coded = each / dense.bytes_sent
  assert {*map(frozenset, program.branch_ratios.values())} == {
    frozenset((1, coded)),
    frozenset((0, coded)),
  }
  found = gradcomp.explain(tx, params, workers=N)
  assert found.bytes_sent == each and found.bytes_per_step == each / 8


@pytest.mark.parametrize("mode", ["shard_map", *slow("pmap", "auto", "explicit")])
def test_a_checkpoint_in_a_gap_goes_on_to_the_same_bits(mode, tmp_path):
  given = gradients(7, LEAVES)
  saved.assert_goes_on(mode, alone(), given, tmp_path, saved_after=4)


def test_another_number_of_workers_goes_on_behind_an_exchange():
  tx, params, given = alone(), tree(0, LEAVES), gradients(6, LEAVES)
  update, state = modes.mapped("auto", tx, N), None
  how = {"axis_name": "data", "old_workers": N, "workers": 2}
  for step, gradient in enumerate(given):
    _, state = update(gradient, state, params)
    if step == 4:
      moved = gradcomp.reshard_state(tx, params, state, **how)
      mu = np.asarray(state.moments.mu["w"])
      assert_same_bits(np.asarray(moved.own.inner_state["w"]), np.concatenate([mu] * 2))
      assert int(moved.synced) == 5
      shapes = gradcomp.checkpoint.state_shapes(tx, params, workers=2, axis_name="data")
      chex.assert_trees_all_equal_shapes_and_dtypes(moved, shapes)
  with pytest.raises(ValueError, match="must be that behind an exchange"):
    gradcomp.reshard_state(tx, params, state, **how)


def test_specs_stack_all_that_differs():
  P = jax.sharding.PartitionSpec
  tx, params = alone(), {"w": jnp.ones((8, 64))}
  with jax.set_mesh(modes.mesh(N)):
    state = tx.init(params)
  for cut, own, shared in (
    (None, P("data"), P()),
    (
      {"w": P(None, "model")},
      P("data", "model"),
      P(None, "model"),
    ),
  ):
    specs = gradcomp.state_specs(state, axis_name="data", param_specs=cut)
    assert specs.own.moved["w"] == specs.own.inner_state["w"] == own
    assert specs.moments.mu["w"] == specs.moments.nu["w"] == shared
    assert specs.moments.exchange.residual["w"] == own
    assert specs.synced == specs.rate == P()


def test_a_train_step_takes_gradients_where_each_worker_is():
  tx = alone(3, Dense(), optax.exponential_decay(0.1, 20, 0.5))
  params, state, mesh = sharded(tx, {"w": jnp.zeros(40)})
  loss_fn = lambda params, batch: jnp.mean((params["w"] - batch) ** 2)
  step = gradcomp.make_train_step(
    loss_fn, tx, axis_name="data", mesh=mesh, donate=False
  )
  batch = jnp.arange(1.0, N + 1)
  for _ in range(7):
    own = params["w"] + np.asarray(state.own.moved["w"]).reshape(N, 40)
    params, state, metrics = step(params, state, batch)
    # Some roundings of numbers below 16.
    expected = np.mean((own - batch[:, None]) ** 2, axis=1)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
  assert (0.2 < params["w"]).all() and step._cache_size() == 1


@pytest.mark.slow
def test_bfloat16_and_complex_leaves_move():
  tx = alone(2, Dense(), rate=0.1)
  params = {"c": jnp.full((3,), 1 + 2j), "h": jnp.ones((3,), jnp.bfloat16), "no": None}

  def worker(params):
    def step(carry, _):
      params, state = carry
      updates, state = tx.update(local_params(params, state), state, params)
      return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), None, 4)[0][0]

  stacked = jax.tree.map(lambda x: jnp.stack([x] * 2), params)
  got = jax.jit(jax.vmap(worker, axis_name="data"))(stacked)
  chex.assert_trees_all_equal_shapes_and_dtypes(got, stacked)
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(stacked), strict=True):
    assert (jnp.abs(x) < jnp.abs(y)).all()


def test_bad_options_are_named():
  with pytest.raises(ValueError, match=says("`local`", "1 or more", "0")):
    alone(0)
  with pytest.raises(ValueError, match=says("`every`", "1 or more", "0")):
    DoublingGaps(every=0)
  with pytest.raises(ValueError, match=says("`most`", "1 or more", "0")):
    DoublingGaps(most=0)
  with pytest.raises(ValueError, match=says("`axis_name`", "`local`", "None")):
    alone(axis_name=None)
  with pytest.raises(ValueError, match=says("`axis_name`", "set_mesh")):
    alone().init({"w": jnp.ones(300)})
