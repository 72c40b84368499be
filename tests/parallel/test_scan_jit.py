"""Layers in a loop in plain jit under Explicit axes: values, and other gradients."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp.codecs import Dense
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.scan import whole

PLAIN = dict(axis_name="data", codec=Dense())
STACK = jnp.ones((3, 8, 8))
LAYER = lambda x, w: (x @ w, None)


def on_mesh():
  kinds, devices = (jax.sharding.AxisType.Explicit,), jax.devices()[:4]
  return jax.set_mesh(jax.make_mesh((4,), ("data",), kinds, devices=devices))


def on(spec, x):
  return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), spec))


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
  with on_mesh():
    scan = lambda *given: parallel.scan(*given, **PLAIN)
    both = lambda *given: (grad(scan)(*given), of(scan, *given)[1])
    got, value = jax.jit(both)(layers, on(P("data"), x), scale)
  assert_same_bits(got, want)  # of whole numbers, of which all sums are exact
  assert_same_bits(value, want[1])


def scanned(layers=STACK, body=LAYER, x=None, **options):
  """The types of a gradient, by the sum of the last layer and of all outputs."""

  def loss(layers, x):
    last, ys = parallel.scan(body, x, layers, **{**PLAIN, **options})
    return jnp.sum(last) + sum(map(jnp.sum, jax.tree.leaves(ys)))

  x = on(P("data"), jnp.ones((8, 8))) if x is None else x
  return jax.eval_shape(jax.grad(loss), layers, x)


def test_what_plain_jit_cannot_take_is_named():
  with on_mesh():
    array, whole = on(P(), jnp.ones(8)), on(P(), STACK)
    deferred = gradcomp.defer_reduction(whole, axis_name="data")
    for wrong in (on(P(None, "data"), STACK[:, :4]), deferred):
      for call in (scanned, lambda x: parallel.scan_residual(x, **PLAIN)):
        with pytest.raises(ValueError, match=says("`layers`", "data", "scan_shards")):
          call(wrong)
    with pytest.raises(ValueError, match=says("`carry`", "'data'", "jax.device_put")):
      scanned(x=jnp.ones((8, 8)))
    with pytest.raises(ValueError, match=says("`body`", "float32[]", "y[None]")):
      scanned(body=lambda x, w: (x @ w, jnp.sum(x)))
    with pytest.raises(NotImplementedError) as raised:
      scanned(body=lambda x, w: (x @ w * array, None))
    assert "jax.tree_util.Partial(body" in str(raised.value.__notes__)
