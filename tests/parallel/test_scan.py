"""Scans over layers exchange in their loop as layer after layer would, to the bit.

The rows are those of ``table_scans``: of `scan` and of `scan_shards`, with and without
a copy inside a host, and with layers that each worker has.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal, jaxprs_in_params

from gradcomp._src.codecs.tiles import from_tiles
from gradcomp._src.core.compression import Compression
from gradcomp._src.core.feedback import ErrorFeedback
from gradcomp._src.exchange.auto import as_exchange
from gradcomp._src.exchange.owners import owned_matrices
from gradcomp._src.parallel.scan_layer import layer_exchange
from tests.parallel import scan_doors, table_scans
from tests.parallel.table_scans import run
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits
from tests.support.cases.parallel import mapped
from tests.support.cases.scan import ROWS, whole

PLAIN, SLOW = map(table_scans.rows, (table_scans.TABLE, table_scans.SLOW))


def of_rows(chosen):
  """The rows for which a law is said; those that are not of every run are slow."""
  cases = [*filter(chosen, PLAIN)], [*filter(chosen, SLOW)]
  assert cases[0]
  return pytest.mark.parametrize(
    "row", [*cases[0], *slow(*[(x,) for x in cases[1]])], ids=str
  )


@of_rows(lambda row: True)
def test_results_are_those_of_layers_in_turn(row):
  """Values, gradients, residuals of workers and of owners; also where one has a NaN."""
  door, turn = run(row).door, run(row).turn
  assert_same_bits(door.clean, turn.clean[0])
  assert_same_bits(door.dirty, turn.dirty[0])
  assert all(x.any() for x in jax.tree.leaves(door.clean[:3]))
  assert bool(door.clean.kept) == row.keeps  # of float32 all zeros
  if row.door == "whole":  # rows and residuals of shards have the dtype of these
    assert {x.dtype for x in jax.tree.leaves(door.clean.layers)} == {np.dtype("f4")}
  if "model" in dict(row.axes):  # each half of the model has layers of its own
    own = door.clean.layers["w"]
    assert (own[0] != own[1]).any()


def add(x):
  return np.sum(np.float64(x), 0)


def of_owners(owners, row, layers):
  """The residuals of all owners, as sums in the shapes of the stacked leaves."""
  plans, options = [], row.options

  def plan(layer):
    given = options["codec"], "data", as_exchange(options["exchange"])
    one = Compression(*given, ErrorFeedback(), None, None, 0, "shared")
    plans.append(layer_exchange(one, layer).plan)

  one = jax.tree.map(lambda x: np.stack([x[0]] * row.workers), layers)
  jax.eval_shape(jax.vmap(plan, axis_name="data"), one)
  total = [np.zeros(x.shape) for x in jax.tree.leaves(layers)]
  for axes, matrices in owned_matrices(plans[0]).items():
    for matrix, array in zip(matrices, owners[axes], strict=True):
      for number, slot, like in matrix.leaves():
        for i, rows in enumerate(np.swapaxes(array, 0, 1)):
          own = jnp.asarray(rows.reshape(-1, *rows.shape[2:])[slot.start : slot.stop])
          total[number][i] = from_tiles(own, like, matrix.codec)
  return total


def exact(row):
  """Whether layers are what others decode, and no half precision rounds."""
  single = row.axis_name == "data" and row.kind != "explicit"
  return row.keeps and row.dtype == np.float32 and row.door != "copy" and single


@of_rows(exact)
def test_what_came_and_what_is_kept_are_what_was_given(row):
  """The means or the rows, and the residuals of all workers and of owners, in sums."""
  result, (_, grads, old) = run(row).door.clean, run(row).turn.clean
  for i, (came, grad) in enumerate(
    zip(*map(jax.tree.leaves, (result.layers, grads)), strict=True)
  ):
    left, given = add(result.kept[i]), add(grad)
    given = given + add(jax.tree.leaves(old)[i])
    if row.door == "scan":
      left = left + row.workers * np.float64(came[0])
      layers = jax.tree.map(lambda x: x[0], result.layers)
      now, before = (of_owners(x, row, layers)[i] for x in (result.owners, old.owners))
      left, given = left + row.workers * now, given + row.workers * before
    else:
      left = left + np.concatenate(np.float64(came), axis=1)
    # Means, residuals and their sums in float32, of numbers up to 2**8.
    np.testing.assert_allclose(left, given, rtol=0, atol=2**-12)


@of_rows(lambda row: row.keeps and row.length > 2 and row.axis_name == "data")
def test_a_nan_is_seen_and_stays_out_of_residuals(row):
  """That of layer 1 on one worker: layers below have it, too, and those above not."""
  found, old, sender = run(row).door.dirty, run(row).turn.dirty[2], row.workers - 2
  leaves = zip(
    jax.tree.leaves(found.layers), found.kept, jax.tree.leaves(old), strict=False
  )
  for came, kept, before in leaves:
    assert np.isfinite(np.float32(came[:, 2:])).all()
    assert np.isfinite(kept).all()
    seen = np.isnan(np.float32(came))[:, :2]
    if row.door == "scan":
      assert seen.any((0, 2) if came.ndim == 3 else (0, 2, 3)).all()
      assert_same_bits(came, np.stack([came[0]] * row.workers))
      assert_same_bits(kept[:, :2][seen], before[:, :2][seen])
    else:
      seen = np.concatenate(seen, axis=1)
      assert seen.any()
      # Only the worker that sent it keeps what it had: others have sent their own.
      assert_same_bits(kept[sender, :2][seen], before[sender, :2][seen])
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(found.owners))


def sent(report):
  """The bytes of each kind of collective."""
  found = collections.Counter()
  for x in report.collectives:
    found[x.kind] += x.times * x.bytes_sent
  return found


def has_devices(row):
  """Whether programs send alike. Rows of whole layers are gathered for a residual."""
  single = row.kind in ("shard_map", "explicit") and row.axis_name == "data"
  return single and not (row.door == "whole" and row.keeps)


@of_rows(has_devices)
def test_as_many_bytes_are_sent_as_in_turn(row):
  """But for one of two gathers of the last layer, and for whole layers no gather."""
  door, turn = (sent(x.report) for x in (run(row).door, run(row).turn))
  gathers, parts = door.pop("all-gather", 0), turn.pop("all-gather", 0)
  assert door == turn and (door or gathers)
  match row.door:
    case "scan":
      assert gathers == parts
    case "shards":
      assert gathers * 2 * row.length == parts * (2 * row.length - 1) > 0
    case "whole":
      assert not gathers and set(door) == {"all-to-all"}
  if row.door in ("scan", "whole"):
    reports = run(row).door.report, run(row).turn.report
    assert reports[0].dense_bytes == reports[1].dense_bytes > 0


def _has(equation, name):
  inner = jaxprs_in_params(equation.params)
  return equation.primitive.name == name or any(
    _has(x, name) for jaxpr in inner for x in jaxpr.eqns
  )


def _loops(jaxpr):
  for equation in jaxpr.eqns:
    if equation.primitive.name == "scan":
      yield equation.params["jaxpr"].jaxpr
    for inner in jaxprs_in_params(equation.params):
      yield from _loops(inner)


def test_nothing_under_way_needs_the_layer_that_computes():
  """Nor does that layer need it: a compiler may run the two side by side."""
  row = PLAIN[0]
  x, weights = whole(4, ROWS, table_scans.WIDTH), whole(4, 4, table_scans.WIDTH)
  step = lambda x, weights: scan_doors.door_of(row, x, weights, None, None).layers
  trace = jax.make_jaxpr(mapped("shard_map", step, 4))(x, weights)
  sends = lambda eqn: _has(eqn, "all_to_all") or _has(eqn, "all_gather_invariant")
  (loop,) = (x for x in _loops(trace.jaxpr) if any(map(sends, x.eqns)))

  def behind(starts):
    """The equations that need a result of those that ``starts`` names."""
    reached, found = set(), []
    for equation in loop.eqns:
      inputs = {x for x in equation.invars if not isinstance(x, Literal)}
      if inputs & reached:
        found.append(equation)
      if inputs & reached or starts(equation):
        reached.update(equation.outvars)
    return found

  product = lambda equation: _has(equation, "dot_general")
  assert sum(map(sends, loop.eqns)) == 2 and any(map(product, loop.eqns))
  assert not any(map(sends, behind(product)))
  assert not any(map(product, behind(sends)))
