"""Scans over layers exchange in their loop as layer after layer would, to the bit.

The rows are those of ``table_scans``: of `scan` and of `scan_shards`, with and without
a copy inside a host, and with layers that each worker has. The last tests are of what
a scan takes beside layers, and of maps over whole models around it.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params

from gradcomp import parallel
from gradcomp.codecs import Dense
from tests.parallel import scan_doors, table_scans
from tests.parallel.table_scans import run
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits
from tests.support.cases.parallel import mapped, numbers
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
  """Values, gradients, residuals of workers and of owners; also where one has a NaN.

  What those keep is what their messages lose, and nothing that is not finite: laws of
  `tests/table`, and of `test_gather`.
  """
  door, turn = run(row).door, run(row).turn
  assert_same_bits(door.clean, turn.clean[0])
  assert_same_bits(door.dirty, turn.dirty[0])
  assert all(x.any() for x in jax.tree.leaves(door.clean[:3]))
  assert bool(door.clean.kept) == row.keeps  # of float32 all zeros
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(door.dirty[3:]))
  if row.door == "whole":  # rows and residuals of shards have the dtype of these
    assert {x.dtype for x in jax.tree.leaves(door.clean.layers)} == {np.dtype("f4")}
  if "model" in dict(row.axes):  # each half of the model has layers of its own
    own = door.clean.layers["w"]
    assert (own[0] != own[1]).any()


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


MEAN = dict(axis_name="data", codec=Dense())
LAYER = lambda x, w: (x @ w, None)
SAVED = jax.checkpoint_policies.everything_saveable


@pytest.mark.parametrize("mode, policy", [("shard_map", None), ("vmap", SAVED)])
def test_all_that_a_scan_may_take(mode, policy):
  """Carries of several kinds, outputs, keys a layer, and arrays that a body reads.

  All are as with ``lax.scan``, and so are the gradients of what is not exchanged.
  """
  layers, x, own = numbers(3, 8, 8), numbers(4, 2, 8), numbers(4, 8)
  keys = jax.random.split(jax.random.key(0), 3)

  def loss(scan, layers, x, own):
    rows = jnp.arange(2)

    def body(carry, layer):
      x, number = carry
      w, key = layer
      noise = jax.random.normal(key, (8,))
      x = jnp.sin(x @ w + own * noise) * (rows[:, None] + number)
      return (x, number + 1), {"x": x, "number": number}

    (x, number), ys = scan(body, (x, jnp.int32(1)), (layers, keys))
    return jnp.mean(x) + jnp.mean(ys["x"] ** 2), (x, number, ys)

  def both(x, own):
    ours = lambda *given: parallel.scan(*given, policy=policy, **MEAN)
    grad = lambda scan: jax.grad(
      lambda *given: loss(scan, *given), (0, 1, 2), has_aux=True
    )
    shared = jnp.asarray(layers)
    theirs, aux = grad(lax.scan)(varying(shared), x, own)
    got, found = grad(ours)(shared, x, own)
    plain, _ = ours(lambda x, w: (x @ w, None), x, shared), None
    want = lax.scan(lambda x, w: (x @ w, None), x, varying(shared))
    return got, (lax.pmean(theirs[0], "data"), *theirs[1:]), (found, aux), (plain, want)

  def varying(x):
    return lax.pcast(x, "data", to="varying") if mode == "shard_map" else x

  got, want, values, plain = mapped(mode, both, 4)(x, own)
  assert_same_bits(values[0], values[1])
  assert_same_bits(plain[0], plain[1])
  for ours, theirs in zip(got, want, strict=True):
    # The two programs compute the products of a layer in orders of their own.
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


def test_several_models_are_mapped_over_and_scans_without_a_gradient_too():
  """Each model gets the bits that it would alone."""
  x, layers = whole(4, 2, 8), whole(2, 3, 8, 8, seed=1)

  def of_all(x, layers):
    loss = lambda layers, x: jnp.sum(parallel.scan(LAYER, x, layers, **MEAN)[0])
    grad = lambda x: jax.grad(loss)(layers, x)
    return jax.vmap(grad, axis_name="data")(x)

  got = jax.jit(jax.vmap(of_all, in_axes=(None, 0)))(x, layers)
  want = [jax.jit(of_all)(x, each) for each in layers]
  assert_same_bits(got, jnp.stack(want))
  scan = lambda x: parallel.scan(LAYER, x, layers[0], **MEAN)[0]
  values = jax.vmap(lambda x: jax.vmap(scan)(x), axis_name="data")
  assert np.isfinite(values(jnp.asarray(x))).all()
