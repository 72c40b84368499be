"""contrib.adaptive: the first codec of a list whose measured error is small enough."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp._src.testing.check import transformation_laws
from gradcomp._src.testing.modes import lowered
from gradcomp.codecs import QSGD, Dense, TopK
from gradcomp.contrib import adaptive
from gradcomp.testing import laws
from tests.plugins.slow_cases import slow
from tests.support import modes, saved
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.zero import N, gradients, tree

BUCKET = 32
BITS = (2, 4, 8)
CODECS = [QSGD(bits=bits, bucket_size=BUCKET) for bits in BITS]
LEAVES = {"w": (6, 50), "v": (300,), "one": ()}
OPTIONS = {"axis_name": "data", "exchange": "all_gather", "min_leaf_size": 10}
OPTIONS |= {"feedback": "error"}


TWO, FOUR, EIGHT = range(3)


def make(tolerance=0.05, every=2, codecs=CODECS, **options):
  return adaptive(codecs, tolerance=tolerance, every=every, **OPTIONS | options)


def steps(mode, tx, given):
  """Yields the state before each step, the updates, and the state after it."""
  params, state, update = tree(0, LEAVES), None, modes.mapped(mode, tx, N)
  for gradient in given:
    before = state
    updates, state = update(gradient, state, params)
    yield before, updates, state


def small(state):
  """The choice and the errors of a state, which all workers share."""
  errors = np.asarray(state.errors).reshape(-1, len(CODECS))
  assert_same_bits(errors, np.stack([errors[0]] * len(errors)))
  (index,) = {*np.asarray(state.index).reshape(-1).tolist()}
  return index, errors[0]


def rows(residual):
  return np.asarray(residual, np.float64).reshape(N, -1)


@pytest.mark.parametrize("places", [("shard_map", "pmap"), *slow(None)])
def test_it_keeps_all_laws(places):
  """All but that of bytes: a compiled step has those of all branches."""
  tx = make(codecs=CODECS[:2])
  given = [laws.gradients_like({"w": jnp.ones((6, 50))}, N, seed) for seed in (0, 1)]
  each = transformation_laws(tx, given, axis_name="data", places=places, same_bits=True)
  kept = [law for law in each if law.func is not laws.bytes_are_explained]
  assert len(kept) > 1
  for law in kept:
    law()


def test_a_branch_sends_the_bytes_of_its_codec():
  """And a measurement a float for each codec, and one more."""
  params = {"w": jnp.ones((6, 50))}
  alone = [gradcomp.compress(x, **OPTIONS) for x in CODECS]
  sent = [gradcomp.explain(tx, params, workers=N).bytes_sent for tx in alone]
  measured = 2 * (N - 1) * 4 * (len(CODECS) + 1) // N
  report = gradcomp.wire_report(lowered(make(), params, axis_name="data", workers=N))
  found = sorted(x.bytes_sent for x in report.collectives)
  assert found == sorted([measured, *sent])
  assert all(x.in_branch for x in report.collectives)


@pytest.mark.parametrize(
  "mode",
  ["shard_map", "explicit", *slow("vmap", "pmap", "shard_map_unchecked", "auto")],
)
def test_a_step_is_that_of_the_first_codec_that_loses_little(mode):
  """To the bit; errors are squares of the residuals that each codec would leave."""
  params, given = tree(0, LEAVES), gradients(5, LEAVES)
  alone = [modes.mapped(mode, gradcomp.compress(x, **OPTIONS), N) for x in CODECS]
  old, numbers = None, []
  for step, (before, updates, state) in enumerate(steps(mode, make(0.01), given)):
    kept = before and before.inner
    each = [update(given[step], kept, params) for update in alone]
    index, errors = small(state)
    if step % 2:
      assert_same_bits(errors, old)
    else:
      # Under Explicit axes workers have addends of the mean.
      own = 1 / N if mode == "explicit" else 1
      sent = {k: own * rows(x) for k, x in given[step].items()}
      if kept is not None:
        sent = {k: x + rows(kept.residual[k]) for k, x in sent.items()}
      energy = sum(np.sum(x**2) for x in sent.values())
      left = [x.residual.values() for _, x in each]
      expected = [sum(np.sum(rows(x) ** 2) for x in leaves) / energy for leaves in left]
      # Float32 sums of 601 squares of a worker, each of at most 600 roundings.
      np.testing.assert_allclose(errors, expected, rtol=601 * 2.0**-24)
    assert index == next((i for i in range(2) if errors[i] <= 0.01), EIGHT)
    assert_same_bits(updates, each[index][0])
    assert_same_bits(state.inner, each[index][1])
    old = errors
    numbers.append(index)
  assert errors[TWO] > errors[FOUR] > errors[EIGHT] > 0


def test_the_choice_follows_the_gradient_in_one_program():
  """Signs are levels of all widths, so that two bits lose nothing of them."""
  tx = make(0.05, axis_name=None, feedback=None)
  spread = jax.random.normal(jax.random.key(0), (64, BUCKET))
  signs = jnp.sign(spread)
  chex.clear_trace_counter()
  update = jax.jit(chex.assert_max_traces(tx.update, n=1))
  state, found = tx.init(spread), []
  for gradient in [spread, spread, signs, signs, spread, signs, spread * jnp.nan]:
    _, state = update(gradient, state)
    found.append(int(state.index))
  # The fifth step measures, the sixth does not, and a NaN changes nothing.
  assert found == [FOUR, FOUR, TWO, TWO, FOUR, FOUR, FOUR]
  assert update._cache_size() == 1


def test_the_last_codec_serves_where_none_loses_little():
  grads = {"w": jax.random.normal(jax.random.key(0), (64, BUCKET))}
  for tolerance, expected in ((0.0, EIGHT), (0.999, TWO)):
    tx = make(tolerance, axis_name=None)
    _, state = tx.update(grads, tx.init(grads))
    assert int(state.index) == expected


def test_a_state_that_one_codec_keeps_waits_for_it():
  """Policies and others share residuals; Dense sends what waits."""
  policy = gradcomp.codecs.Policy([("w", TopK(density=0.1)), (".*", Dense())])
  codecs = [policy, CODECS[TWO], Dense()]
  tx = make(0.0, axis_name=None, codecs=codecs, feedback="error")
  grads = {"w": jax.random.normal(jax.random.key(0), (64, BUCKET))}
  state = tx.init(grads)
  waits = jax.tree.map(jnp.ones_like, state.inner.residual)
  state = state._replace(inner=state.inner._replace(residual=waits))
  updates, state = tx.update(grads, state)
  assert_same_bits(updates["w"], grads["w"] + 1)
  assert not np.any(state.inner.residual["w"])
  assert float(state.errors[2]) == 0.0 < float(state.errors[1])


def test_explain_shows_the_last_codec():
  params = {"w": jnp.ones((64, 1024))}
  last = gradcomp.compress(CODECS[-1], **OPTIONS)
  expected = gradcomp.explain(last, params, workers=N)
  found = gradcomp.explain(make(), params, workers=N)
  assert found.leaves == expected.leaves
  assert found.bytes_sent == expected.bytes_sent


@pytest.mark.parametrize("mode", ["shard_map", *slow("pmap", "auto", "explicit")])
def test_a_checkpoint_goes_on_to_the_same_bits(mode, tmp_path):
  tx = optax.chain(make(), optax.sgd(0.1))
  saved.assert_goes_on(mode, tx, gradients(4, LEAVES), tmp_path, saved_after=1)


def test_another_number_of_workers_goes_on():
  tx, params = make(), tree(0, LEAVES)
  *_, (_, _, state) = steps("auto", tx, gradients(2, LEAVES))
  options = {"axis_name": "data", "old_workers": N, "workers": 2}
  moved = gradcomp.reshard_state(tx, params, state, **options)
  assert_same_bits(moved._replace(inner=()), state._replace(inner=()))
  assert moved.inner.residual["w"].size == state.inner.residual["w"].size * 2 // N


@pytest.mark.parametrize(
  "options, parts",
  [
    ({"codecs": []}, ("`codecs`", "one codec or more", "[]")),
    ({"tolerance": 1.0}, ("`tolerance`", "below 1", "1.0")),
    ({"every": 0}, ("`every`", "1 or more", "0")),
    ({"feedback": "momentum"}, ("`feedback`", "nothing but a residual", "momentum")),
  ],
)
def test_bad_options_are_named(options, parts):
  with pytest.raises(ValueError, match=says(*parts)):
    make(**options)


def test_states_that_do_not_fit_are_named():
  """Two-shot's owners keep the errors of rows, whose shapes differ."""
  tx = make(exchange="two_shot")
  with pytest.raises(ValueError, match=says("`codecs`[", "owners keep nothing")):
    jax.vmap(tx.init, axis_name="data", axis_size=N, in_axes=None)(tree(0, LEAVES))
