"""A state of N workers goes on with M: nothing that waits is lost, and no row moves."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from tests.plugins import slow_cases
from tests.support.assertions import assert_same_bits
from tests.support.cases import reshard as cases

COUNTS = (1, 2, 3, 4, 8)
PAIRS = [(n, m) for n in COUNTS for m in COUNTS if n != m]
QUICK = (
  *("two_shot momentum", "ring error", "psum None", "messages", "around", "zero"),
  *("sampled all_gather", "threshold two_shot", "levels two_shot"),
)
# In a plain run some cases once, with another pair each time.
EVERY = [
  pytest.param(name, pair, marks=() if quick else pytest.mark.slow)
  for i, name in enumerate(cases.CASES)
  for j, pair in enumerate(PAIRS)
  for quick in [name in QUICK and j == (7 * i) % len(PAIRS)]
]


@functools.cache
def made(name):
  return cases.CASES[name]()


@pytest.mark.parametrize("name, pair", EVERY)
def test_each_part_keeps_its_law(name, pair):
  """Sums stay, rows stay in their order, and what all workers share stays as it is."""
  old, new = pair
  tx, params = made(name), cases.params_of(name)
  state = cases.filled(tx, old, params)
  moved = cases.reshard(state, tx, old, new, params)
  expected = cases.shapes(tx, new, params)
  chex.assert_trees_all_equal_shapes_and_dtypes(moved, expected)
  found = dict(cases.leaves(moved))
  for path, x in cases.leaves(state):
    if cases.is_addends(path):
      before, after = cases.total(x, old), cases.total(found[path], new)
      # Each of at most `old` additions in float32 rounds by 2**-24 of what it adds up.
      most = old * 2.0**-24 * np.abs(x).reshape(old, -1).sum(axis=0)
      assert (np.abs(after - before) <= most).all()
      if new > old:
        kept = len(x)
        assert_same_bits(found[path][:kept], x)
        assert not found[path][kept:].any()
    elif not cases.is_rows(path) and not cases.is_memory(path):
      assert_same_bits(found[path], x)
  if new > old:
    back = cases.reshard(moved, tx, new, old, params)
    check_nothing_changed(state, back, new // old if new % old == 0 else 3)


def check_nothing_changed(state, back, factor):
  """Workers joined and left, without a step.

  Owners' residuals are multiplied there and back, which rounds each time but for powers
  of two.
  """
  for (path, x), (_, y) in zip(cases.leaves(state), cases.leaves(back), strict=True):
    if cases.is_rows(path) and factor.bit_count() > 1:
      np.testing.assert_allclose(y, x, rtol=2.0**-22)  # twice half of 2**-23
    elif not cases.is_memory(path):
      assert_same_bits(y, x)


@pytest.mark.parametrize("pair", [(4, 2), (2, 3), *slow_cases.slow(*zip(PAIRS))])
@pytest.mark.parametrize("name", ["two_shot error", "messages"])
def test_what_owners_keep_stays_with_its_elements(name, pair):
  """Rows lie in one order over the owners, as docs/methods/exchanges.md says."""
  old, new = pair
  tx = made(name)
  state = cases.filled(tx, old)
  moved = cases.reshard(state, tx, old, new)
  before = cases.owned_leaves(state)
  after = cases.owned_leaves(moved)
  for key, x in before.items():
    np.testing.assert_array_equal(after[key], x * np.float32(old / new))
  for keep in ("mean", "addends"):
    kept = cases.reshard(state, tx, old, new, keep=keep)
    assert_same_bits(cases.owned_leaves(kept), before)


STEPS = [
  ("two_shot error", (4, 3)),
  *slow_cases.slow(
    ("all_gather error", (3, 2)),
    ("messages", (2, 4)),
    ("two_shot error", (8, 3)),
    ("two_shot error", (1, 4)),
    ("ring error", (4, 3)),
    ("psum error", (2, 8)),
    ("hierarchical error", (8, 4)),
    ("hierarchical error", (2, 4)),
  ),
]


@pytest.mark.parametrize("name, pair", STEPS)
def test_a_step_sends_what_waited_in_other_workers(name, pair):
  """Gradients that came in = what M workers sent + what still waits, in each element.

  A row that another owner had in another place would be sent as another element.
  """
  old, new = pair
  tx = made(name)
  state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), cases.shapes(tx, old))
  _, state = cases.step(tx, state, cases.gradients(old, 1))
  before = cases.waiting(state, old)
  assert all(np.any(x) for x in (before["v"], before["w"]))
  moved = cases.reshard(state, tx, old, new)
  given = cases.gradients(new, 2)
  output, after = cases.step(tx, moved, given)
  waits = cases.waiting(after, new)
  for key, x in before.items():
    came = x + np.asarray(given[key], np.float64).sum(axis=0)
    # Sums of at most 8 numbers of about 5, each rounded by 2**-24.
    np.testing.assert_allclose(new * output[key] + waits[key], came, atol=2e-5)


@pytest.mark.parametrize("pair", [(4, 3), *slow_cases.slow(((2, 8),), ((8, 1),))])
def test_zero_goes_on_as_one_that_never_changed(pair):
  """In float32 both ways the rows of M owners are Adam's, whoever had them before."""
  old, new = pair
  codec = gradcomp.codecs.Dense()
  tx = gradcomp.parallel.zero(
    optax.adam(0.1), grads=codec, params=codec, axis_name="data"
  )
  params = {"v": jnp.ones((3, 100)), "w": jnp.ones((40, 32))}
  gradient = {k: cases.gradients(1, 5)[k][0] for k in params}
  alike = lambda n: jax.tree.map(lambda g: np.stack([g] * n), gradient)

  def first(params):
    return jax.vmap(tx.init, in_axes=None, axis_size=old, axis_name="data")(params)

  def stepped(params, state, workers):
    update, state = cases.step(tx, state, alike(workers), params)
    return optax.apply_updates(params, update), state

  state = cases.unstacked(tx, jax.jit(first)(params), old)
  params, state = stepped(params, state, old)
  expected, _ = stepped(params, state, old)
  moved = cases.reshard(state, tx, old, new, params)
  got, _ = stepped(params, moved, new)
  # Means of N and of M equal gradients are each rounded by at most 8 times 2**-24.
  chex.assert_trees_all_close(got, expected, rtol=1e-5)


