"""Layers in a loop exchange their gradients as behind the loop, to the bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp._src.codecs.tiles import from_tiles
from gradcomp._src.core.compression import Compression
from gradcomp._src.core.feedback import ErrorFeedback
from gradcomp._src.exchange.auto import as_exchange
from gradcomp._src.exchange.owners import owned_matrices
from gradcomp._src.kernels.common.threefry import fold_key, key_words
from gradcomp._src.parallel.scan_layer import layer_exchange
from gradcomp.codecs import (
  QSGD,
  BlockTop,
  Dense,
  FloatCast,
  Natural,
  OneBit,
  RandomK,
  Ternary,
)
from gradcomp.cost import allocate
from gradcomp.exchange import Hierarchical
from tests.plugins.slow_cases import slow
from tests.support import laws
from tests.support.assertions import assert_same_bits
from tests.support.cases.parallel import mapped
from tests.support.cases.scan import KEY, ROWS, WIDTH, body, loss_of, stack, whole

RANDOM = QSGD(bits=4, bucket_size=64)
LAYER = {"w": np.eye(64, 32, dtype=np.float32), "b": np.ones(32, np.float32)}
OPTIONS = dict(axis_name="data", codec=RANDOM, exchange="two_shot")


def gradients(layers, x, weights):
  """The gradient of each layer on this worker, as it comes without an exchange."""
  own = gradcomp.defer_reduction(layers, axis_name="data")
  loss = lambda layers: loss_of(lambda x: lax.scan(body, x, layers), x, weights)
  return jax.grad(loss)(own)


def first(layers, options):
  """A residual that is not zero, of numbers that sums do not round."""
  zeros = parallel.scan_residual(layers, **options)
  own = lax.axis_index(options["axis_name"])
  wave = lambda x: (jnp.arange(x.size) * (3 + own) % 17 - 8).reshape(x.shape) / 64
  return jax.tree.map(lambda x: x + wave(x).astype(jnp.float32), zeros)


def in_the_loop(layers, x, weights, residual, options):
  """``(means, new residual)`` of a scan whose backward pass exchanges."""

  def loss(layers, residual):
    scan = lambda x: parallel.scan(
      body, x, layers, residual=residual, key=KEY, **options
    )
    return loss_of(scan, x, weights)

  return jax.grad(loss, (0, 1))(layers, residual)


def dropping(options):
  """The options of a message without any residual: of workers, or of owners."""
  exchange = as_exchange(options["exchange"])
  if exchange.keeps:
    exchange = dataclasses.replace(exchange, feedback=False)
  return options | {"exchange": exchange, "feedback": None}


def behind_it(grads, residual, options):
  """``(means, residuals of leaves, of owners)`` by a message for each layer."""
  kept = dropping(options) if residual is None else options | {"feedback": "error"}
  one = gradcomp.compress(message_bytes=None, **kept)
  treedef = jax.tree.structure(grads)

  def exchanged(given):
    number, grads, residual = given
    state = one.init(grads)._replace(key=fold_key(key_words(KEY), number))
    if residual is not None:
      own = jax.tree.unflatten(treedef, residual.leaves)
      state = state._replace(residual=own, server_residual=residual.owners or None)
    means, state = one.update(grads, state)
    return means, jax.tree.leaves(state.residual), state.server_residual or {}

  length = len(jax.tree.leaves(grads)[0])
  return lax.map(exchanged, (jnp.arange(length, dtype=jnp.int32), grads, residual))


def both(options, *, length, keeps, dtype=np.float32):
  layers = stack(length, dtype)

  def run(x, weights):
    residual = first(layers, options) if keeps else None
    means, new = in_the_loop(layers, x, weights, residual, options)
    grads = gradients(layers, x, weights)
    want, leaves, owners = behind_it(grads, residual, options)
    kept = () if new is None else (new.leaves, new.owners)
    return (means, *kept), (want, *((leaves, owners) if keeps else ())), grads, residual

  return run


def check_same(mode, workers, options, *, length, keeps, dtype=np.float32):
  x = whole(workers, ROWS, WIDTH, seed=5).astype(dtype)
  weights = whole(workers, length, WIDTH, seed=6)
  run = both(options, length=length, keeps=keeps, dtype=dtype)
  got, want, grads, residual = mapped(mode, run, workers)(x, weights)
  assert_same_bits(got, want)
  assert all(np.asarray(x).any() for x in jax.tree.leaves(got[0]))
  return jax.tree.map(np.asarray, (got, grads, residual))


MODES = [
  ("vmap", 4, 4, True),
  ("shard_map", 8, 3, False),
  *slow(
    ("shard_map", 2, 5, True),
    ("shard_map", 8, 4, True),
    ("shard_map_unchecked", 3, 4, True),
    ("pmap", 4, 3, True),
    ("vmap", 5, 2, False),
    ("vmap", 4, 1, True),
  ),
]


@pytest.mark.parametrize("mode, workers, length, keeps", MODES)
def test_means_and_residuals_are_those_of_an_exchange_behind_the_loop(
  mode, workers, length, keeps
):
  """In every mode, and for fewer layers than an exchange has stages."""
  check_same(mode, workers, OPTIONS, length=length, keeps=keeps)


EXCHANGES = {
  "all_gather": dict(codec=RANDOM, exchange="all_gather"),
  "auto": dict(codec=RANDOM, exchange="auto"),
  "plain mean": dict(codec=Dense(), exchange="psum"),
  "shared scales": dict(codec=laws.kept(Ternary()), exchange="two_shot"),
  "sums of codes": dict(codec=laws.kept(Ternary()), exchange="psum"),
  "aps": dict(codec=FloatCast(exponent_bits=5, mantissa_bits=2), exchange="two_shot"),
  "ring": dict(codec=RANDOM, exchange="ring"),
  "groups": dict(codec=RANDOM, exchange=Hierarchical(group_size=2)),
  "natural": dict(codec=Natural(), exchange="two_shot"),
  "one bit": dict(codec=OneBit(bucket_size=64), exchange="two_shot"),
  "sparse": dict(codec=BlockTop(), exchange="all_gather"),
  "some elements": dict(codec=RandomK(density=0.1), exchange="auto"),
  "bits for each leaf": dict(exchange="all_gather"),  # with the codec of allocated()
}
FEW = ("all_gather", "shared scales")


def allocated(name):
  """The options of an exchange; a plan takes seconds, which no collection should."""
  found = EXCHANGES.get(name, {})
  if name == "bits for each leaf":
    found = found | {"codec": allocate([LAYER], uniform=RANDOM).policy}
  return found


@pytest.mark.parametrize("name", [*FEW, *slow(*[x for x in EXCHANGES if x not in FEW])])
def test_every_codec_and_exchange_goes_the_same_way(name):
  options = dict(axis_name="data", **allocated(name))
  check_same("vmap", 4, options, length=4, keeps=True)


@pytest.mark.parametrize("keeps", slow(False, True))
def test_layers_of_half_precision(keeps):
  """Means are cast, and what the cast loses joins the residual."""
  check_same("vmap", 4, OPTIONS, length=3, keeps=keeps, dtype=jnp.bfloat16)


def of_owners(owners, layers, options):
  """The residuals of all owners, as sums in the shapes of the stacked leaves."""
  plans = []

  def plan(layer):
    given = options["codec"], "data", as_exchange(options["exchange"])
    one = Compression(*given, ErrorFeedback(), None, None, 0, "shared")
    plans.append(layer_exchange(one, layer).plan)

  layer = jax.tree.map(lambda x: jnp.stack([x[0]] * 4), layers)
  jax.eval_shape(jax.vmap(plan, axis_name="data"), layer)
  total = [np.zeros(x.shape) for x in jax.tree.leaves(layers)]
  for axes, matrices in owned_matrices(plans[0]).items():
    for matrix, array in zip(matrices, owners[axes], strict=True):
      for number, slot, like in matrix.leaves():
        for i, rows in enumerate(np.swapaxes(array, 0, 1)):
          own = jnp.asarray(rows.reshape(-1, *rows.shape[2:])[slot.start : slot.stop])
          total[number][i] = from_tiles(own, like, matrix.codec)
  return total


@pytest.mark.parametrize("name", ["two_shot", *slow(*EXCHANGES)])
def test_what_came_and_what_is_kept_are_what_was_given(name):
  """The means, the residuals of all workers, and those of owners, in sums of four."""
  options = OPTIONS | allocated(name)
  got, grads, residual = check_same("vmap", 4, options, length=3, keeps=True)
  means, kept, owners = got
  add = lambda x: np.sum(x, 0, dtype=np.float64).reshape(np.shape(x)[1:])
  layers = jax.tree.map(lambda x: x[0], means)
  now, before = (of_owners(x, layers, options) for x in (owners, residual.owners))
  leaves = zip(jax.tree.leaves(layers), jax.tree.leaves(grads), strict=True)
  for i, (mean, grad) in enumerate(leaves):
    left = 4.0 * mean + add(kept[i]) + 4 * now[i]
    want = add(grad) + add(residual.leaves[i]) + 4 * before[i]
    # Means, residuals and their sums in float32, of numbers up to 2**8.
    np.testing.assert_allclose(left, want, rtol=0, atol=2**-12)


# Each exchange, in all of its stages.
STAGES = ("all_gather", "ring", "groups", "plain mean", "sums of codes")


@pytest.mark.parametrize("name", ["two_shot", *slow(*STAGES)])
def test_a_nan_is_seen_by_all_and_stays_out_of_residuals(name):
  """That of layer 1 on one worker: layers below have it, too, and those above not."""
  layers, options = stack(4), OPTIONS | EXCHANGES.get(name, {})
  x, weights = whole(4, ROWS, WIDTH, seed=5), whole(4, 4, WIDTH, seed=6)
  weights[2, 1] = np.nan

  def run(x, weights):
    residual = first(layers, options)
    return *in_the_loop(layers, x, weights, residual, options), residual

  means, new, old = mapped("vmap", run, 4)(x, weights)
  for mean, kept, before in zip(
    jax.tree.leaves(means), new.leaves, old.leaves, strict=True
  ):
    assert np.isfinite(mean[:, 2:]).all()
    seen = np.isnan(mean[:, :2])
    assert seen.any((0, 2) if mean.ndim == 3 else (0, 2, 3)).all()
    assert_same_bits(mean, jnp.stack([mean[0]] * 4))
    assert np.isfinite(kept).all()
    assert_same_bits(kept[:, :2][seen], before[:, :2][seen])
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(new.owners))


def report_of(function, *arrays):
  compiled = mapped("shard_map", function, 4).lower(*arrays).compile()
  return gradcomp.wire_report(compiled)


@pytest.mark.parametrize("name", ["two_shot", *slow(*STAGES)])
def test_as_many_bytes_are_sent_as_behind_the_loop(name):
  length, options = 5, OPTIONS | EXCHANGES.get(name, {})
  layers = stack(length)
  x, weights = whole(4, ROWS, WIDTH), whole(4, length, WIDTH)
  run = lambda x, weights: in_the_loop(layers, x, weights, None, options)[0]
  report = report_of(run, x, weights)

  def one_layer(x):
    grads = jax.tree.map(lambda w: w[0] * x[0, 0], layers)
    one = gradcomp.compress(message_bytes=None, **dropping(options))
    return one.update(grads, one.init(grads))[0]

  one = report_of(one_layer, x)
  assert report.bytes_sent == length * one.bytes_sent > 0
  assert report.dense_bytes == length * one.dense_bytes


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
  layers = stack(4)
  x, weights = whole(4, ROWS, WIDTH), whole(4, 4, WIDTH)
  run = lambda x, weights: in_the_loop(layers, x, weights, None, OPTIONS)[0]
  trace = jax.make_jaxpr(mapped("shard_map", run, 4))(x, weights)
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


@pytest.mark.parametrize("check_vma", [True, *slow(False)])
def test_layers_that_are_sharded_over_another_axis(check_vma):
  """Over two axes of workers, in groups, for layers that are cut over a third one.

  There are more layers than stages, so that messages of each stage cross the loop.
  """
  devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
  mesh = jax.sharding.Mesh(devices, ("host", "chip", "model"))
  workers, every = ("host", "chip"), P(("host", "chip", "model"))
  options = dict(axis_name=workers, codec=RANDOM, exchange="hierarchical")
  layers, x = stack(6), whole(8 * ROWS, WIDTH, seed=5)
  weights = whole(8, 6, WIDTH, seed=6)

  def run(layers, x, weights):
    old = first(layers, options)
    got, new = in_the_loop(layers, x, weights[0], old, options)
    own = gradcomp.defer_reduction(layers, axis_name=workers)
    loss = lambda own: loss_of(lambda x: lax.scan(body, x, own), x, weights[0])
    want, leaves, owners = behind_it(jax.grad(loss)(own), old, options)
    return (got, want), ((new.leaves, new.owners), (leaves, owners))

  # Each half of the model has layers of its own.
  stacked = jax.tree.map(lambda x: jnp.concatenate([x, 2 * x], 0), layers)
  step = jax.shard_map(
    run,
    mesh=mesh,
    in_specs=(P("model"), every, every),
    out_specs=(P("model"), every),
    check_vma=check_vma,
  )
  (got, want), (new, kept) = jax.jit(step)(stacked, x, weights)
  assert_same_bits(got, want)
  assert_same_bits(new, kept)
  assert np.asarray(got["w"][:6] != got["w"][6:]).any()
