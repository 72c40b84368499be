"""What scan takes beside layers, and what it refuses by a message that names it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from gradcomp import parallel
from gradcomp.codecs import QSGD, Dense, OneBit, PowerSGD, TopK
from tests.support import modes
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.parallel import mapped, numbers
from tests.support.cases.scan import whole

N = 4
PLAIN = dict(axis_name="data", codec=Dense())
STACK = jnp.ones((3, 8, 8))
LAYER = lambda x, w: (x @ w, None)


def scanned(body=LAYER, layers=STACK, **options):
  run = lambda x: parallel.scan(body, x, layers, **{**PLAIN, **options})
  return jax.eval_shape(jax.vmap(run, axis_name="data"), jnp.ones((N, 2, 8)))


def residual_of(layers, **options):
  make = lambda _: parallel.scan_residual(layers, **{**PLAIN, **options})
  stacked = jax.vmap(make, axis_name="data")(jnp.ones(N))
  return jax.tree.map(lambda x: x[0], stacked)


WRONG = {
  "axis": (dict(axis_name="model"), ValueError, ["`axis_name`", "model"]),
  "codec": (dict(codec="int8"), TypeError, ["`codec`", "'int8'"]),
  "one bit": (dict(codec=OneBit()), ValueError, ["`codec`", "`residual` is None"]),
  "sparse": (dict(codec=TopK()), ValueError, ["`codec`", "every element"]),
  "key": (dict(codec=QSGD(bits=4)), ValueError, ["`key`", "QSGD"]),
  "local": (dict(exchange="local"), ValueError, ["`exchange`", "'local'"]),
  "a sum": (
    dict(codec=QSGD(bits=4, rounding="nearest"), exchange="psum"),
    ValueError,
    ["`exchange`", "psum"],
  ),
  "lengths": (
    dict(layers=(jnp.ones((3, 8)), jnp.ones((2, 8)))),
    ValueError,
    ["`layers`", "[2, 3]", "jnp.stack"],
  ),
  "no layer": (
    dict(layers=STACK[:0]),
    ValueError,
    ["`layers`", "one layer or more", "[0]", "leave the scan"],
  ),
  "no floats": (dict(layers=jnp.ones((3, 8), int)), TypeError, ["`layers`", "int32"]),
  "complex": (dict(layers=1j * STACK), TypeError, ["`layers`", "complex64"]),
  "no pair": (dict(body=lambda x, w: x @ w), TypeError, ["`body`", "pair"]),
  "residual": (dict(residual=STACK), ValueError, ["`residual`", "scan_residual"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_arguments_are_named(case):
  options, error, words = WRONG[case]
  with pytest.raises(error, match=says(*words)):
    scanned(**options)


def test_codecs_with_a_memory_are_refused():
  layers = jnp.ones((2, 256, 256))
  for codec in (PowerSGD(rank=2), TopK()):
    with pytest.raises(ValueError, match=says("`codec`", "memory", str(codec))):
      residual_of(layers, codec=codec)


def test_a_residual_of_another_exchange_is_refused():
  codec = QSGD(bits=4, rounding="nearest", bucket_size=32)
  other = residual_of(STACK, codec=codec, exchange="all_gather")
  with pytest.raises(ValueError, match=says("`residual`", "scan_residual")):
    scanned(codec=codec, exchange="two_shot", residual=other)


def test_a_residual_that_jax_would_add_up_is_refused():
  zeros = residual_of(STACK)
  run = lambda x, e: parallel.scan(LAYER, x, STACK, residual=e, **PLAIN)[0]
  specs = dict(in_specs=(P("data"), P()), out_specs=P("data"))
  step = jax.shard_map(run, mesh=modes.mesh(N), **specs)
  with pytest.raises(ValueError, match=says("`residual`", "['data']", "in_specs")):
    jax.eval_shape(step, jnp.ones((N, 8)), zeros)


def test_layers_whose_means_compress_would_exchange_are_refused():
  own = lambda w: lax.pcast(w, "data", to="varying")
  run = lambda x, w: parallel.scan(LAYER, x, own(w), **PLAIN)[0]
  specs = dict(in_specs=(P("data"), P()), out_specs=P("data"))
  step = jax.shard_map(run, mesh=modes.mesh(N), **specs)
  with pytest.raises(ValueError, match=says("`layers`", "['data']", "jax.grad")):
    jax.eval_shape(step, jnp.ones((N, 8)), STACK)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
@pytest.mark.parametrize("mode", ["shard_map", "vmap"])
def test_all_that_a_scan_may_take(mode, policy):
  """Carries of several kinds, outputs, keys a layer, and arrays that a body reads.

  All are as with ``lax.scan``, and so are the gradients of what is not exchanged.
  """
  layers, x, own = numbers(3, 8, 8), numbers(N, 2, 8), numbers(N, 8)
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
    ours = lambda *given: parallel.scan(*given, policy=policy, **PLAIN)
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

  got, want, values, plain = mapped(mode, both, N)(x, own)
  assert_same_bits(values[0], values[1])
  assert_same_bits(plain[0], plain[1])
  for ours, theirs in zip(got, want, strict=True):
    # The two programs compute the products of a layer in orders of their own.
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["all_gather", "gather", "scan", "scan_shards"])
def test_second_derivatives_are_errors(name):
  """They were zeros: the bits of a message have no derivative."""
  shards = {"axis_name": "data", "params": None, "grads": None}

  def loss(w, x):
    layer = lambda x, w: (jnp.sum(w * w) * x, None)
    if name == "gather":
      whole = parallel.gather(w, **shards)
      return jnp.sum(whole**2) * x
    if name == "all_gather":
      whole = parallel.all_gather(w, axis_name="data", codec=Dense())
      return jnp.sum(whole**2) * x
    if name == "scan":
      return parallel.scan(layer, x, w, **PLAIN)[0]
    return parallel.scan_shards(layer, x, w, **shards)[0]

  twice = lambda w, x: jax.grad(lambda w: jnp.sum(jax.grad(loss)(w, x)))(w)
  with pytest.raises(TypeError, match="must be differentiated once"):
    jax.vmap(twice, in_axes=(None, 0), axis_name="data")(jnp.ones((3, 2)), jnp.ones(2))


def examples_around(x, layers):
  """The loss of a scan for each row of the worker."""
  scan = lambda x: parallel.scan(LAYER, x, layers, **PLAIN)[0]
  return jnp.sum(jax.vmap(scan)(x))


@pytest.mark.parametrize("mode", ["vmap", "shard_map", "shard_map_unchecked", "pmap"])
def test_a_map_over_examples_belongs_into_the_body(mode):
  run = lambda x: jax.grad(examples_around, 1)(x, STACK)
  with pytest.raises(ValueError, match=says("`scan`", "jax.vmap", "inside of `body`")):
    jax.eval_shape(mapped(mode, run, N), jnp.ones((N, 2, 8)))


def test_a_map_over_examples_is_seen_through_jit_and_around_a_map_of_workers():
  one = jax.jit(lambda x: parallel.scan(LAYER, x, STACK, **PLAIN)[0])
  inside = jax.vmap(jax.grad(lambda x: jnp.sum(jax.vmap(one)(x))), axis_name="data")
  around = jax.vmap(jax.vmap(jax.grad(lambda x: jnp.sum(one(x))), axis_name="data"))
  for run, shape in ((inside, (N, 3, 8)), (around, (3, N, 8))):
    with pytest.raises(ValueError, match=says("`scan`", "jax.vmap")):
      jax.eval_shape(run, jnp.ones(shape))


def test_a_map_over_examples_around_a_scan_of_shards_is_an_error_too():
  options = dict(axis_name="data", params=None, grads=None)
  scan = lambda x, w: parallel.scan_shards(LAYER, x, w, **options)[0]
  loss = lambda w, x: jnp.sum(jax.vmap(lambda x: scan(x, w))(x))
  run = jax.vmap(jax.grad(loss), in_axes=(0, 0), axis_name="data")
  with pytest.raises(ValueError, match=says("`scan`", "jax.vmap")):
    jax.eval_shape(run, jnp.ones((N, 3, 2, 8)), jnp.ones((N, 2, 8)))


def test_several_models_are_mapped_over_and_scans_without_a_gradient_too():
  """Each model gets the bits that it would alone."""
  x, layers = whole(N, 2, 8), whole(2, 3, 8, 8, seed=1)

  def of_all(x, layers):
    loss = lambda layers, x: jnp.sum(parallel.scan(LAYER, x, layers, **PLAIN)[0])
    grad = lambda x: jax.grad(loss)(layers, x)
    return jax.vmap(grad, axis_name="data")(x)

  got = jax.jit(jax.vmap(of_all, in_axes=(None, 0)))(x, layers)
  want = [jax.jit(of_all)(x, each) for each in layers]
  assert_same_bits(got, jnp.stack(want))
  values = jax.vmap(lambda x: examples_around(x, STACK), axis_name="data")
  assert np.isfinite(values(jnp.asarray(x))).all()
