"""optimizers.adam: AdamW in the warm-up, and then the mean of compressed momenta."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp._src.optimizers.moments import Moments
from gradcomp._src.testing.modes import lowered
from gradcomp.codecs import QSGD, Dense, EightBit, OneBit, Policy, TopK
from gradcomp.optimizers import DoublingGaps, MomentsState, Stable, adam
from gradcomp.testing import check_transformation
from tests.plugins.slow_cases import slow
from tests.specs import adam as oracle
from tests.support import modes, saved
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.zero import N, gradients, last, train, tree

BUCKET = 32
ONE_BIT = OneBit(bucket_size=BUCKET)
LEAVES = {"w": (6, 50), "v": (300,), "one": ()}
MODES = ["vmap", "pmap", "shard_map", "shard_map_unchecked", "auto", "explicit"]


def onebit(warmup=2, codec=ONE_BIT, **options):
  given = {"axis_name": "data", "min_leaf_size": 10, "warmup": warmup, "floor": 0.0}
  given |= options
  return adam(0.1, codec=codec, **given)


def alone(codec, local):
  given = {"axis_name": "data", "min_leaf_size": 0, "warmup": 2, "local": local}
  return adam(0.1, codec=codec, **given)


def settled(tx):
  """The transformation behind its warm-up, with variances of one."""

  def init(params):
    moments, *rest = tx.init(params)
    nu = jax.tree.map(jnp.ones_like, moments.nu)
    one = jnp.ones([], jnp.int32)
    after = {"dense": -one, "updates": one, "later": one, "nu": nu}
    return (moments._replace(**after), *rest)

  return optax.GradientTransformationExtraArgs(init, tx.update)


@pytest.mark.parametrize(
  "codec, exchange",
  [
    (ONE_BIT, "two_shot"),
    *slow(
      (ONE_BIT, "all_gather"),
      (QSGD(bits=4, bucket_size=BUCKET), "two_shot"),
      (QSGD(bits=4, bucket_size=BUCKET), "ring"),
      (TopK(density=0.1), "all_gather"),
    ),
  ],
  ids=str,
)
def test_compressed_steps_keep_all_laws(codec, exchange):
  """The same bits of all workers, the bytes of explain, and NaN is seen."""
  tx = settled(onebit(codec=codec, exchange=exchange))
  check_transformation(tx, same_bits=False)


@pytest.mark.parametrize(
  "mode", ["shard_map", *slow(*(x for x in MODES if x != "shard_map"))]
)
def test_the_warm_up_is_adamw_of_the_mean(mode):
  """With a schedule and a mask: to the bit, but where XLA contracts sums otherwise."""
  rate = optax.linear_schedule(0.1, 0.0, 5)
  mask = {"w": True, "v": False, "one": False}
  mine = adam(rate, axis_name="data", warmup=9, weight_decay=0.1, mask=mask)
  theirs = optax.adamw(rate, weight_decay=0.1, mask=mask)
  theirs = optax.chain(gradcomp.dense(axis_name="data"), theirs)
  params, given = tree(0, LEAVES), gradients(4, LEAVES)
  held = (train(mode, tx, params, given) for tx in (mine, theirs))
  for (got, _), (expected, _) in zip(*held, strict=True):
    if mode in ("vmap", "pmap"):
      # Four steps, of some ten roundings each, of parameters below four.
      chex.assert_trees_all_close(got, expected, rtol=0, atol=40 * 2.0**-22)
    else:
      assert_same_bits(got, expected)


@pytest.mark.parametrize("name", ["frozen", *slow("doubling", "stable")])
def test_all_modes_have_the_same_moments(name):
  """And all workers the same parameters, in and after the warm-up, to the bit.

  In ``jax.vmap``, where both branches run, and under Explicit axes, where addends are
  sums of their own, XLA contracts products with sums otherwise.
  """
  warmup = Stable(ratio=0.5) if name == "stable" else 2
  variance = "doubling" if name == "doubling" else "frozen"
  tx = onebit(warmup, variance=variance, b2=0.5)
  params, given = tree(0, LEAVES), gradients(5, LEAVES)
  expected = list(train("pmap", tx, params, given))
  for mode in MODES:
    for (got, state), (_, kept) in zip(
      train(mode, tx, params, given), expected, strict=True
    ):
      moments, like = (x[0]._replace(exchange=()) for x in (state, kept))
      if mode in ("vmap", "explicit"):
        # Some roundings of moments below four, by at most 2**-23 each.
        chex.assert_trees_all_close(moments, like, rtol=0, atol=1e-6)
      else:
        assert_same_bits(moments, like)
      for leaf in jax.tree.leaves(got):
        assert_same_bits(leaf, np.stack([leaf[0]] * N))


def doubled(first, steps, each):
  """The steps that update the variance; gaps as of 0/1 Adam follow the warm-up."""
  found, step = [*range(first)], first - 1
  for number in range(steps):
    step += 2 ** (number // each)
    found.append(step)
  return [x for x in found if x < steps]


@pytest.mark.parametrize("floor", [0.0, 0.9])
@pytest.mark.parametrize("variance", ["frozen", "doubling"])
def test_it_is_that_of_the_paper(variance, floor):
  """And with a floor, which no paper has, by the same model."""
  shapes, steps = {"v": (8 * BUCKET,)}, 60 if variance == "doubling" else 12
  params, given = tree(0, shapes), gradients(steps, shapes)
  tx = onebit(3, variance=variance, b2=0.9, min_leaf_size=0, floor=floor)
  got = [np.asarray(x["v"][0]) for x, _ in train("vmap", tx, params, given)]
  dense = range(3) if variance == "frozen" else doubled(3, steps, 16)
  assert (30 in dense) == (31 not in dense) or variance == "frozen"
  given = [x["v"] for x in given]
  moments = oracle.moments(given, set(dense), b1=0.9, b2=0.9, bucket=BUCKET)
  options = dict(rate=0.1, dense=set(dense), floor=floor)
  expected = oracle.adam(params["v"], moments, **options)
  # Parameters stay below 16, and a step adds less than ten float32 roundings to each.
  np.testing.assert_allclose(got, expected, rtol=0, atol=steps * 10 * 2.0**-20)


@pytest.mark.parametrize("local", [None, 2])
def test_no_variance_is_so_small_that_a_step_is_a_leap(local):
  """Steps of Adam are about one rate; a bucket's noise over a small root is more."""
  shapes = {"v": (8 * BUCKET,)}
  scale = np.where(np.arange(8 * BUCKET) % 4 == 0, 1e-4, 1.0).astype(np.float32)
  given = [{"v": x["v"] * scale} for x in gradients(30, shapes)]

  def largest(**options):
    tx = onebit(4, local=local, min_leaf_size=0, **options)
    run = train("shard_map", tx, tree(0, shapes), given)
    moved = [np.asarray(x["v"][0]) for x, _ in run]
    return np.abs(np.diff(moved, axis=0)).max() / 0.1

  # A gap of two steps moves by both, and noise is about a root over the floor.
  assert largest(floor=0.1) < 2 * 2 / 0.1 < 1000 < largest()


