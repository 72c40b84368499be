"""Nothing that waits in N workers is lost in M, and no row moves to another element."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.checkpoint.reshard import floats_of, stored_of
from gradcomp._src.core.feedback import is_stored
from gradcomp._src.exchange import plan as plans
from gradcomp._src.mesh.study import planned_for
from gradcomp.codecs import QSGD
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases import reshard as cases

TWO_SHOT = cases.compressed("two_shot", "error")
# The table of all codecs has one worker more and one less. Of what it has not, and
# of what is around an exchange, two moves: one to more workers, and one to fewer.
MOVES = {
  "hierarchical error": [(2, 4), (8, 4)],
  "messages": [(1, 3), (8, 3)],
  "zero": [(3, 4), (4, 1)],
  "zero messages": [(2, 8), (3, 2)],
  "around": [(3, 8), (8, 2)],
  "sampled error": [(2, 4), (4, 2)],
  "threshold error": [(2, 8), (4, 3)],
  "asq error": [(4, 8), (8, 1)],
}


@pytest.mark.parametrize("pair", [0, 1], ids=["more", "fewer"])
@pytest.mark.parametrize("name", MOVES)
def test_each_part_keeps_its_law(name, pair):
  """Sums stay, rows stay in their order, and what all workers share stays as it is."""
  old, new = MOVES[name][pair]
  tx, params = cases.CASES[name](), cases.params_of(name)
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
        assert_same_bits(found[path][: len(x)], x)
        assert not found[path][len(x) :].any()
    elif not cases.is_rows(path) and not cases.is_memory(path):
      assert_same_bits(found[path], x)
  if getattr(state, "memory", None):
    check_memory(state.memory, moved.memory, old, new, name)
  if new > old:
    back = cases.reshard(moved, tx, new, old, params)
    check_nothing_changed(state, back, new // old if new % old == 0 else 3)


def check_memory(before, after, old, new, name):
  """What is shared stays; what is a worker's own stays with it, and begins anew."""
  assert_same_bits(after.shared, before.shared)
  if name != "sampled error":
    return
  stay = min(old, new)
  for i, kept in before.own["data",].items():
    for x, y in zip(kept, after.own["data",][i], strict=True):
      own = len(x) // old
      assert_same_bits(y[: stay * own], x[: stay * own])
      assert not y[stay * own :].any()  # no thresholds yet, no entries


def check_nothing_changed(state, back, factor):
  """Workers joined and left: owners' factors round there and back, but powers of 2."""
  for (path, x), (_, y) in zip(cases.leaves(state), cases.leaves(back), strict=True):
    if cases.is_rows(path) and factor.bit_count() > 1:
      np.testing.assert_allclose(y, x, rtol=2.0**-22)  # twice half of 2**-23
    elif not cases.is_memory(path):
      assert_same_bits(y, x)


@pytest.mark.parametrize("pair", [(8, 3), (1, 4), (4, 2)])
@pytest.mark.parametrize("name", ["two_shot error", "messages", "threshold error"])
def test_what_owners_keep_stays_with_its_elements(name, pair):
  """Rows lie in one order over the owners, as docs/methods/exchanges.md says.

  Owners of a sparse codec have a range of each leaf, which is cut anew. If the mean is
  kept, the updates that wait are what they were.
  """
  old, new = pair
  groups = cases.ranges if name.startswith("threshold") else lambda n: None
  tx = cases.CASES[name]()
  state = cases.filled(tx, old)
  before = cases.owned_leaves(state, groups(old))
  # The factor of owners, and that of the workers' sum.
  factors = ("sum", old / new, 1), ("mean", 1, new / old), ("addends", 1, 1)
  for keep, factor, most in factors:
    moved = cases.reshard(state, tx, old, new, keep=keep)
    after = cases.owned_leaves(moved, groups(new))
    for key, x in before.items():
      np.testing.assert_array_equal(after[key], x * np.float32(factor))
      waited, waits = state.residual[key], cases.total(moved.residual[key], new)
      # Seven additions and a product, each of which rounds a number below 32.
      np.testing.assert_allclose(waits, most * cases.total(waited, old), atol=2e-5)


def floats(residual, workers):
  """The residuals of all workers, ``float32[N, ...]``."""
  (x,) = jax.tree.leaves(residual, is_leaf=is_stored)
  wide = floats_of(x, workers) if is_stored(x) else np.asarray(x, np.float32)
  return wide.reshape(workers, -1)


def drawn(residual, workers):
  """Normal residuals of all workers, as they are stored."""
  rng = np.random.default_rng(0)

  def draw(x):
    if is_stored(x):
      return stored_of(rng.standard_normal(x.codes.shape).astype(np.float32), workers)
    return rng.standard_normal(x.shape).astype(x.dtype)

  return jax.tree.map(draw, residual, is_leaf=is_stored)


# The largest error of rounding to nearest: 2**-24 of a sum of three numbers below 16,
# 2**-8 of a number, and half of a scale, which is at most 2/127 of the block's largest.
ROUNDING = {
  "float32": lambda x: 4e-6,
  "bfloat16": lambda x: np.abs(x) * 2.0**-8,
  "int8": lambda x: np.abs(x).max() / 127,
}