def test_workers_keep_what_owners_kept_where_nobody_owns_rows():
  """Two workers gather, and four would have owned rows: "auto" says so."""
  tx = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
  params = {"w": jnp.zeros((64, 4096))}  # more than a tiny message
  state = cases.filled(tx, 4, params)
  (rows,) = state.server_residual["data",]
  owned = np.random.default_rng(3).standard_normal((64, 4096), np.float32)
  rows = owned.reshape(rows.shape)  # the leaf fills them
  state = state._replace(server_residual={("data",): (rows,)})
  moved = cases.reshard(state, tx, 4, 2, params)
  assert moved.server_residual is None
  before = cases.total(state.residual["w"], 4).reshape(64, 4096) + 4.0 * owned
  after = cases.total(moved.residual["w"], 2).reshape(64, 4096)
  # Sums of three numbers below 16, each rounded by 2**-24.
  np.testing.assert_allclose(after, before, atol=4e-6)
  back = cases.reshard(moved, tx, 2, 4, params)
  assert not any(x.any() for x in jax.tree.leaves(back.server_residual))


@pytest.mark.parametrize("pair", [(4, 3), (2, 8)])
def test_the_mean_stays_if_asked_for(pair):
  """Then the updates that wait are what they were."""
  old, new = pair
  tx = made("two_shot momentum")
  state = cases.filled(tx, old)
  found = dict(cases.leaves(cases.reshard(state, tx, old, new, keep="mean")))
  for path, x in cases.leaves(state):
    if cases.is_addends(path):
      before, after = cases.total(x, old) / old, cases.total(found[path], new) / new
      # Each of two additions and a product rounds by 2**-24 of at most the sum.
      most = 3 * 2.0**-24 * np.abs(x).reshape(old, -1).sum(axis=0)
      assert (np.abs(after - before) <= most).all()
    else:
      assert cases.is_rows(path) or (found[path] == x).all()


@pytest.mark.parametrize("pair", [(4, 3), (2, 8)])
def test_the_ranges_of_a_sparse_codec_are_cut_anew(pair):
  """Owners have a range of each leaf, so that rows are shorter for more workers."""
  old, new = pair
  tx = made("threshold two_shot")

  state = cases.filled(tx, old)
  moved = cases.reshard(state, tx, old, new)
  before, after = (
    cases.owned_leaves(x, cases.ranges(n)) for x, n in ((state, old), (moved, new))
  )
  for key, x in before.items():
    np.testing.assert_array_equal(after[key], x * np.float32(old / new))


@pytest.mark.parametrize("pair", [(2, 4), (4, 2)])
def test_a_worker_takes_its_own_memory_with_it(pair):
  old, new = pair
  tx = made("sampled all_gather")
  state = cases.filled(tx, old)
  moved = cases.reshard(state, tx, old, new)
  assert_same_bits(moved.memory.shared, state.memory.shared)
  stay = min(old, new)
  for i, kept in state.memory.own["data",].items():
    for x, y in zip(kept, moved.memory.own["data",][i], strict=True):
      own = len(x) // old
      assert_same_bits(y[: stay * own], x[: stay * own])
      assert not y[stay * own :].any()  # no thresholds yet, no entries


@pytest.mark.parametrize("name", ["levels two_shot", "powersgd all_gather"])
def test_what_all_workers_remember_stays(name):
  tx = made(name)
  state = cases.filled(tx, 3)
  assert jax.tree.leaves(state.memory.shared)
  moved = cases.reshard(state, tx, 3, 4)
  assert_same_bits(moved.memory.shared, state.memory.shared)
