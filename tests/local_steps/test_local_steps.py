"""local_steps: workers train alone for some steps, and exchange what they changed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from gradcomp.codecs import QSGD, BlockTop, Dense, FloatCast, TopK
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits
from tests.support.cases.local import (
  ADAM,
  LEAVES,
  NESTEROV,
  N,
  Nesterov,
  decaying,
  diloco,
  dyadic,
  flat,
  local,
  sparseloco,
  streaming,
)
from tests.support.cases.zero import gradients, last, train, tree

MODES = ["vmap", "pmap", "shard_map", "shard_map_unchecked", "auto", "explicit"]


@pytest.mark.parametrize(
  "mode, inner",
  [
    ("vmap", "adam"),
    ("shard_map", "sgd"),
    *slow(("pmap", "sgd"), ("auto", "sgd"), ("explicit", "sgd")),
  ],
)
def test_with_one_step_a_round_it_is_data_parallel_training(mode, inner):
  """Of the mean of the workers' updates, to the bit.

  Either both add in one order, or sums are exact in any.
  """
  inner = {"adam": ADAM, "sgd": optax.sgd(0.5)}[inner]
  params, given = tree(0, LEAVES), dyadic(3)
  got, _ = last(mode, local(inner, optax.sgd(1.0), Dense(), every=1), params, given)

  def step(gradient, state, params):
    updates, state = inner.update(gradient, state, params)
    return optax.apply_updates(params, lax.pmean(updates, "data")), state

  step = jax.jit(jax.vmap(step, axis_name="data"))
  expected = jax.tree.map(lambda x: jnp.stack([x] * N), params)
  state = jax.vmap(inner.init)(expected)
  for gradient in given:
    expected, state = step(gradient, state, expected)
  for name in LEAVES:
    assert_same_bits(got[name], expected[name])


CODECS = {
  "dense": (Dense(), {}),
  "sparse": (TopK(density=0.05), {"feedback": decaying(0.95)}),
  "random": (QSGD(bits=4, bucket_size=64), {"fragments": 2, "every": 4}),
  "streaming": (
    FloatCast(exponent_bits=3, mantissa_bits=0),
    {"fragments": 3, "delay": 1, "mixing": 0.5},
  ),
}


@pytest.mark.parametrize("name", ["sparse", *slow("dense", "random", "streaming")])
def test_all_modes_have_the_same_bits(name):
  """In each step, and so all workers have. It ends in the midst of a round.

  SGD rounds alike everywhere; XLA contracts the sums of other optimizers as it likes.
  """
  codec, options = CODECS[name]
  tx = local(optax.sgd(0.5), optax.sgd(1.0), codec, **options)
  params, given = tree(0, LEAVES), dyadic(7)
  expected = list(train("vmap", tx, params, given))
  for mode in MODES[1:]:
    for (got, state), (held, kept) in zip(
      train(mode, tx, params, given), expected, strict=True
    ):
      assert_same_bits(got, held)
      assert_same_bits(state.own.moved, kept.own.moved)
      for leaf in jax.tree.leaves(got):
        assert_same_bits(leaf, np.stack([leaf[0]] * N))


def run(tx, params, given):
  """The parameters of all after each step, in one vector, and the last state."""
  held = list(train("vmap", tx, params, given))
  return [flat(params)[0] for params, _ in held], held[-1][1]


def stacked(given):
  return [flat(gradient) for gradient in given]


def start_of(params):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])


# Sums of some ten float32 numbers below 16, each rounded by at most 2**-21.
CLOSE = {"atol": 1e-5, "rtol": 0}


def test_diloco_is_that_of_the_paper():
  params, given = tree(0, LEAVES), gradients(8, LEAVES)
  tx = local(optax.sgd(0.1), NESTEROV, Dense())
  got, _ = run(tx, params, given)
  outer = Nesterov(0.7, 0.9)
  expected = diloco(start_of(params), stacked(given), rate=0.1, every=3, outer=outer)
  np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.parametrize("senders", [False, True])
def test_sparseloco_is_that_of_the_paper(senders):
  shapes = {"v": (300,)}
  params, given = tree(0, shapes), gradients(10, shapes)
  codec = TopK(density=0.1, selection="exact")
  merge = "senders" if senders else "mean"
  tx = local(
    optax.sgd(0.1), optax.sgd(1.0), codec, feedback=decaying(0.95), merge=merge
  )
  got, _ = run(tx, params, given)
  expected = sparseloco(
    start_of(params),
    stacked(given),
    rate=0.1,
    every=3,
    count=30,
    decay=0.95,
    senders=senders,
  )
  np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.parametrize("delay, mixing", [(2, 0.5), *slow((0, 1.0), (0, 0.25))])
def test_streaming_is_that_of_the_paper(delay, mixing):
  shapes = {"a": (40,), "b": (10, 3), "c": (35,)}
  params, given = tree(0, shapes), gradients(20, shapes)
  tx = local(
    optax.sgd(0.1), NESTEROV, Dense(), 6, fragments=3, delay=delay, mixing=mixing
  )
  got, _ = run(tx, params, given)
  expected = streaming(
    start_of(params),
    stacked(given),
    rate=0.1,
    every=6,
    parts=[slice(0, 40), slice(40, 70), slice(70, 105)],
    delay=delay,
    mixing=mixing,
    outers=[Nesterov(0.7, 0.9) for _ in range(3)],
  )
  np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.parametrize(
  "codec, options",
  [
    (TopK(density=0.1), {"exchange": "all_gather"}),
    (BlockTop(block_size=8), {"exchange": "two_shot", "fragments": 2}),
    *slow(
      (QSGD(bits=2, bucket_size=64), {"exchange": "all_gather"}),
      (TopK(density=0.1), {"exchange": "two_shot"}),
      (QSGD(bits=2, bucket_size=64), {"exchange": "two_shot", "fragments": 3}),
    ),
  ],
  ids=repr,
)
def test_nothing_of_what_workers_did_is_lost(codec, options):
  """All that workers did is what all have, what a worker has more, and what waits.

  This holds behind each step, in rounds and between. What owners keep is of the mean.
  It is in the order of their rows, so that only its sum is compared.
  """
  params, given = tree(0, LEAVES), gradients(11, LEAVES)
  tx = local(optax.sgd(0.5), optax.sgd(1.0), codec, **options)
  start, steps = start_of(params), np.cumsum(stacked(given), axis=0, dtype=np.float64)
  for (got, state), done in zip(train("vmap", tx, params, given), steps, strict=True):
    kept = [x.exchange for x in state.fragments]
    waits = np.concatenate([flat(x.residual) for x in kept], axis=1).sum(axis=0)
    shared, ahead = flat(got)[0] - start, flat(state.own.moved).sum(axis=0)
    lost = N * shared + ahead - waits + 0.5 * done.sum(axis=0)
    if owned := jax.tree.leaves([x.server_residual for x in kept]):
      lost = lost.sum() - N * sum(np.float64(rows).sum() for rows in owned)
    # Sums of 44 numbers below 4, and each addition rounds by at most 2**-20. The errors
    # of 601 elements are independent, and add up to 25 times one of them.
    np.testing.assert_allclose(lost, 0.0, atol=25e-4 if owned else 1e-4, rtol=0)


def test_what_is_not_finite_is_seen_and_does_not_stay_in_residuals():
  """It makes the parameter NaN on all workers; apply_if_finite drops the step."""
  params, given = tree(0, {"v": (300,)}), gradients(6, {"v": (300,)})
  bad = given[0]["v"].at[1, 7].set(jnp.nan)
  given = [{"v": bad}, *given[1:]]
  codec = TopK(density=0.1)
  got, state = last("vmap", local(optax.sgd(0.1), optax.sgd(1.0), codec), params, given)
  assert np.isnan(got["v"][:, 7]).all() and np.isfinite(got["v"][:, 8]).all()
  assert np.isfinite(state.fragments[0].exchange.residual["v"]).all()
  inner = optax.apply_if_finite(optax.sgd(0.1), 3)
  tx = local(inner, optax.sgd(1.0), codec)
  for mode in ("vmap", "shard_map"):
    got, state = last(mode, tx, params, given)
    assert np.isfinite(got["v"]).all()
    counts = state.own.inner_state.total_notfinite
    assert np.ravel(counts).tolist() == [0, 1, 0, 0]
