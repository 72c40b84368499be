"""optimizers.adam: AdamW in the warm-up, and then the mean of compressed momenta."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp._src.testing.modes import lowered
from gradcomp.codecs import QSGD, OneBit
from gradcomp.optimizers import adam
from tests.plugins.slow_cases import slow
from tests.specs.methods import adam as oracle
from tests.support.assertions import assert_same_bits
from tests.support.cases import adam as cases
from tests.support.cases.adam import BUCKET, LEAVES, MODES, make
from tests.support.cases.zero import N, gradients, train, tree


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


@pytest.mark.parametrize("floor", [0.0, 0.9])
@pytest.mark.parametrize("variance", ["frozen", "doubling"])
def test_it_is_that_of_the_paper(variance, floor):
  """And with a floor, which no paper has, by the same model."""
  shapes, steps = {"v": (8 * BUCKET,)}, 60 if variance == "doubling" else 12
  params, given = tree(0, shapes), gradients(steps, shapes)
  tx = make(warmup=3, variance=variance, b2=0.9, min_leaf_size=0, floor=floor)
  got = [np.asarray(x["v"][0]) for x, _ in train("vmap", tx, params, given)]
  dense = set(range(3)) if variance == "frozen" else cases.dense_steps(3, steps)
  assert (30 in dense) == (31 not in dense) or variance == "frozen"
  vectors = [x["v"] for x in given]
  moments = oracle.moments(vectors, dense, b1=0.9, b2=0.9, bucket=BUCKET)
  expected = oracle.adam(params["v"], moments, rate=0.1, dense=dense, floor=floor)
  # Parameters stay below 16, and a step adds less than ten float32 roundings to each.
  np.testing.assert_allclose(got, expected, rtol=0, atol=steps * 10 * 2.0**-20)


def test_bytes_are_those_of_the_codec_after_the_warm_up():
  """The program of both phases has both, and says that one of them counts."""
  params = {"w": jnp.ones((64, 1024))}
  tx = make(codec=OneBit(), min_leaf_size=None)
  coded = gradcomp.onebit_sgd(axis_name="data", exchange="two_shot")
  expected = gradcomp.explain(coded, params, workers=N).bytes_sent
  assert gradcomp.explain(tx, params, workers=N).bytes_sent == expected
  program = lowered(cases.settled(tx), params, axis_name="data", workers=N)
  assert gradcomp.wire_report(program).bytes_sent == expected
  # Buckets of 64 have two bits an element, with their means.
  assert expected == 64 * 1024 * 2 // 8 * 2 * (N - 1) // N


@pytest.mark.parametrize("local", [None, *slow(2)])
def test_it_trains_any_tree_alone_or_masked(local):
  """Complex, bfloat16 and frozen leaves; of one worker, which sends nothing.

  The switch of phases compiles once.
  """
  like = {"c": np.full(40, 1 + 2j, np.complex64), "h": np.ones(40, jnp.bfloat16)}
  params = like | {"none": None, "fixed": np.ones(4, np.float32)}
  axis = "data" if local else None
  inner = make(local, QSGD(bits=8), 0.05, axis_name=axis, min_leaf_size=0)
  tx = optax.masked(inner, {"c": True, "h": True, "none": None, "fixed": False})
  params = jax.tree.map(lambda x: jnp.stack([x] * 2), params)
  state, before = jax.vmap(tx.init, axis_name="data")(params), jax.device_get(params)
  moments = cases.moments_of(state.inner_state)
  assert moments.nu["c"].dtype == moments.mu["h"].dtype == jnp.float32

  @jax.jit
  @functools.partial(jax.vmap, axis_name="data")
  def step(params, state):
    own = gradcomp.local.local_params(params, state)
    grads = jax.tree.map(lambda x: x.conj() - 3, own)
    updates, state = tx.update(grads, state, params)
    moved = jax.tree.map(jnp.add, params, updates)
    return moved | {"fixed": params["fixed"]}, state

  for _ in range(200):
    params, state = step(params, state)
  assert step._cache_size() == 1
  chex.assert_trees_all_equal_shapes_and_dtypes(params, before)
  np.testing.assert_allclose(np.real(params["c"]), 3, atol=0.2)