def test_the_floor_of_a_leaf_in_shards_is_that_of_the_whole_leaf():
  """Shards have variances of different sizes, and no shard decides by itself."""
  options = dict(b1=0.9, b2=0.9, warmup=2, variance="frozen", floor=0.5)
  moments = Moments(compressed=None, axis_name=None, **options)
  nu = jnp.asarray(np.random.default_rng(0).uniform(size=(8, 6)) ** 6, jnp.float32)
  two, zero = jnp.int32(2), jnp.zeros([])
  state = MomentsState(two + 1, -two, two, two, zero, nu, nu, ())
  lifted = lambda nu: moments.variances(state._replace(nu=nu))
  cut = jax.sharding.PartitionSpec("data")
  mapped = jax.shard_map(lifted, mesh=modes.mesh(N), in_specs=cut, out_specs=cut)
  whole = lifted(nu)
  assert (whole > nu / (1 - 0.9**2)).sum() > 8
  # The mean is of 48 roots below one, in another order: some roundings of 2**-24.
  np.testing.assert_allclose(jax.jit(mapped)(nu), whole, rtol=0, atol=4 * 2.0**-24)


def test_the_warm_up_ends_once_the_variance_is_stable():
  """Of equal gradients the norm is 1 - b2**t, compared after every 1 / (1 - b2)."""
  tx = onebit(Stable(ratio=0.96), b2=0.75)
  given = [jax.tree.map(jnp.ones_like, x) for x in gradients(20, LEAVES)]
  ended = [int(s[0].dense[0]) < 0 for _, s in train("vmap", tx, tree(0, LEAVES), given)]
  norms = {step: 1 - 0.75**step for step in (4, 8, 12, 16, 20)}
  first = next(x for x in (8, 12, 16, 20) if norms[x - 4] >= 0.96 * norms[x])
  assert ended == [step >= first for step in range(1, 21)]
  later = onebit(Stable(ratio=0.5, least=17), b2=0.75)
  ended = [int(s[0].dense[0]) < 0 for _, s in train("vmap", later, given[0], given)]
  assert ended.index(True) == 20 - 1


