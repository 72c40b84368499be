"""Scans over layers exchange in their loop as layer after layer would, to the bit."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp.codecs import Dense
from tests.parallel import table_scans
from tests.parallel.table_scans import run
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.parallel import mapped, mapped_over, nbytes, numbers
from tests.support.cases.scan import ROWS, WIDTH, body, layers_of, loss_of, whole

PLAIN, SLOW = map(table_scans.rows, (table_scans.TABLE, table_scans.SLOW))


def of_rows(chosen):
  """The rows for which a law is said; those that are not of every run are slow."""
  plain = [*filter(chosen, PLAIN)]
  assert plain
  cases = plain + slow(*[(x,) for x in filter(chosen, SLOW)])
  return pytest.mark.parametrize("row", cases, ids=str)


@of_rows(lambda row: True)
def test_results_are_those_of_layers_in_turn(row):
  """Values, gradients, residuals of workers and of owners; also where one has a NaN."""
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
  x, weights = whole(4, ROWS, WIDTH), whole(4, 4, WIDTH)
  step = lambda x, weights: table_scans.door_of(PLAIN[0], x, weights, None, None).layers
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
      x = jnp.sin(x @ w + own * jax.random.normal(key, (8,))) * (rows[:, None] + number)
      return (x, number + 1), {"x": x, "number": number}

    (x, number), ys = scan(body, (x, jnp.int32(1)), (layers, keys))
    return jnp.mean(x) + jnp.mean(ys["x"] ** 2), (x, number, ys)

  def both(x, own):
    ours = lambda *given: parallel.scan(*given, policy=policy, **MEAN)
    grad = lambda scan: jax.grad(lambda *x: loss(scan, *x), (0, 1, 2), has_aux=True)
    varying = lambda x: lax.pcast(x, "data", to="varying") if mode == "shard_map" else x
    shared = jnp.asarray(layers)
    theirs, aux = grad(lax.scan)(varying(shared), x, own)
    got, found = grad(ours)(shared, x, own)
    values = (found, ours(LAYER, x, shared)), (aux, lax.scan(LAYER, x, varying(shared)))
    return got, (lax.pmean(theirs[0], "data"), *theirs[1:]), values

  got, want, values = mapped(mode, both, 4)(x, own)
  assert_same_bits(*values)
  for ours, theirs in zip(got, want, strict=True):
    # The two programs compute the products of a layer in orders of their own.
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1, 3])
def test_several_models_are_mapped_over_and_scans_without_a_gradient_too(length):
  """Each model gets the bits that it would alone."""
  x, layers = whole(4, 2, 8), whole(2, length, 8, 8, seed=1)

  def of_all(x, layers):
    loss = lambda layers, x: jnp.sum(parallel.scan(LAYER, x, layers, **MEAN)[0])
    return jax.vmap(lambda x: jax.grad(loss)(layers, x), axis_name="data")(x)

  got = jax.jit(jax.vmap(of_all, in_axes=(None, 0)))(x, layers)
  assert_same_bits(got, jnp.stack([jax.jit(of_all)(x, each) for each in layers]))
  scan = lambda x: parallel.scan(LAYER, x, layers[0], **MEAN)[0]
  assert np.isfinite(jax.vmap(jax.vmap(scan), axis_name="data")(jnp.asarray(x))).all()


# In plain jit under Explicit axes.
STACK = jnp.ones((3, 8, 8))
explicit = lambda: jax.set_mesh(modes.mesh(4, AxisType.Explicit))
on = lambda spec, x: jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), spec))


def test_values_outputs_and_other_gradients_are_those_of_a_plain_scan():
  """A body may be a Partial: its arrays have gradients of the whole batch."""
  layers, x = whole(3, 8, 8), whole(4, 2, 8, seed=1)

  def of(scan, layers, x, scale):
    layer = lambda carry, w, scale: ((carry[0] @ w * scale, carry[1] + 1), carry[0])
    given = jax.tree_util.Partial(layer, scale=scale), (x, jnp.int32(0)), layers
    (x, number), ys = scan(*given)
    return jnp.sum(x) + jnp.sum(ys), (x, number, ys)

  grad = lambda scan: jax.grad(lambda *given: of(scan, *given), (0, 1, 2), has_aux=True)
  scale = jnp.float32(2)
  want = jax.jit(grad(lax.scan))(layers, x, scale)
  with explicit():
    scan = lambda *given: parallel.scan(*given, **MEAN)
    both = lambda *given: (grad(scan)(*given), of(scan, *given)[1])
    got, value = jax.jit(both)(layers, on(P("data"), x), scale)
  assert_same_bits(got, want)  # of whole numbers, of which all sums are exact
  assert_same_bits(value, want[1])


def types_of(layers=STACK, body=LAYER, x=None, **options):
  """The types of a gradient, by the sum of the last layer and of all outputs."""

  def loss(layers, x):
    last, ys = parallel.scan(body, x, layers, **MEAN | options)
    return jnp.sum(last) + sum(map(jnp.sum, jax.tree.leaves(ys)))

  x = on(P("data"), jnp.ones((8, 8))) if x is None else x
  return jax.eval_shape(jax.grad(loss), layers, x)


def test_what_plain_jit_cannot_take_is_named():
  with explicit():
    array, whole = on(P(), jnp.ones(8)), on(P(), STACK)
    deferred = gradcomp.defer_reduction(whole, axis_name="data")
    for wrong in (on(P(None, "data"), STACK[:, :4]), deferred):
      with pytest.raises(ValueError, match=says("`layers`", "data", "axis=")):
        types_of(wrong)
    with pytest.raises(ValueError, match=says("`carry`", "'data'", "jax.device_put")):
      types_of(x=jnp.ones((8, 8)))
    with pytest.raises(ValueError, match=says("`body`", "float32[]", "y[None]")):
      types_of(body=lambda x, w: (x @ w, jnp.sum(x)))
    with pytest.raises(NotImplementedError) as raised:
      types_of(body=lambda x, w: (x @ w * array, None))
    assert "jax.tree_util.Partial(body" in str(raised.value.__notes__)


# Words that a host keeps, and whole layers.
(ROW,) = (row for row in PLAIN if row.door == "copy")
N, CHIPS, LENGTH, OWN = ROW.workers, 2, ROW.length, WIDTH // ROW.workers
of = lambda *shape: jax.ShapeDtypeStruct((N, *shape), "float32")
SHAPES = of(ROWS, WIDTH), {"b": of(LENGTH, OWN), "w": of(LENGTH, OWN, WIDTH)}
SUMS = dict(axis_name="data", codec=Dense(), axis=0)
scanned = lambda inner, x, shards: ROW.scan(body, x, shards, backward_axis_name=inner)


def payload(name):
  """The bytes of a worker's shards of one layer."""
  return sum(nbytes(ROW.options[name], size) for size in (OWN, OWN * WIDTH))


