"""What momenta that are exchanged keep to, in each step and in gaps of local steps."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.optimizers.moments import Moments, MomentsState
from gradcomp.codecs import QSGD, Dense, EightBit, Policy, TopK
from gradcomp.optimizers import Stable
from gradcomp.testing import check_transformation
from tests.plugins.slow_cases import slow
from tests.support import modes, saved
from tests.support.assertions import assert_same_bits
from tests.support.cases import adam as cases
from tests.support.cases.adam import BUCKET, LEAVES, ONE_BIT, make, moments_of
from tests.support.cases.zero import N, gradients, last, train, tree

FOUR_BITS = QSGD(bits=4, bucket_size=BUCKET)


@pytest.mark.parametrize(
  "codec, exchange, local",
  [
    (ONE_BIT, "two_shot", None),
    *slow((ONE_BIT, "all_gather", None), (FOUR_BITS, "ring", None)),
    *slow((TopK(density=0.1), "all_gather", None), (ONE_BIT, "two_shot", 3)),
  ],
  ids=str,
)
def test_compressed_steps_keep_all_laws(codec, exchange, local):
  """The same bits of all workers, the bytes of explain, and NaN is seen.

  The first step is the last of a gap: XLA removes branches that it knows are not taken.
  """
  gap = local or 1
  tx = cases.settled(make(local, codec, exchange=exchange), done=gap - 1)
  check_transformation(tx, same_bits=False, **({"steps": gap + 1} if local else {}))


KINDS = {
  "frozen": dict(b2=0.5),
  "doubling": dict(b2=0.5, variance="doubling"),
  "stable": dict(b2=0.5, warmup=Stable(ratio=0.5)),
  "local": dict(local=3),
}


@pytest.mark.parametrize("name", ["frozen", *slow("doubling", "stable", "local")])
def test_all_modes_have_the_same_moments(name):
  """And all workers the same parameters, in and after the warm-up, to the bit.

  In ``jax.vmap``, where both branches run, and under Explicit axes, where addends are
  sums of their own, XLA contracts products with sums otherwise; in local steps in
  other modes, too.
  """
  tx, local = make(**KINDS[name]), name == "local"
  params, given = tree(0, LEAVES), gradients(8 if local else 5, LEAVES)
  moments = lambda state: moments_of(state)._replace(exchange=())
  own = lambda state: (moments(state), state.own) if local else moments(state)
  expected = list(train("pmap", tx, params, given))
  for mode in cases.MODES:
    for found, like in zip(train(mode, tx, params, given), expected, strict=True):
      if local or mode in ("vmap", "explicit"):
        # Some roundings of moments below four, by at most 2**-23 each, a step.
        close = {"rtol": 0, "atol": 8e-6 if local else 1e-6}
        chex.assert_trees_all_close(own(found[1]), own(like[1]), **close)
      else:
        assert_same_bits(own(found[1]), own(like[1]))
      for leaf in jax.tree.leaves(found[0]):
        assert_same_bits(leaf, np.stack([leaf[0]] * N))


@pytest.mark.parametrize("local", [None, 2])
def test_no_variance_is_so_small_that_a_step_is_a_leap(local):
  """Steps of Adam are about one rate; a bucket's noise over a small root is more."""
  shapes = {"v": (8 * BUCKET,)}
  scale = np.where(np.arange(8 * BUCKET) % 4 == 0, 1e-4, 1.0).astype(np.float32)
  given = [{"v": np.asarray(x["v"]) * scale} for x in gradients(30, shapes)]

  def largest(floor):
    tx = make(local, warmup=4, min_leaf_size=0, floor=floor)
    run = train("shard_map", tx, tree(0, shapes), given)
    moved = [np.asarray(x["v"][0]) for x, _ in run]
    return np.abs(np.diff(moved, axis=0)).max() / 0.1

  # A gap of two steps moves by both, and noise is about a root over the floor.
  assert largest(0.1) < 2 * 2 / 0.1 < 1000 < largest(0.0)


def test_the_floor_of_a_leaf_in_shards_is_that_of_the_whole_leaf():
  """Shards have variances of different sizes, and no shard decides by itself."""
  options = dict(b1=0.9, b2=0.9, warmup=2, variance="frozen", floor=0.5)
  moments = Moments(compressed=None, axis_name=None, eps=0.0, **options)
  nu = jnp.asarray(np.random.default_rng(0).uniform(size=(8, 6)) ** 6, jnp.float32)
  two, zero = jnp.int32(2), jnp.zeros([])
  state = MomentsState(two + 1, -two, two, two, zero, nu, nu, ())
  lifted = lambda nu: moments.variances(state._replace(nu=nu))
  cut = P("data")
  mapped = jax.shard_map(lifted, mesh=modes.mesh(N), in_specs=cut, out_specs=cut)
  whole = np.asarray(jax.jit(lifted)(nu))
  assert (whole > np.asarray(nu) / (1 - 0.9**2)).sum() > 8
  # The mean is of 48 roots below one, in another order: some roundings of 2**-24.
  np.testing.assert_allclose(jax.jit(mapped)(nu), whole, rtol=0, atol=4 * 2.0**-24)