LAW = {
  "bit": ONE_BIT,
  "eight": EightBit(bucket_size=BUCKET),
  "exact": Dense(),
  "levels": QSGD(bits=4, bucket_size=BUCKET),
}


@pytest.mark.parametrize("local", [None, 2])
def test_each_element_with_gradients_moves_and_no_other(local):
  """Also where the first one comes behind the warm-up, of some elements or a leaf.

  One bit has no zero: beside others, elements without a gradient get noise, whose sum
  stays, so that they move by some rates at most.
  """
  rng, count = np.random.default_rng(0), 8 * BUCKET
  kinds = np.arange(count) % 4  # 1: late, 2: never
  shapes = {f"{name}{part}": (count,) for name in LAW for part in ("", "-late")}
  means = {name: rng.uniform(0.2, 2.0, count) for name in shapes}
  given = []
  for step in range(32):
    noise = {name: 0.3 * rng.standard_normal((N, count)) for name in shapes}
    for name, x in noise.items():
      x += means[name]
      x[:, (kinds == 2) | ((step < 2) & ((kinds == 1) | name.endswith("late")))] = 0
    given.append({name: jnp.asarray(x, jnp.float32) for name, x in noise.items()})
  codec = Policy(rules=list(LAW.items()))
  tx, params = alone(codec, local), tree(0, shapes)
  got, _ = last("vmap", tx, params, given)
  for name in shapes:
    rates = np.abs(np.asarray(got[name][0] - params[name])) / 0.1
    # Gradients of one sign move an element by about a rate in each of 30 steps.
    assert np.median(rates[kinds == 1]) > 10 and rates[kinds != 2].min() > 0.1
    assert rates[kinds == 2].max() <= (12 if name.startswith("bit") else 0)


def test_elements_without_a_gradient_do_not_move():
  """Codecs without a zero keep whole buckets in place."""
  params, given = tree(0, LEAVES), gradients(5, LEAVES)
  dead = lambda x: x.at[:, BUCKET : 8 * BUCKET].set(0)
  given = [x | {"v": dead(x["v"])} for x in given]
  got, _ = last("vmap", onebit(), params, given)
  still = got["v"][0] == params["v"]
  assert still[BUCKET : 8 * BUCKET].all() and not still[:BUCKET].any()


def test_the_switch_of_phases_compiles_once():
  tx, params = onebit(axis_name=None), tree(0, LEAVES)
  chex.clear_trace_counter()
  update = jax.jit(chex.assert_max_traces(tx.update, n=1))
  state = tx.init(params)
  for gradient in gradients(4, LEAVES):
    own = jax.tree.map(lambda x: x[0], gradient)
    updates, state = update(own, state)
    params = optax.apply_updates(params, updates)
  assert update._cache_size() == 1


