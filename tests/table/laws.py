"""The laws of the table: each reads the arrays of a run, and compiles nothing.

A law returns False where a row has nothing that it speaks of.
"""

import functools
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np

import gradcomp
from gradcomp._src.core.residual_storage import is_stored, kind, read_residual
from gradcomp._src.exchange.collectives import REPEAT
from gradcomp._src.testing import steps as kit
from tests.support import laws as suite
from tests.support.cases import reshard as cases
from tests.table import oracle
from tests.table import run as table


def same(a, b):
  return all(
    np.asarray(x).tobytes() == np.asarray(y).tobytes()
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def owned(run, state):
  """Returns the residuals of owners, by the names of leaves."""
  leaves = kit.owned_leaves(run.plan, state.server_residual)
  return dict(zip(run.params, leaves, strict=True))


def residuals(run, step):
  """Each worker's residual in float64, ``[N, ...]``; None without one."""
  kept = run.stacked[step].residual
  if kept is None:
    return None
  floats = jax.tree.map(read_residual, kept, is_leaf=is_stored)
  return {
    k: np.float64(floats[k]).reshape(run.row.workers, *x.shape)
    for k, x in run.params.items()
  }


def nothing_is_lost(run):
  """In each clean step, as the kit says it; momentum and EF21 have their own sums."""
  if run.row.feedback == "none":
    return False
  for step in (0, 1):
    states = run.stacked[step], run.stacked[step + 1]
    given = run.gradients[step], run.outputs[step], *states
    assert not list(kit.lost_in_step(run.plan, run.feedback, *given))
  return None


def workers_agree(run):
  """All have the same bytes, of the gradients' shapes and types."""
  for output, given in zip(run.outputs, run.gradients, strict=True):
    for name, x in output.items():
      assert (x.dtype, x.shape) == (given[name].dtype, given[name].shape), name
      if run.row.exchange != "local":
        assert all(same(x[0], y) for y in x[1:]), name


def non_finite_is_seen(run):
  """A NaN of one worker is everyone's, in its leaf alone, and in no state."""
  dirty, n = run.outputs[2], run.row.workers
  hit = np.isnan(np.float32(dirty["a"])).reshape(n, -1)
  seen = hit.any(axis=1)
  if run.row.exchange == "local":
    assert seen[n // 2] and seen.sum() == 1
  elif not (run.row.setting.startswith("randomk") and not seen.any()):
    assert seen.all()
  for name in ("b", "h", "s"):
    assert np.isfinite(np.float32(dirty[name])).all(), name
  for state in run.states:
    for x in jax.tree.leaves(state):
      if jnp.issubdtype(x.dtype, jnp.floating):
        assert np.isfinite(np.float32(x)).all()
  spoils = suite.SETTINGS[run.row.setting].spoils
  if run.row.feedback in ("error", "ef21") and run.row.exchange != "local":
    was, now = (residuals(run, k)["a"].reshape(n, -1) for k in (2, 3))
    np.testing.assert_array_equal(was[:, hit[0]], now[:, hit[0]])
    if isinstance(spoils, int) and not hit[0].all():
      assert (was != now).any()


def spoils_as_the_setting_says(run):
  """Where payloads alone are decoded, a NaN spoils what its codec's page says."""
  spoils = suite.SETTINGS[run.row.setting].spoils
  size = 1 if spoils == "itself" else spoils
  if run.row.exchange != "all_gather" or not isinstance(size, int):
    return False
  hit = np.isnan(np.float32(run.outputs[2]["a"][0])).ravel()
  at = hit.size // 2 // size * size
  assert hit[at : at + size].all()
  assert not np.delete(hit, slice(at, at + size)).any()
  return None


def range_is_kept(run):
  """Halves near 65,504 with equal signs have a finite mean."""
  for output in run.outputs[:2]:
    for name, x in output.items():
      assert np.isfinite(np.float32(x)).all(), name


def zeros_stay_zeros(run):
  """In the first step, where nothing waits, a bucket of zeros is one of zeros."""
  spoils = suite.SETTINGS[run.row.setting].spoils
  size = 1 if spoils == "itself" else spoils
  # Signs and votes have no zero.
  if not isinstance(size, int) or size > table.ZEROS or run.row.codec.facts.own_units:
    return False
  first = np.float32(run.outputs[0]["a"]).reshape(run.row.workers, -1)
  assert not first[:, : table.ZEROS // size * size].any()


def bytes_are_explained(run):
  """The program sends what ``explain`` counts; each collective is rounded up.

  Beside an axis of the compiler, two devices of a worker send a half each.
  """
  if run.program is None:
    return False
  explained = gradcomp.explain(run.tx, run.params, workers=run.row.sizes)
  found = gradcomp.wire_report(run.program).collectives
  usual = [c for c in found if REPEAT not in c.scope]
  usual = [c for c in usual if c.axis != "model"]
  total = sum(c.times * c.bytes_sent for c in usual)
  told, few = explained.bytes_sent, len(usual)
  least = told - few
  if run.row.place == "beside" and not any(c.dtype == "f32" for c in usual):
    # Sums of floats and single numbers are sent by both, and lengths are filled up.
    least, told = told / 2 - few, told / 2 + 15 * few
  assert least <= total <= told + few, (total, told)


def codec_is_used(run):
  """The leaf of several tiles is not sent as it is."""
  codec = dict(zip(run.params, run.plan.codecs, strict=True))["a"]
  inside = getattr(codec, "codec", codec)  # of a codec around a codec
  assert type(inside).__name__ == type(run.row.codec).__name__


def state_is_stable(run):
  """A step returns a state of the structure, shapes and types that it was given."""
  for state in run.states[1:]:
    assert jax.tree.structure(state) == jax.tree.structure(run.states[0])
    for x, y in zip(*map(jax.tree.leaves, (state, run.states[0])), strict=True):
      assert (x.shape, x.dtype) == (y.shape, y.dtype)


def checkpoint_goes_on(run):
  """From a state that was pickled the second step has the same bits."""
  assert same(run.again, (run.outputs[1], run.states[2]))


def specification_agrees(run):
  """Each clean step of ``a`` is the one of NumPy, from the state before it."""
  n, spoken = run.row.workers, False
  for number in (0, 1):
    expected = oracle.step(run, number)
    if expected is None:
      continue
    spoken = True
    after = run.stacked[number + 1]
    got = run.outputs[number]["a"].reshape(n, -1)
    _agrees(got, np.broadcast_to(expected.mean, got.shape), expected, "the mean")
    if run.row.feedback == "error" and expected.kept is not None:
      kept = np.asarray(after.residual["a"]).reshape(n, -1)
      _agrees(kept, expected.kept, expected, "residuals")
    if expected.owned is not None:
      ((array,),) = after.server_residual.values()
      found = np.asarray(array).reshape(expected.owned.shape)
      _agrees(found, expected.owned, expected, "what owners keep")
  return None if spoken else False


def _agrees(got, expected, step, what):
  if step.exact:
    np.testing.assert_array_equal(got, expected, err_msg=what)
    return
  # Sums in another order: last bits differ, and with them the rounding of a few.
  near = np.isclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
  assert near.mean() > 0.9, f"{what}: {near.mean():.4f} are near"


def digest(run):
  """The hash of all outputs and states; every NaN is the same."""
  hashed = hashlib.sha256()
  for output, state in zip(run.outputs, run.stacked[1:], strict=True):
    memory = state.memory and state.memory._replace(own=())
    residual = jax.tree.map(read_residual, state.residual, is_leaf=is_stored)
    state = state._replace(memory=memory, residual=residual)
    for leaf in jax.tree.leaves((output, state)):
      array = np.asarray(leaf)
      if array.dtype.kind == "f":
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
      hashed.update(array.dtype.str.encode() + array.tobytes())
  return hashed.hexdigest()[:16]


@functools.cache
def hashes():
  return {line.row.anywhere: line.hash for line in table.read()[1]}


def golden_bits(run):
  """A row has the bits that it had, whatever its place."""
  known = hashes().get(run.row.anywhere, "-")
  if known == "-":
    return False
  assert digest(run) == known


def reshard_keeps_sums(run):
  """With one worker less and one more: sums stay, rows stay in their order.

  N times what owners keep stays in its elements, and shared arrays stay as they are.
  """
  n = run.row.workers
  if run.row.exchange == "local" or run.row.place in ("vmap", "pmap", "two_axes"):
    return False
  # Ranges of a sparse codec are cut anew; groups must divide the workers.
  if hasattr(run.row.codec, "ranged") or run.row.exchange == "hierarchical":
    return False
  if run.row.feedback == "ef21" and run.row.place == "explicit":
    return False  # an estimate is of a sum there
  state = run.states[2]
  for new in {max(1, n - 1), n + 1} - {n}:
    moved = gradcomp.reshard_state(
      run.tx, run.params, state, axis_name="data", old_workers=n, workers=new
    )
    found = dict(cases.leaves(moved))
    for path, x in cases.leaves(state):
      parts = (cases.is_addends, cases.is_rows, cases.is_memory)
      if not any(part(path) for part in parts):
        assert same(found[path], x), path
    kept, keeps = owned(run, state), owned(run, moved)
    for name in run.params:
      waited, waits = (
        _read(x, k, run.params[name], name) for x, k in ((state, n), (moved, new))
      )
      before, after = waited.sum(0), waits.sum(0)
      if bool(state.server_residual) == bool(moved.server_residual):
        # Sums of up to 32, of which rotated rows are made, round ten times both ways.
        turned = 20 * 2.0**-24 * np.abs(n * kept[name]).max(initial=0)
        near = turned if getattr(run.row.codec, "rotate", None) else 1e-7
        np.testing.assert_allclose(
          new * keeps[name], n * kept[name], rtol=2.0**-22, atol=near
        )
      else:
        before, after = before + n * kept[name], after + new * keeps[name]
      if run.row.feedback == "ef21":  # means of estimates
        before, after = before / n, after / new
      largest = max(np.abs(x).max(initial=0) for x in (waited, waits))
      # Each of at most N additions rounds, and storing does.
      stored = kit.STORING[kind(state.residual[name])] if state.residual else 0
      bound = (n + 2) * (2.0**-23 + stored) * largest
      np.testing.assert_allclose(after, before, rtol=0, atol=bound, err_msg=name)


def _read(state, workers, like, name):
  """A residual of a global state in float64, ``[N, ...]``; zeros without one."""
  if state.residual is None:
    return np.zeros((workers, *like.shape))
  kept = state.residual[name]
  kept = read_residual(kept) if is_stored(kept) else kept
  return np.float64(kept).reshape(workers, *like.shape)


def record_is_its_own(run):
  """A record passes with itself, and fails with another N and without a part."""
  if run.row.place == "two_axes":
    return False  # its record has two numbers of workers
  made = gradcomp.checkpoint.make_record(run.tx, run.params, workers=run.row.sizes)
  saved = json.loads(json.dumps(made))
  gradcomp.checkpoint.check_record(saved, made)
  less = {k: v for k, v in saved.items() if k != "workers"}
  for wrong in (saved | {"workers": [5]}, less):
    try:
      gradcomp.checkpoint.check_record(wrong, made)
    except (ValueError, TypeError) as error:
      assert "workers" in str(error)
    else:
      assert wrong is not less and not saved["stacked"], "a wrong record passes"


LAWS = (
  nothing_is_lost,
  workers_agree,
  non_finite_is_seen,
  spoils_as_the_setting_says,
  range_is_kept,
  zeros_stay_zeros,
  bytes_are_explained,
  codec_is_used,
  state_is_stable,
  specification_agrees,
  checkpoint_goes_on,
  golden_bits,
  record_is_its_own,
  reshard_keeps_sums,
)