@pytest.mark.parametrize("dtype", ROUNDING)
def test_workers_keep_what_owners_kept_where_nobody_owns_rows(dtype):
  """Two workers gather, and four would have owned rows: "auto" says so."""
  feedback = gradcomp.ErrorFeedback(residual_dtype=dtype)
  tx = gradcomp.compress(QSGD(bits=4), axis_name="data", feedback=feedback)
  params = {"w": jnp.zeros((64, 4096))}  # more than a tiny message
  state = cases.filled(tx, 4, params)
  (rows,) = state.server_residual["data",]
  owned = np.random.default_rng(3).standard_normal((64, 4096), np.float32)
  state = state._replace(
    residual=drawn(state.residual, 4),
    server_residual={("data",): (owned.reshape(rows.shape),)},  # the leaf fills them
  )
  moved = cases.reshard(state, tx, 4, 2, params)
  assert moved.server_residual is None
  before, after = floats(state.residual, 4), floats(moved.residual, 2)
  exact = before[:2] + before[2:] + 2 * owned.reshape(-1)
  assert np.all(np.abs(after - exact) <= ROUNDING[dtype](exact))
  back = cases.reshard(moved, tx, 2, 4, params)
  assert not any(x.any() for x in jax.tree.leaves(back.server_residual))
  wide = floats(back.residual, 4)
  assert_same_bits(wide[:2], after)  # as they are stored, and new workers have zeros
  assert not wide[2:].any()


@pytest.fixture
def cut_small(monkeypatch):
  """Lets ``"auto"`` cut where it cuts large leaves: here each is a message."""
  monkeypatch.setattr(plans, "automatic_bytes", lambda payload, workers: 1)


def to(state, tx, old, new, where, **options):
  """The state on the second of two platforms."""
  before, after = where
  with planned_for(after):
    return cases.reshard(state, tx, old, new, old_platform=before, **options)


LEAVES = [("b",), ("one",), ("v",), ("w",)]
WHOLE = [tuple(cases.PARAMS)]


@pytest.mark.parametrize("pair", [(4, 4), (8, 3), (1, 4)])
def test_rows_move_to_another_platform_and_come_back(pair, cut_small):
  """A TPU has each leaf in a message of its own here, and a CPU has one of all."""
  old, new = pair
  with planned_for("tpu"):
    state = cases.filled(TWO_SHOT, old)
  groups = LEAVES if old > 1 else WHOLE
  before = cases.owned_leaves(state, groups)
  there = to(state, TWO_SHOT, old, new, ("tpu", "cpu"))
  expected = cases.shapes(TWO_SHOT, new, platform="cpu")
  chex.assert_trees_all_equal_shapes_and_dtypes(there, expected)
  after = cases.owned_leaves(there, WHOLE)
  for name, x in before.items():
    np.testing.assert_array_equal(after[name], x * np.float32(old / new))
  back = to(there, TWO_SHOT, new, old, ("cpu", "tpu"))
  chex.assert_trees_all_equal_shapes_and_dtypes(back, state)
  if max(pair) % min(pair) == 0:  # factors that are powers of two
    assert_same_bits(cases.owned_leaves(back, groups), before)
  if old == new:
    assert_same_bits(back, state)
  if old > 1:  # one worker has one message anywhere
    rule = "is too much.* Pass old_workers=, old_platform="
    with pytest.raises(ValueError, match=rule):
      cases.reshard(state, TWO_SHOT, old, new)


@pytest.mark.bits
def test_a_training_goes_on_with_the_bits_of_one_that_stayed(cut_small):
  """One message and several have equal bits, if each row keeps what its owner kept."""
  results = []
  for platforms in (("cpu", "cpu", "cpu"), ("tpu", "cpu", "tpu")):
    like = cases.shapes(TWO_SHOT, 4, platform=platforms[0])
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    outputs = []
    for number, where in enumerate(platforms):
      if number:
        state = to(state, TWO_SHOT, 4, 4, (platforms[number - 1], where))
      with planned_for(where):
        output, state = cases.step(TWO_SHOT, state, cases.gradients(4, number))
      outputs.append(output)
    results.append((outputs, state.residual))
  assert_same_bits(*results)


def test_a_state_goes_to_the_platform_of_the_mesh(cut_small, monkeypatch):
  """In a process with TPUs, where a mesh of its CPUs is used."""
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  like = cases.shapes(TWO_SHOT, 4)
  assert len(like.server_residual["data",]) == 4
  state = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), like)
  mesh = modes.mesh(2)
  went = cases.reshard(state, TWO_SHOT, 4, 2, mesh=mesh, old_platform="tpu")
  expected = cases.shapes(TWO_SHOT, 2, platform="cpu")
  chex.assert_trees_all_equal_shapes_and_dtypes(went, expected)
  # The step would refuse the state of other messages.
  modes.run_with_state("shard_map", TWO_SHOT, [cases.gradients(4, 0)])