def test_the_warm_up_ends_once_the_variance_is_stable():
  """Of equal gradients the norm is 1 - b2**t, compared after every 1 / (1 - b2)."""
  given = [jax.tree.map(np.ones_like, x) for x in gradients(20, LEAVES)]

  def ended(rule):
    run = train("vmap", make(warmup=rule, b2=0.75), tree(0, LEAVES), given)
    return [int(state[0].dense[0]) < 0 for _, state in run]

  norms = {step: 1 - 0.75**step for step in (4, 8, 12, 16, 20)}
  first = next(x for x in (8, 12, 16, 20) if norms[x - 4] >= 0.96 * norms[x])
  assert ended(Stable(ratio=0.96)) == [step >= first for step in range(1, 21)]
  assert ended(Stable(ratio=0.5, least=17)).index(True) == 20 - 1


LAW = {"bit": ONE_BIT, "eight": EightBit(bucket_size=BUCKET)}
LAW |= {"exact": Dense(), "levels": FOUR_BITS}


@pytest.mark.parametrize("local", [None, 2])
def test_each_element_with_gradients_moves_and_no_other(local):
  """Also where the first one comes behind the warm-up, of some elements or a leaf.

  One bit has no zero: beside others, elements without a gradient get noise, whose sum
  stays, so that they move by some rates at most. Whole buckets without any stay.
  """
  rng, count = np.random.default_rng(0), 8 * BUCKET
  kinds = np.arange(count) % 4  # 1: late, 2: never
  kinds[-2 * BUCKET :] = 4  # never, and neither do their neighbors
  shapes = {f"{name}{part}": (count,) for name in LAW for part in ("", "-late")}
  means = {name: rng.uniform(0.2, 2.0, count) for name in shapes}

  def gradient(name, step):
    x = means[name] + 0.3 * rng.standard_normal((N, count))
    late = (step < 2) & ((kinds == 1) | name.endswith("late"))
    return np.float32(np.where((kinds == 2) | (kinds == 4) | late, 0, x))

  given = [{name: gradient(name, step) for name in shapes} for step in range(32)]
  tx = make(local, Policy(rules=list(LAW.items())), min_leaf_size=0)
  params = tree(0, shapes)
  got, _ = last("vmap", tx, params, given)
  for name in shapes:
    rates = np.abs(np.asarray(got[name][0]) - np.asarray(params[name])) / 0.1
    # Gradients of one sign move an element by about a rate in each of 30 steps.
    assert np.median(rates[kinds == 1]) > 10
    assert rates[(kinds != 2) & (kinds != 4)].min() > 0.1
    assert rates[kinds == 2].max() <= (12 if name.startswith("bit") else 0)
    assert not rates[kinds == 4].any()


@pytest.mark.parametrize("mode", ["shard_map", *slow("pmap", "auto", "explicit")])
@pytest.mark.parametrize("local, after", [(None, 1), (None, 3), (3, 4)])
def test_a_checkpoint_goes_on_to_the_same_bits(mode, local, after, tmp_path):
  """Saved in the warm-up, behind it with residuals, and in a gap."""
  given = gradients(7 if local else 5, LEAVES)
  saved.assert_goes_on(mode, make(local), given, tmp_path, saved_after=after)


@pytest.mark.parametrize("local, new", [(None, 2), (3, 2), *slow((None, 3), (None, 8))])
def test_another_number_of_workers_goes_on_behind_an_exchange(local, new):
  """All that workers share stays, and so do the sums of what was not sent."""
  tx, params = make(local), tree(0, LEAVES)
  *given, another = gradients(6, LEAVES)
  update, state = modes.started("auto", tx, N).update, None
  for gradient in given:
    _, state = update(gradient, state, params)
  how = {"axis_name": "data", "old_workers": N, "workers": new}
  moved = gradcomp.reshard_state(tx, params, state, **how)
  held = [moments_of(x) for x in (state, moved)]
  assert_same_bits(*(x._replace(exchange=None) for x in held))
  total = lambda x, n: np.reshape(np.float64(x), (n, -1)).sum(axis=0)
  for name in LEAVES:
    old, other = (x.exchange.residual[name] for x in held)
    # Sums of some residuals below one, each rounded by at most 2**-24.
    np.testing.assert_allclose(total(old, N), total(other, new), rtol=0, atol=1e-6)
  shapes = gradcomp.checkpoint.state_shapes(tx, params, workers=new, axis_name="data")
  chex.assert_trees_all_equal_shapes_and_dtypes(moved, shapes)
  if local:
    own = np.concatenate([held[0].mu["w"]] * new)
    assert_same_bits(np.asarray(moved.own.inner_state["w"]), own)
    assert int(moved.synced) == 5
    _, state = update(another, state, params)
    with pytest.raises(ValueError, match="must be a state after an exchange"):
      gradcomp.reshard_state(tx, params, state, **how)


@pytest.mark.parametrize("cut", [None, "model"])
@pytest.mark.parametrize("local", [None, 3])
def test_specs_stack_what_differs_between_workers(local, cut):
  params = {"w": jnp.ones((8, 64))}
  shared, own = (P(None, cut), P("data", cut)) if cut else (P(), P("data"))
  with jax.set_mesh(modes.mesh(N)):
    state = jax.eval_shape(make(local).init, params)
  given = {"axis_name": "data", "param_specs": {"w": shared} if cut else None}
  specs = gradcomp.state_specs(state, **given)
  moments = moments_of(specs)
  assert moments.mu["w"] == moments.nu["w"] == shared and moments.dense == P()
  assert moments.exchange.residual["w"] == own
  if local:
    assert specs.own.moved["w"] == specs.own.inner_state["w"] == own
    assert specs.synced == specs.rate == P()
