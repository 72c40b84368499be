"""contrib.scape: AdamW of few elements, which all workers know before a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp._src.testing.laws import gradients_like
from gradcomp.contrib import scape
from gradcomp.contrib._scape import _RANGE, _shares
from gradcomp.testing import laws
from tests.plugins.slow_cases import slow
from tests.support import modes, saved
from tests.support.assertions import assert_same_bits, says

N = 4
DENSITY = 0.1
PARAMS = {"v": jnp.zeros(301), "w": jnp.zeros((45, 46)), "one": jnp.zeros(())}
COUNTS = {"v": 31, "w": 207}
MODES = ["vmap", "pmap", "shard_map", "shard_map_unchecked", "auto", "explicit"]


def few(**options):
  given = {"density": DENSITY, "axis_name": "data", "min_leaf_size": 100} | options
  return scape(0.1, **given)


def gradients(steps, workers=N):
  return [gradients_like(PARAMS, workers, seed) for seed in range(steps)]


def ideal(given, count):
  """What workers hold of one leaf after gradients ``[N, n]``: from the docstring alone.

  Returns the updates, the elements that were sent and will be, and the residuals.
  """
  size = given[0].shape[1]
  part = -(-size // N)
  shares = [min(i * part, size) * count // size for i in range(N + 1)]
  places = np.arange(count) * (size // count)
  m, v, residual = np.zeros(size), np.zeros(size), np.zeros((N, size))
  updates, sent = [], [places]
  for step, gradient in enumerate(given, 1):
    waiting = residual + gradient
    mean = np.zeros(size)
    mean[places] = waiting[:, places].mean(axis=0)
    residual = waiting.copy()
    residual[:, places] = 0
    root = np.sqrt(v / (1 - 0.999 ** max(step - 1, 1))) + 1e-8
    found = []
    for i in range(N):
      own = np.abs(residual[i] / root)[i * part : (i + 1) * part]
      best = np.argsort(-own, kind="stable")[: shares[i + 1] - shares[i]]
      found += [*(best + i * part)]
    places = np.array(found)
    m, v = 0.9 * m + 0.1 * mean, 0.999 * v + 0.001 * mean**2
    corrected = m / (1 - 0.9**step), v / (1 - 0.999**step)
    updates.append(-0.1 * corrected[0] / (np.sqrt(corrected[1]) + 1e-8))
    sent.append(places)
  return updates, sent, residual


@pytest.mark.parametrize(
  "mode", ["shard_map", *slow(*(x for x in MODES if x != "shard_map"))]
)
def test_steps_are_those_of_the_docstring(mode):
  """In float64 by NumPy: the same elements, and updates to rounding."""
  given = gradients(5)
  outputs, state = modes.run_with_state(mode, few(), given)
  for number, (name, count) in enumerate(COUNTS.items()):
    rows = [np.asarray(x[name], np.float64).reshape(N, -1) for x in given]
    updates, sent, residual = ideal(rows, count)
    for got, expected in zip(outputs, updates, strict=True):
      for row in np.asarray(got[name]).reshape(N, -1):
        # Some ten roundings of numbers up to the rate, each of 2**-24.
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-7)
    chosen = np.asarray(state[0].chosen[number])
    assert (chosen == sent[-1]).all()
    kept = np.asarray(state[0].exchange.residual[name]).reshape(N, -1)
    np.testing.assert_allclose(kept, residual, rtol=1e-6, atol=1e-6)


def test_all_laws_of_an_optimizer():
  """One at a time: that of bytes drops the state, and with it the places."""
  tx, given = few(), gradients(2)
  laws.state_is_stable(tx, given)
  laws.workers_agree(tx, given)
  for bad in (np.nan, np.inf):
    laws.non_finite_gradients_are_seen(tx, given, bad=bad)


@pytest.mark.parametrize("workers", [2, *slow(3, 8)])
def test_bytes_do_not_grow_with_the_workers(workers):
  """The values and the places of all elements, once each in a sum of all workers."""
  tx = few()
  mesh = modes.mesh(workers)
  with jax.set_mesh(mesh):
    state = tx.init(PARAMS)
  spec = jax.sharding.PartitionSpec
  specs = gradcomp.state_specs(state, axis_name="data")

  def step(gradient, state):
    return tx.update(jax.tree.map(lambda x: x[0], gradient), state)

  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(spec("data"), specs), out_specs=(spec(), specs)
  )
  (gradient,) = gradients(1, workers)
  compiled = jax.jit(mapped).lower(gradient, state).compile()
  words = 2 * sum(COUNTS.values()) + 1
  sent = 2 * (workers - 1) / workers * 4 * words
  assert gradcomp.wire_report(compiled).bytes_sent == pytest.approx(sent, abs=1)
  assert gradcomp.explain(tx, PARAMS, workers=workers).bytes_sent == -(-sent // 1)


@pytest.mark.parametrize(
  "mode, dense",
  [
    ("shard_map", {"warmup": 3}),
    ("shard_map", {"density": 1.0}),
    # In jax.vmap compilers contract other products, and in pmap in the warm-up.
    *slow(*((mode, {"density": 1.0}) for mode in ("pmap", "auto", "explicit"))),
  ],
  ids=str,
)
def test_dense_steps_are_adamw_of_the_mean(mode, dense):
  """To the bit, whether all elements are sent in each step or in the first ones."""
  alike = {"b1": 0.8, "b2": 0.99, "eps": 1e-6}
  mine = few(**alike, **dense)
  theirs = optax.chain(gradcomp.dense(axis_name="data"), optax.adam(0.1, **alike))
  runs = (modes.run_with_state(mode, tx, gradients(3)) for tx in (mine, theirs))
  got, expected = (run.outputs for run in runs)
  assert_same_bits(got, expected)


def test_weights_decay_by_a_schedule():
  """To the bit as optax.adamw has them, in one program over the end of the warm-up."""
  rate = optax.linear_schedule(0.1, 0.0, 5)
  decay = {"weight_decay": 0.1, "mask": {"w": True, "v": False, "one": False}}
  mine = scape(rate, warmup=2, density=0.5, min_leaf_size=0, **decay)
  theirs = optax.adamw(rate, **decay)
  params = jax.tree.map(jnp.ones_like, PARAMS)
  state, other, update = mine.init(params), theirs.init(params), jax.jit(mine.update)
  for number, stacked in enumerate(gradients(3, 1)):
    gradient = jax.tree.map(lambda x: x[0], stacked)
    got, state = update(gradient, state, params)
    expected, other = jax.jit(theirs.update)(gradient, other, params)
    if number < 2:
      assert_same_bits(got, expected)
  assert update._cache_size() == 1
  kept = np.asarray(got["w"]) == np.asarray(expected["w"])
  assert 0.2 < kept.mean() < 0.8


def test_owners_choose_all_elements_where_all_are_sent():
  """Each element is in one share, also where the last workers own fewer."""
  for size in (1, 5, 300, 301):
    for workers in (1, 3, 8):
      part = -(-size // workers)
      owned = np.bincount(np.arange(size) // part, minlength=workers)
      assert _shares(size, size, workers).tolist() == owned.tolist()


def test_places_are_exact_in_means():
  """The largest places of a range, of numbers of workers that do not divide them."""
  places = np.arange(_RANGE - 1000, _RANGE, dtype=np.float32)
  for workers in (1, 3, 7, 49, 100, 1000, 4095):
    mean = places * np.float32(1 / workers)
    assert (np.rint(np.float32(workers) * mean) == places).all()


def test_large_leaves_have_several_ranges(monkeypatch):
  """Each has its share of the elements, and none is chosen twice."""
  monkeypatch.setattr("gradcomp.contrib._scape._RANGE", 16)
  params = jnp.zeros(301)  # two workers own ten ranges each, of 16 elements
  tx = scape(0.1, density=0.25, axis_name="data", min_leaf_size=0)
  given = [gradients_like(params, 2, seed) for seed in range(2)]
  _, state = modes.run_with_state("vmap", tx, given)
  (chosen,) = state[0].chosen
  assert len({*np.asarray(chosen)[0].tolist()}) == 76
  shares = np.bincount(np.asarray(chosen)[0] // 16, minlength=20)
  assert shares.sum() == 76 and shares[:-2].min() >= 3 and shares.max() <= 5


def test_nothing_is_lost():
  """What was sent and what waits is the sum of all gradients."""
  given = gradients(4)
  _, state = modes.run_with_state("vmap", few(b1=0.0, b2=0.0), given[:1])
  mu, rest = state[0].mu, state[0].exchange.residual
  for name in COUNTS:
    total = N * np.asarray(mu[name][0]) + np.asarray(rest[name]).sum(axis=0)
    expected = np.asarray(given[0][name]).sum(axis=0)
    # Sums of four numbers below five.
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-5)


def test_unsent_elements_come_up():
  """All elements of a constant gradient are sent once before one is again."""
  size, tx = 100, scape(0.1, density=0.1, min_leaf_size=0)
  state = tx.init(jnp.zeros(size))
  sent = []
  for _ in range(11):
    sent.append(np.asarray(state[0].chosen[0]))
    _, state = tx.update(jnp.ones(size), state)
  assert {*np.concatenate(sent[1:])} == {*range(size)}


@pytest.mark.parametrize("mode", ["shard_map", *slow("vmap", "auto", "explicit")])
def test_a_checkpoint_goes_on(mode, tmp_path):
  saved.assert_goes_on(mode, few(), gradients(4), tmp_path)


@pytest.mark.parametrize("workers", [2, *slow(1, 8)])
def test_a_state_moves_to_other_workers(workers):
  """Residuals keep their sum. All else is equal on all workers, and stays."""
  tx = few()
  with jax.set_mesh(modes.mesh(N)):
    state = tx.init(PARAMS)
  draw = np.random.default_rng(0).standard_normal
  filled = jax.tree.map(
    lambda x: draw(x.shape).astype(x.dtype), state[0].exchange.residual
  )
  kept = state[0].exchange._replace(residual=filled)
  state = (state[0]._replace(exchange=kept), *state[1:])
  options = {"axis_name": "data", "old_workers": N, "workers": workers}
  moved = gradcomp.reshard_state(tx, PARAMS, state, **options)
  assert_same_bits(moved[0]._replace(exchange=None), state[0]._replace(exchange=None))
  sums = lambda tree, n: [
    np.asarray(x, np.float64).reshape(n, -1).sum(axis=0) for x in jax.tree.leaves(tree)
  ]
  pairs = zip(sums(filled, N), sums(moved[0].exchange.residual, workers), strict=True)
  for before, after in pairs:
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-6)  # float32's rounding


def test_bad_options():
  with pytest.raises(ValueError, match=says("`density`", "at most 1", "got 2")):
    scape(0.1, density=2)
  with pytest.raises(ValueError, match=says("`b2`", "below 1", "got 1")):
    scape(0.1, b2=1)
  tx = few(axis_name=None)
  with pytest.raises(TypeError, match=says("`updates`", "real float", "complex64")):
    tx.update(jnp.ones(3, jnp.complex64), tx.init(jnp.ones(3, jnp.complex64)))