def test_bytes_are_those_of_the_codec_after_the_warm_up():
  """The program of both phases has both, and says that one of them counts."""
  params = {"w": jnp.ones((64, 1024))}
  tx = onebit(codec=OneBit(), min_leaf_size=None)
  coded = gradcomp.onebit_sgd(axis_name="data", exchange="two_shot")
  expected = gradcomp.explain(coded, params, workers=N).bytes_sent
  assert gradcomp.explain(tx, params, workers=N).bytes_sent == expected
  given = {"axis_name": "data", "workers": N}
  program = lowered(settled(tx), params, **given)
  assert gradcomp.wire_report(program).bytes_sent == expected
  # Buckets of 64 have two bits an element, with their means.
  assert expected == 64 * 1024 * 2 // 8 * 2 * (N - 1) // N


@pytest.mark.parametrize("mode", ["shard_map", *slow("pmap", "auto", "explicit")])
@pytest.mark.parametrize("after", [1, 3])
def test_a_checkpoint_goes_on_to_the_same_bits(mode, after, tmp_path):
  """Saved in the warm-up, and behind it with residuals."""
  given = gradients(5, LEAVES)
  saved.assert_goes_on(mode, onebit(), given, tmp_path, saved_after=after)


@pytest.mark.parametrize("new", [2, *slow(3, 8)])
def test_another_number_of_workers_goes_on(new):
  """All that workers share stays, and so do the sums of what was not sent."""
  tx, params, given = onebit(), tree(0, LEAVES), gradients(4, LEAVES)
  update, state = modes.mapped("auto", tx, N), None
  for gradient in given:
    _, state = update(gradient, state, params)
  options = {"axis_name": "data", "old_workers": N, "workers": new}
  moved = gradcomp.reshard_state(tx, params, state, **options)
  alike = lambda x: x[0]._replace(exchange=None)
  assert_same_bits(alike(moved), alike(state))
  of_all = lambda x, n: np.asarray(x).reshape(n, -1).sum(axis=0, dtype=np.float64)
  for name in LEAVES:
    before, after = (x[0].exchange.residual[name] for x in (state, moved))
    total = of_all(after, new)
    # Sums of some residuals below one, each rounded by at most 2**-24.
    np.testing.assert_allclose(total, of_all(before, N), rtol=0, atol=1e-6)
  shapes = gradcomp.checkpoint.state_shapes(tx, params, workers=new, axis_name="data")
  chex.assert_trees_all_equal_shapes_and_dtypes(moved, shapes)


def test_specs_stack_the_residuals_alone():
  P = jax.sharding.PartitionSpec
  params = {"w": jnp.ones((8, 64))}
  state = jax.eval_shape(onebit().init, params)
  whole = gradcomp.state_specs(state, axis_name="data")[0]
  assert whole.mu["w"] == whole.nu["w"] == P() == whole.dense
  assert whole.exchange.residual["w"] == P("data")
  cut = {"w": P(None, "model")}
  sharded = gradcomp.state_specs(state, axis_name="data", param_specs=cut)[0]
  assert sharded.mu["w"] == sharded.nu["w"] == P(None, "model")
  assert sharded.exchange.residual["w"] == P("data", "model")