def test_the_backward_pass_sends_no_weights_between_hosts():
  parts = run(ROW).door.report.by_axis
  both, weights = LENGTH * (N - 1), payload("params")
  assert {axis: sent(part) for axis, part in parts.items()} == {
    "host,chip": {"all-gather": both * weights, "all-to-all": both * payload("grads")},
    "chip": {"all-gather": (LENGTH - 1) * (N - N // CHIPS) * weights},
  }


def test_a_worker_keeps_the_share_of_a_chip():
  """The last layer needs none: the backward pass has all of its words."""

  def saved(inner):
    pull = lambda x, w: jax.tree.leaves(jax.vjp(lambda w: scanned(inner, x, w), w)[1])
    found = jax.eval_shape(mapped_over(dict(ROW.axes), pull), *SHAPES)
    return sum(x.size * x.dtype.itemsize for x in found) // N

  assert saved("chip") - saved(None) == (LENGTH - 1) * N * payload("params") // CHIPS


@pytest.mark.parametrize("inner", ["model", ROW.axis_name, (), ("chip", "chip"), 1])
def test_axes_that_are_not_those_of_some_workers_are_refused(inner):
  run = lambda x, w: scanned(inner, x, w)
  words = ["`backward_axis_name`", "('host', 'chip')", str(inner)]
  with pytest.raises(ValueError, match=says(*words)):
    jax.eval_shape(mapped_over(dict(ROW.axes), run), *SHAPES)


def test_whole_layers_are_constant():
  layers, x, weights = layers_of(3), whole(ROWS, WIDTH, seed=5), whole(3, WIDTH, seed=6)
  shards = jax.tree.map(lambda x: np.stack(np.split(x, 4, axis=1)), layers)

  def loss(shards, layers):
    return loss_of(parallel.scan(body, x, shards, whole=layers, **SUMS), weights)

  grads = jax.vmap(jax.grad(loss, (0, 1)), (0, None), axis_name="data")
  rows, zeros = jax.device_get(jax.jit(grads)(shards, layers))
  assert all(x.any() for x in jax.tree.leaves(rows))
  assert not any(x.any() for x in jax.tree.leaves(zeros))


@pytest.mark.parametrize(
  "spec, missing", [(P("model"), "data"), (P("data"), "model")], ids=str
)
def test_a_residual_that_jax_would_add_up_is_refused(spec, missing):
  """It is typed as equal on all workers, or over an axis over which shards differ."""
  run = lambda x, w, e: parallel.scan(LAYER, x, w, residual=e, **SUMS)[0]
  names, kinds = ("data", "model"), (AxisType.Auto,) * 2
  every, mesh = P(names), jax.make_mesh((2, 2), names, kinds)
  specs = dict(in_specs=(every, P(None, names), spec), out_specs=every)
  shapes = jnp.ones((8, 4)), jnp.ones((3, 8, 4)), jnp.ones((6, 4, 4))
  told = says("`residual`", f"['{missing}']", "in_specs")
  with pytest.raises(ValueError, match=told):
    jax.eval_shape(jax.shard_map(run, mesh=mesh, **specs), *shapes)
