"""Layers in a loop in plain jit under Explicit axes: the bits of a map of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp.codecs import QSGD, Dense, Natural, Ternary
from gradcomp.exchange import Hierarchical
from tests.plugins.slow_cases import slow
from tests.support import laws
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.scan import KEY, ROWS, WIDTH, stack, whole

RANDOM = QSGD(bits=4, bucket_size=64)
PLAIN = dict(axis_name="data", codec=Dense())
STACK = jnp.ones((3, 8, 8))
LAYER = lambda x, w: (x @ w, None)


def body(x, layer):
  """A layer of ``[workers, rows, width]``, with an output for each worker."""
  h = x @ layer["w"] + layer["b"]
  x = jnp.where(h > 0, h, 0).astype(x.dtype)
  return x, jnp.sum(x, 1)


def on_mesh(workers):
  mesh = jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])
  return jax.set_mesh(mesh)


def on(spec, x):
  return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), spec))


def cut(x):
  """The array in parts of its first axis, one for each worker."""
  return on(P("data"), x)


def gradients(options, layers, residual, x, weights, share):
  """Those of a share of a loss that is linear in the last layer and in all outputs."""

  def loss(layers, residual, x):
    given = dict(residual=residual, key=KEY, **options)
    x, ys = parallel.scan(body, x, layers, **given)
    of_last, of_all = weights
    return share * (jnp.sum(x[:, 0] * of_last) + jnp.sum(ys * of_all))

  return jax.grad(loss, (0, 1, 2))(layers, residual, x)


def addends(residual, share):
  """The residual in the units of addends; owners have it in those of means."""
  if residual is None:
    return None
  small = [x * jnp.float32(share) for x in residual.leaves]
  return residual._replace(leaves=small)


EXCHANGES = {
  "two_shot": dict(codec=RANDOM, exchange="two_shot"),
  "all_gather": dict(codec=RANDOM, exchange="all_gather"),
  "ring": dict(codec=RANDOM, exchange="ring"),
  "groups": dict(codec=RANDOM, exchange=Hierarchical(group_size=2)),
  "plain mean": dict(codec=Dense(), exchange="psum"),
  "sums of codes": dict(codec=laws.kept(Ternary()), exchange="psum"),
  "natural": dict(codec=Natural(), exchange="two_shot"),
}
CASES = [
  ("two_shot", 4, True, np.float32),
  *slow(
    ("two_shot", 8, True, np.float32),
    ("two_shot", 2, False, np.float32),
    ("two_shot", 4, True, jnp.bfloat16),
    ("two_shot", 4, False, jnp.bfloat16),
    *[(name, 4, True, np.float32) for name in EXCHANGES if name != "two_shot"],
    ("all_gather", 8, False, np.float32),
  ),
]


@pytest.mark.parametrize("name, workers, keeps, dtype", CASES)
def test_gradients_are_those_of_a_map_of_the_workers(name, workers, keeps, dtype):
  """Of the mean loss: addends are 1/N of each worker's own, and so are residuals."""
  options, length = dict(axis_name="data", **EXCHANGES[name]), 3
  layers = stack(length, dtype)
  x = jnp.asarray(whole(workers, ROWS, WIDTH, seed=5), dtype)
  of_last = jnp.asarray(whole(workers, WIDTH, seed=6), dtype)
  of_all = jnp.asarray(whole(length, workers, WIDTH, seed=7), dtype)
  share = 1 / workers

  def local(layers, residual, x, weights):
    return gradients(options, layers, residual, x, weights, 1)

  with on_mesh(workers):
    x, of_last = cut(x), cut(of_last)
    weights = of_last, on(P(None, "data"), of_all)
    residual = None
    if keeps:
      zeros = jax.jit(lambda layers: parallel.scan_residual(layers, **options))(layers)
      # Of few bits, which no product by a power of two changes.
      wave = lambda x: (jnp.arange(x.size) * 3 % 17 - 8).reshape(x.shape) / 64
      residual = jax.tree.map(lambda x: x + cut(wave(x).astype(x.dtype)), zeros)
    of_jit = lambda *given: gradients(options, *given, share)
    got = jax.jit(of_jit)(layers, addends(residual, share), x, weights)
    rows = P("data")
    specs = (P(), rows, rows, (rows, P(None, "data")))
    mapped = jax.shard_map(local, in_specs=specs, out_specs=(P(), rows, rows))
    means, new, of_x = jax.jit(mapped)(layers, residual, x, weights)
    want = means, addends(new, share), of_x * jnp.asarray(share, dtype)
  assert_same_bits(got, want)
  assert all(np.asarray(x).any() for x in jax.tree.leaves((got[0], got[2])))