def test_it_trains_any_tree_alone_or_masked():
  """Complex, bfloat16 and frozen leaves; of one worker, which sends nothing."""
  params = {
    "c": jnp.full((40,), 1 + 2j),
    "h": jnp.ones((40,), jnp.bfloat16),
    "none": None,
    "fixed": jnp.ones(4),
  }
  inner = adam(0.05, warmup=2, min_leaf_size=0, codec=QSGD(bits=8))
  tx = optax.masked(inner, {"c": True, "h": True, "none": None, "fixed": False})
  state = tx.init(params)
  moments = state.inner_state[0]
  assert moments.nu["c"].dtype == moments.mu["h"].dtype == jnp.float32

  @jax.jit
  def step(params, state):
    grads = jax.tree.map(lambda x: x.conj() - 3, params)
    updates, state = tx.update(grads, state, params)
    moved = jax.tree.map(jnp.add, params, updates)
    return moved | {"fixed": params["fixed"]}, state

  before = jax.tree.map(jnp.copy, params)
  for _ in range(200):
    params, state = step(params, state)
  chex.assert_trees_all_equal_shapes_and_dtypes(params, before)
  np.testing.assert_allclose(np.real(params["c"]), 3, atol=0.2)
  assert_same_bits(params["fixed"], before["fixed"])


@pytest.mark.slow
@pytest.mark.parametrize(
  "options", [{}, {"variance": "doubling", "local": DoublingGaps(every=100)}], ids=str
)
def test_it_learns_as_adam_where_a_compressed_gradient_does_not(options):
  """A least-squares problem of ill-scaled inputs, whose minimum is known."""
  rng = np.random.default_rng(0)
  scales = np.float32(10.0 ** rng.uniform(-1.5, 0.5, 256))
  inputs = jnp.asarray(rng.standard_normal((N, 64, 256)) * scales, jnp.float32)
  weights = jnp.asarray(rng.standard_normal(256), jnp.float32)

  def loss_after(tx, steps=600):
    def worker(inputs):
      grad = jax.grad(lambda w: jnp.mean((inputs @ (w - weights)) ** 2))

      def step(carry, _):
        params, state = carry
        gradient = grad(gradcomp.local.local_params(params, state))
        updates, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

      first = jnp.zeros(256)
      params = jax.lax.scan(step, (first, tx.init(first)), None, steps)[0][0]
      return jnp.mean((inputs @ (params - weights)) ** 2)

    return float(jnp.mean(jax.vmap(worker, axis_name="data")(inputs)))

  rate = optax.cosine_decay_schedule(0.03, 600)
  options = options | {"axis_name": "data", "min_leaf_size": 0}
  dense = loss_after(optax.chain(gradcomp.dense(axis_name="data"), optax.adam(rate)))
  front = gradcomp.onebit_sgd(64, axis_name="data", min_leaf_size=0)
  front = optax.chain(front, optax.adam(rate))
  mine = adam(rate, codec=OneBit(bucket_size=64), warmup=100, **options)
  assert loss_after(mine) < min(loss_after(front) / 2, 4 * dense)


@pytest.mark.parametrize(
  "options, parts",
  [
    ({"warmup": 0}, ("`warmup`", "1 or more", "0")),
    ({"variance": "thawed"}, ("`variance`", "frozen", "thawed")),
    ({"b2": 1.0}, ("`b2`", "below 1", "1.0")),
    ({"b1": -0.1}, ("`b1`", "at least 0", "-0.1")),
    ({"floor": 1}, ("`floor`", "below 1", "1")),
  ],
)
def test_bad_options_are_named(options, parts):
  with pytest.raises(ValueError, match=says(*parts)):
    adam(0.1, **options)


def test_a_bad_ratio_and_a_missing_axis_are_named():
  with pytest.raises(ValueError, match=says("`ratio`", "above 0", "2")):
    Stable(ratio=2)
  with pytest.raises(ValueError, match=says("`axis_name`", "must name the axis")):
    tx, given = adam(0.1, codec=Dense()), jax.ShapeDtypeStruct((2, 40), jnp.float32)
    P, mesh = jax.sharding.PartitionSpec("data"), modes.mesh(2)
    step = lambda x: tx.update(x, tx.init(x))[0]
    jax.eval_shape(jax.shard_map(step, mesh=mesh, in_specs=P, out_specs=P), given)


def test_citation_names_the_papers():
  text = gradcomp.citation(adam(0.1, axis_name="data", variance="doubling"))
  assert "2102.02888" in text and "2202.06009" in text
