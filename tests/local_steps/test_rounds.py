"""Rounds of local steps are those of the papers, and lose nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from gradcomp.codecs import QSGD, BlockTop, Dense, TopK
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases import local as cases
from tests.support.cases.local import ADAM, LEAVES, NESTEROV, N, dyadic, flat, local
from tests.support.cases.zero import gradients, last, train, tree

PLAIN = optax.sgd(1.0)


def data_parallel(inner, params, given, of_updates=False):
  """Training by the mean of gradients or updates; what all workers hold."""
  mean = lambda tree: lax.pmean(tree, "data")

  @jax.jit
  @functools.partial(jax.vmap, axis_name="data")
  def step(gradient, state, params):
    gradient = gradient if of_updates else mean(gradient)
    updates, state = inner.update(gradient, state, params)
    return optax.apply_updates(params, mean(updates) if of_updates else updates), state

  params = jax.tree.map(lambda x: np.stack([x] * N), params)
  state = jax.vmap(inner.init)(params)
  for gradient in given:
    params, state = step(gradient, state, params)
  return params, state


@pytest.mark.parametrize("mode, inner", [("vmap", ADAM), ("shard_map", optax.sgd(0.5))])
def test_with_one_step_a_round_it_is_data_parallel_training(mode, inner):
  """Both add updates in one order, or sums are exact in any."""
  params, given = tree(0, LEAVES), dyadic(3)
  got, _ = last(mode, local(inner, PLAIN, Dense(), every=1), params, given)
  expected, _ = data_parallel(inner, params, given, of_updates=True)
  assert_same_bits(dict(got), jax.device_get(expected))


def start_of(params):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])


SGD = optax.sgd(0.1)
EXACT = TopK(density=0.1, selection="exact")
PARTS = {"a": (40,), "b": (10, 3), "c": (35,)}
CUTS = [slice(0, 40), slice(40, 70), slice(70, 105)]


def sparse_paper(senders):
  merge = "senders" if senders else "mean"
  how = {"count": 30, "decay": 0.95, "every": 3, "senders": senders}
  tx = local(SGD, PLAIN, EXACT, feedback=cases.decaying(0.95), merge=merge)
  return tx, {"v": (300,)}, functools.partial(cases.sparseloco, **how)


def streaming_paper(delay, mixing):
  how = {"delay": delay, "mixing": mixing}
  tx = local(SGD, NESTEROV, Dense(), 6, fragments=3, **how)
  how |= {"outers": [cases.Nesterov(0.7, 0.9) for _ in CUTS], "every": 6}
  return tx, PARTS, functools.partial(cases.streaming, parts=CUTS, **how)


def diloco_paper():
  """One part, which arrives at once."""
  how = {"parts": [slice(None)], "outers": [cases.Nesterov(0.7, 0.9)], "every": 3}
  oracle = functools.partial(cases.streaming, delay=0, mixing=1.0, **how)
  return local(SGD, NESTEROV, Dense()), LEAVES, oracle


# The transformation, the leaves, and the paper's algorithm; and a place for each.
PAPERS = {
  "diloco": (diloco_paper, "vmap"),
  "sparseloco-mean": (lambda: sparse_paper(False), "explicit"),
  "sparseloco-senders": (lambda: sparse_paper(True), "pmap"),
  "streaming-late": (lambda: streaming_paper(2, 0.5), "auto"),
  "streaming": (lambda: streaming_paper(0, 1.0), "shard_map"),
  "streaming-mixed": (lambda: streaming_paper(0, 0.25), "vmap"),
}


@pytest.mark.parametrize("name", [*list(PAPERS)[:4], *slow(*list(PAPERS)[4:])])
def test_rounds_are_those_of_the_paper(name):
  make, place = PAPERS[name]
  tx, shapes, oracle = make()
  params, given = tree(0, shapes), gradients(20 if shapes is PARTS else 10, shapes)
  got = [flat(held)[0] for held, _ in train(place, tx, params, given)]
  expected = oracle(start_of(params), [*map(flat, given)], rate=0.1)
  # Sums of some ten float32 numbers below 16, each rounded by at most 2**-21.
  np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


TWO_BITS = QSGD(bits=2, bucket_size=64)
KEPT = [
  (TopK(density=0.1), {"exchange": "all_gather"}),
  (BlockTop(block_size=8), {"exchange": "two_shot", "fragments": 2}),
  *slow((TWO_BITS, {"exchange": "all_gather"})),
  *slow((TWO_BITS, {"exchange": "two_shot", "fragments": 3})),
]


@pytest.mark.parametrize("codec, options", KEPT, ids=repr)
def test_nothing_of_what_workers_did_is_lost(codec, options):
  """All that workers did is what all have, what a worker has more, and what waits.

  This holds behind each step, in rounds and between. What owners keep is of the mean.
  It is in the order of their rows, so that only its sum is compared.
  """
  params, given = tree(0, LEAVES), gradients(11, LEAVES)
  tx = local(optax.sgd(0.5), PLAIN, codec, **options)
  start, steps = start_of(params), np.cumsum([*map(flat, given)], 0, dtype=np.float64)
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
  given = [{"v": given[0]["v"].at[1, 7].set(jnp.nan)}, *given[1:]]
  got, state = last("vmap", local(SGD, PLAIN, TopK(density=0.1)), params, given)
  assert np.isnan(got["v"][:, 7]).all() and np.isfinite(got["v"][:, 8]).all()
  assert np.isfinite(state.fragments[0].exchange.residual["v"]).all()
  guarded = local(optax.apply_if_finite(SGD, 3), PLAIN, TopK(density=0.1))
  got, state = last("shard_map", guarded, params, given)
  assert np.isfinite(got["v"]).all()
  counts = state.own.inner_state.total_notfinite
  assert np.ravel(counts).tolist() == [0, 1, 0, 0]


MOMENTUM = optax.sgd(0.5, 0.5)  # with sums that are exact for a few dyadic gradients


def trace_of(state):
  """The momentum of each worker."""
  return flat(state.own.inner_state[0].trace)


@pytest.mark.parametrize("mode", ["vmap", *slow("shard_map", "auto", "explicit")])
def test_the_first_steps_are_data_parallel(mode):
  """Whatever the codec and the outer optimizer are, which begin behind them."""
  how = {"fragments": 2, "delay": 1, "mixing": 0.5}
  codec = TopK(density=0.05)
  make = lambda start: local(MOMENTUM, NESTEROV, codec, 4, start=start, **how)
  params, given = tree(0, LEAVES), [*dyadic(3), *gradients(13, LEAVES)[3:]]
  held = list(train(mode, make(3), params, given))
  got, state = held[2]
  expected, (momentum, _) = data_parallel(MOMENTUM, params, given[:3])
  assert_same_bits(flat(got), flat(expected))
  # Momentum is linear, and these sums are exact: the mean of all is that of the means.
  assert_same_bits(trace_of(state).mean(axis=0), flat(momentum.trace)[0])
  # From there it is the same optimizer as one without such steps.
  step = jax.jit(jax.vmap(modes.training(make(0)).update, axis_name="data"))
  again = got, state._replace(count=np.zeros(N, np.int32))
  for gradient in given[3:]:
    _, again = step(gradient, again)
  assert_same_bits(flat(held[-1][0]), flat(again[0]))
  assert_same_bits(trace_of(held[-1][1]), trace_of(again[1]))