def test_values_outputs_and_other_gradients_are_those_of_a_plain_scan():
  """A body may be a Partial: its arrays have gradients of the whole batch."""
  layers, x = jnp.asarray(whole(3, 8, 8)), whole(4, 2, 8, seed=1)

  def of(scan, layers, x, scale):
    layer = lambda carry, w, scale: ((carry[0] @ w * scale, carry[1] + 1), carry[0])
    given = jax.tree_util.Partial(layer, scale=scale), (x, jnp.int32(0)), layers
    (x, number), ys = scan(*given)
    return jnp.sum(x) + jnp.sum(ys), (x, number, ys)

  grad = lambda scan: jax.grad(lambda *given: of(scan, *given), (0, 1, 2), has_aux=True)
  scale = jnp.float32(2)
  want = jax.jit(grad(lax.scan))(layers, x, scale)
  with on_mesh(4):
    scan = lambda *given: parallel.scan(*given, **PLAIN)
    got = jax.jit(grad(scan))(layers, cut(x), scale)
    value = jax.jit(lambda *given: of(scan, *given)[1])(layers, cut(x), scale)
  assert_same_bits(got, want)  # of whole numbers, of which all sums are exact
  assert_same_bits(value, want[1])


@pytest.mark.parametrize("exchange", ["two_shot", *slow("all_gather")])
def test_as_many_bytes_are_sent_as_in_a_map_and_no_more(exchange):
  options = dict(axis_name="data", codec=RANDOM, exchange=exchange, key=KEY)

  def loss(layers, x):
    return jnp.sum(parallel.scan(body, x, layers, **options)[0])

  layers, grad = stack(3), jax.grad(loss)
  with on_mesh(4):
    x = cut(whole(4, ROWS, WIDTH))
    mapped = jax.shard_map(grad, in_specs=(P(), P("data")), out_specs=P())
    one, other = (
      gradcomp.wire_report(jax.jit(f).lower(layers, x).compile())
      for f in (grad, mapped)
    )
  assert one.bytes_sent == other.bytes_sent > 0
  assert one.dense_bytes == other.dense_bytes


def scanned(layers=STACK, body=LAYER, x=None, **options):
  """The types of a gradient, by the sum of the last layer and of all outputs."""

  def loss(layers, x):
    last, ys = parallel.scan(body, x, layers, **{**PLAIN, **options})
    return jnp.sum(last) + sum(map(jnp.sum, jax.tree.leaves(ys)))

  x = cut(jnp.ones((8, 8))) if x is None else x
  return jax.eval_shape(jax.grad(loss), layers, x)


def test_what_plain_jit_cannot_take_is_named():
  deferred = lambda w: gradcomp.defer_reduction(w, axis_name="data")
  with on_mesh(4):
    array, cut_layers = on(P(), jnp.ones(8)), on(P(None, "data"), STACK[:, :4])
    for wrong in (cut_layers, deferred(on(P(), STACK))):
      with pytest.raises(ValueError, match=says("`layers`", "data", "scan_shards")):
        scanned(wrong)
      with pytest.raises(ValueError, match=says("`layers`", "data", "scan_shards")):
        parallel.scan_residual(wrong, **PLAIN)
    with pytest.raises(ValueError, match=says("`carry`", "'data'", "jax.device_put")):
      scanned(x=jnp.ones((8, 8)))
    with pytest.raises(ValueError, match=says("`body`", "float32[]", "y[None]")):
      scanned(body=lambda x, w: (x @ w, jnp.sum(x)))
    with pytest.raises(NotImplementedError) as raised:
      scanned(body=lambda x, w: (x @ w * array, None))
    assert "jax.tree_util.Partial(body" in str(raised.value.__notes__)
