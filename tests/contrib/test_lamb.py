"""contrib.lamb: LAMB in the warm-up, and then trust ratios that follow the variance."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.codecs import QSGD, OneBit
from gradcomp.contrib import adam, lamb
from gradcomp.testing import check_transformation
from tests.oracles import adam as oracle
from tests.plugins.slow_cases import slow
from tests.support import saved
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.zero import N, gradients, train, tree

BUCKET = 32
LEAVES = {"w": (6, 50), "v": (300,), "one": ()}
ONE_BIT = OneBit(bucket_size=BUCKET)
MODES = ["vmap", "shard_map", *slow("pmap", "shard_map_unchecked", "auto", "explicit")]


def onebit(warmup=2, codec=ONE_BIT, **options):
  given = {"axis_name": "data", "min_leaf_size": 10, "warmup": warmup} | options
  return lamb(0.1, codec=codec, **given)


@pytest.mark.parametrize("mode", MODES)
def test_the_warm_up_is_lamb_of_the_mean(mode):
  """With a mask of decay. Norms are sums in other orders."""
  mask = {"w": True, "v": False, "one": False}
  mine = onebit(9, weight_decay=0.1, mask=mask)
  theirs = optax.lamb(0.1, weight_decay=0.1, mask=mask)
  theirs = optax.chain(gradcomp.dense(axis_name="data"), theirs)
  params, given = tree(0, LEAVES), gradients(4, LEAVES)
  held = (train(mode, tx, params, given) for tx in (mine, theirs))
  for (got, _), (expected, _) in zip(*held, strict=True):
    # Four steps, of some ten roundings each, of parameters below four.
    chex.assert_trees_all_close(got, expected, rtol=0, atol=40 * 2.0**-22)


def test_it_is_that_of_the_paper():
  """Factors meet their bounds, and change by their largest share."""
  shapes, steps, warmup = {"v": (8 * BUCKET,)}, 25, 3
  params, given = tree(0, shapes), gradients(steps, shapes)
  given = [x if i < 12 else {"v": x["v"] * 0.05} for i, x in enumerate(given)]
  options = {"b2": 0.8, "b3": 0.5, "factor_bounds": (0.9, 2.0), "factor_change": 0.2}
  options["eps"] = 1e-20  # the oracle has none
  tx = onebit(warmup, min_leaf_size=0, **options)
  held = list(train("vmap", tx, params, given))
  moments = oracle.moments(
    [x["v"] for x in given], set(range(warmup)), b1=0.9, b2=0.8, bucket=BUCKET
  )
  expected, factors = oracle.lamb(
    params["v"],
    moments,
    warmup=warmup,
    rate=0.1,
    decays=(0.9, 0.8, 0.5),
    bounds=(0.9, 2.0),
    change=0.2,
  )
  assert {1.0, 1.2, 2.0} <= set(np.round(factors, 12))
  # Square roots of a mean of squares and a maximum: relative errors of some 2**-20.
  got = [state[0].factors[0, 0] for _, state in held]
  np.testing.assert_allclose(got, factors, rtol=2.0**-16)
  got = [x["v"][0] for x, _ in held]
  np.testing.assert_allclose(got, expected, rtol=0, atol=steps * 2.0**-16)


def test_it_has_the_moments_of_adam():
  params, given = tree(0, LEAVES), gradients(5, LEAVES)
  options = {"codec": ONE_BIT, "axis_name": "data", "min_leaf_size": 10}
  mine = train("shard_map", onebit(), params, given)
  theirs = train("shard_map", adam(0.1, warmup=2, **options), params, given)
  for (got, state), (_, expected) in zip(mine, theirs, strict=True):
    assert_same_bits(state[0].moments, expected[0])
    for leaf in jax.tree.leaves(got):
      assert_same_bits(leaf, np.stack([leaf[0]] * N))


@pytest.mark.parametrize("codec", [ONE_BIT, *slow(QSGD(bits=4, bucket_size=BUCKET))])
def test_compressed_steps_keep_all_laws(codec):
  """With the parameters in the state, without which there is no step."""
  inner = onebit(codec=codec)

  def init(params):
    (first, *rest) = inner.init(params)
    nu = jax.tree.map(jnp.ones_like, first.moments.nu)
    one = jnp.ones([], jnp.int32)
    after = {"dense": -one, "updates": one, "later": one, "nu": nu}
    moments = first.moments._replace(**after)
    return (first._replace(moments=moments, ratios=first.factors), *rest)

  settled = optax.GradientTransformationExtraArgs(init, inner.update)
  check_transformation(saved.training(settled), same_bits=False)


@pytest.mark.parametrize("mode", ["shard_map", *slow("auto", "explicit")])
def test_a_checkpoint_goes_on_to_the_same_bits(mode, tmp_path):
  given = gradients(5, LEAVES)
  saved.assert_goes_on(mode, onebit(), given, tmp_path, saved_after=3)


def test_specs_have_one_number_a_leaf_on_all_workers():
  P = jax.sharding.PartitionSpec
  state = jax.eval_shape(onebit().init, {"w": jnp.ones((8, 64))})
  cut = {"w": P(None, "model")}
  specs = gradcomp.state_specs(state, axis_name="data", param_specs=cut)[0]
  assert specs.ratios == specs.factors == P()
  assert specs.fresh["w"] == P(None, "model")


@pytest.mark.parametrize(
  "options, parts",
  [
    ({"b3": 1.0}, ("`b3`", "below 1", "1.0")),
    ({"factor_change": -1.0}, ("`factor_change`", "at least 0", "-1.0")),
    ({"ratio_bounds": (2.0, 1.0)}, ("`ratio_bounds`", "least", "(2.0, 1.0)")),
    ({"factor_bounds": 1.0}, ("`factor_bounds`", "two numbers", "1.0")),
  ],
)
def test_bad_options_are_named(options, parts):
  with pytest.raises(ValueError, match=says(*parts)):
    lamb(0.1, **options)
  with pytest.raises(ValueError, match=says("`params`", "must be given")):
    tx = lamb(0.1)
    tx.update(jnp.ones(4), tx.init(jnp.ones(4)))
