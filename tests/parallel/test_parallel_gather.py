"""Weights that are sharded over workers are gathered, and their gradients scattered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp.codecs import QSGD, EightBit, OneBit
from gradcomp.parallel import gather
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.parallel import (
  CODECS,
  KEY,
  assert_rounded,
  dither,
  in_order,
  mapped,
  nbytes,
  numbers,
  roundtrip,
)

N = 4
EIGHT = EightBit(bucket_size=32)
RANDOM = QSGD(bits=4, bucket_size=32)
COARSE = QSGD(bits=2, bucket_size=32, rounding="nearest")
PLAIN = dict(params=None, grads=None)
DRAWN = jax.random.wrap_key_data(jnp.array(KEY, jnp.uint32))


def both(function):
  """``(w, residual, cotangent) -> (whole, dw, new residual)`` of a gather."""

  def run(w, residual, cotangent):
    whole, back = jax.vjp(function, w, residual)
    return whole, *back(cotangent)

  return run


def gathering(**options):
  return both(lambda w, e: gather(w, axis_name="data", residual=e, **options))


@pytest.mark.parametrize("mode", modes.MODES)
def test_float32_is_what_jax_sends(mode):
  """Whole weights to the bit, sums up to rounding, and nothing is lost.

  Also of complex numbers, whose residuals are pairs, and with a residual sent along.
  """
  w, cotangent, old = numbers(N, 8, 4), numbers(N, 8, 4 * N), numbers(N, 8, 4 * N)
  z, dz = w + 1j * w[::-1], cotangent - 2j * cotangent[::-1]

  def every(w, cotangent, old, z, dz):
    theirs = lambda x: lax.all_gather(x, "data", axis=1, tiled=True)
    ours = lambda x: gather(x, axis_name="data", axis=1, **PLAIN)
    plain = [
      (whole, *back(ct))
      for x, ct in ((w, cotangent), (z, dz))
      for whole, back in (jax.vjp(theirs, x), jax.vjp(ours, x))
    ]
    return plain, [
      gathering(axis=1, **PLAIN)(w, old, cotangent),
      gathering(axis=-1, **PLAIN)(z, jnp.stack([old, old], -1), dz),
    ]

  plain, kept = mapped(mode, every, N)(w, cotangent, old, z, dz)
  for theirs, ours, given, e in zip(
    plain[::2], plain[1::2], kept, (old, old + 1j * old), strict=True
  ):
    assert_same_bits(ours[0], theirs[0])
    assert_same_bits(given[0], theirs[0])
    assert_rounded(ours[1], theirs[1])
    sums = np.stack(np.split(e.sum(0), N, axis=1))
    assert_rounded(given[1], theirs[1] + (sums.conj() if np.iscomplexobj(e) else sums))
    assert not np.asarray(given[2]).any()


FEW = ("bf16", "eight_bit_buckets", "qsgd8", "ternary")


@pytest.mark.bits
@pytest.mark.parametrize("name", [*FEW, *slow(*[x for x in CODECS if x not in FEW])])
def test_each_codec_is_what_the_page_says(name):
  """Forward all parts are rounded, backward all but the owner's own."""
  codec = CODECS[name]
  w, old, cotangent = (numbers(N, *s) for s in ((3, 200), (3, 800), (3, 800)))
  old = 0.1 * old
  options = dict(params=codec, grads=laws.kept(codec), axis=1)
  options["key"] = DRAWN if codec.needs_key else None
  whole, dw, new = mapped("vmap", gathering(**options), N)(w, old, cotangent)
  want = np.concatenate([roundtrip(codec, w[i], dither(i)) for i in range(N)], axis=1)
  assert_same_bits(whole, np.stack([want] * N))
  sent = np.split(cotangent + old, N, axis=2)
  for me in range(N):
    parts = [
      roundtrip(codec, sent[me][i], dither(i, me, 1)) if i != me else sent[me][i]
      for i in range(N)
    ]
    np.testing.assert_array_equal(dw[me], in_order(parts))
    for i in range(N):
      # XLA may multiply and subtract in one operation: an ulp of numbers up to 4.
      got, want = (
        np.asarray(new)[i, :, 200 * me : 200 * (me + 1)],
        sent[me][i] - parts[i],
      )
      np.testing.assert_allclose(got, want, rtol=0, atol=2**-22)


def test_the_two_directions_have_codecs_of_their_own():
  w, cotangent = numbers(N, 64), numbers(N, 64 * N)
  old = np.zeros_like(cotangent)

  def function(w, old, cotangent):
    down = gathering(params=None, grads=COARSE)(w, old, cotangent)
    return down, gathering(params=COARSE, grads=None)(w, old, cotangent)

  down, up = mapped("vmap", function, N)(w, old, cotangent)
  sums = cotangent.sum(0).reshape(N, -1)
  assert_same_bits(down[0][0], w.reshape(-1))
  assert np.abs(up[0][0] - w.reshape(-1)).max() > 0.1
  assert_rounded(up[1], sums)
  assert np.abs(down[1] - sums).max() > 0.1


LAYERS, WIDTH = 3, 32


def layered(x, shards, residuals, remat, key):
  """A loss of layers in a loop, as a model under FSDP has them."""

  def layer(x, given):
    w, residual, number = given
    own = jax.random.fold_in(key, number)
    w = gather(
      w,
      axis_name="data",
      params=EIGHT,
      grads=RANDOM,
      residual=residual,
      axis=1,
      key=own,
    )
    return jnp.tanh(x @ w), None

  layer = jax.checkpoint(layer) if remat else layer
  x, _ = lax.scan(layer, x, (shards, residuals, jnp.arange(LAYERS)))
  return jnp.mean(x**2)


@pytest.mark.parametrize("mode", ["shard_map", "shard_map_unchecked", *slow("vmap")])
def test_layers_in_a_loop_and_under_checkpoint(mode):
  """What came, and what is still to be sent, is what was given: nothing comes twice."""
  x, shards = numbers(N, 8, WIDTH), 0.3 * numbers(N, LAYERS, WIDTH, WIDTH // N)
  residuals = 1e-3 * numbers(N, LAYERS, WIDTH, WIDTH, seed=2)
  key = jax.random.key(5)

  def grads(x, shards, residuals):
    grad = jax.grad(layered, (1, 2))
    return [grad(x, shards, residuals, remat, key) for remat in (False, True)]

  def cotangents(x, shards):
    """Of the whole weights, from the same numbers, with nothing sent for them."""
    whole = jax.vmap(
      lambda w: gather(w, axis_name="data", params=EIGHT, grads=None, axis=1)
    )
    loss = lambda ws: jnp.mean(
      lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2
    )
    return jax.grad(loss)(whole(shards))

  given = np.asarray(mapped(mode, cotangents, N)(x, shards)) + residuals
  for got, new in mapped(mode, grads, N)(x, shards, residuals):
    left = np.asarray(new).sum(0)
    assert np.abs(left).max() > 1e-5
    came = np.concatenate(np.asarray(got), axis=-1)
    # The programs compute cotangents in orders of their own.
    np.testing.assert_allclose(came + left, given.sum(0), rtol=1e-5, atol=1e-7)


def test_feedback_sends_later_what_was_lost():
  """Over many steps of one gradient the mean is exact, and without feedback it is not.

  One bit, too, which needs a residual. A residual stays below the loss of some steps.
  """
  cotangent, steps = numbers(N, 64 * N), 40

  def mean(codec, given, cotangent):
    def step(residual, number):
      options = dict(params=None, grads=codec, residual=residual if given else None)
      function = lambda w, e: gather(w, axis_name="data", **{**options, "residual": e})
      _, back = jax.vjp(function, jnp.zeros(64), residual)
      dw, new = back(cotangent)
      return (new if given else residual), dw

    residual = parallel.gather_residual(jnp.zeros(64), axis_name="data")
    return lax.scan(step, residual, jnp.arange(steps))[1].mean(0)

  def every(cotangent):
    coarse, bit = COARSE, OneBit(bucket_size=32)
    return (
      mean(coarse, True, cotangent),
      mean(bit, True, cotangent),
      mean(coarse, False, cotangent),
    )

  kept, bit, lost = mapped("vmap", every, N)(cotangent)
  want = cotangent.sum(0).reshape(N, -1)
  errors = [np.abs(x - want).max() for x in (kept, bit, lost)]
  assert errors[0] < 0.1 * errors[2] and errors[1] < 0.3 * errors[2], errors


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_is_sent_are_words_and_as_many_as_the_payloads_have(check_vma):
  def grads(w, residual, x):
    def loss(w, residual):
      whole = gather(w, axis_name="data", params=EIGHT, grads=COARSE, residual=residual)
      return jnp.sum(jnp.sin(whole) * x)

    return jax.grad(loss, (0, 1))(w, residual)

  mode = "shard_map" if check_vma else "shard_map_unchecked"
  arrays = numbers(N, 5000), numbers(N, 5000 * N), numbers(N, 5000 * N)
  report = gradcomp.wire_report(mapped(mode, grads, N).lower(*arrays).compile())
  found = {c.kind: (c.dtype, c.bytes_sent) for c in report.collectives}
  assert len(report.collectives) == 2 and {x for x, _ in found.values()} == {"u32"}
  for kind, codec in {"all-gather": EIGHT, "all-to-all": COARSE}.items():
    assert abs(found[kind][1] / ((N - 1) * nbytes(codec, 5000)) - 1) < 0.01
  assert report.dense_bytes == 2 * 4 * (N - 1) * 5000


@pytest.mark.parametrize("mode", ["shard_map", *slow("vmap")])
def test_any_shape_and_dtype(mode):
  """Flat shards take all: fewer than N elements, primes, a scalar; half precision."""
  shapes = {(): np.float32, (3,): np.float32, (7, 11): jnp.bfloat16, (5,): np.float16}
  whole = [jnp.asarray(numbers(*shape), dtype) for shape, dtype in shapes.items()]
  pad = lambda w: jnp.pad(w.reshape(-1), (0, -w.size % N)).reshape(N, -1)
  cut = [pad(w) for w in whole]

  def function(shards, weights):
    results = []
    for w, shape, x in zip(shards, shapes, weights, strict=True):
      residual = parallel.gather_residual(w, axis_name="data")
      loss = lambda w, e, shape=shape, x=x: jnp.sum(
        x * gather(w, axis_name="data", shape=shape, residual=e, **PLAIN)
      )
      y = gather(w, axis_name="data", shape=shape, params=EIGHT, grads=None)
      results.append((y, *jax.grad(loss, (0, 1))(w, residual)))
    return results

  weights = [jnp.stack([w] * N) for w in whole]
  for w, shard, (y, dw, new) in zip(
    whole, cut, mapped(mode, function, N)(cut, weights), strict=True
  ):
    assert y.dtype == dw.dtype == w.dtype and y.shape[1:] == w.shape
    assert_same_bits(y[1:], jnp.stack([y[0]] * (N - 1)))
    near = lambda a, b: np.testing.assert_allclose(
      np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0.1, atol=0.1
    )
    near(y[0], w)
    near(dw, N * np.asarray(shard, np.float32))  # zeros where nothing was
    assert new.dtype == jnp.float32 and new.shape == (N, shard.size)


@pytest.mark.parametrize(
  "codec", [RANDOM, *slow(EIGHT, OneBit(bucket_size=32))], ids=str
)
def test_a_nan_is_seen_by_its_owner_and_stays_out_of_residuals(codec):
  """Also one of the owner's own part."""
  w, old, cotangent = numbers(N, 64), numbers(N, 64 * N, seed=1), numbers(N, 64 * N)
  cotangent[1, 70 + 64] = np.nan  # of worker 2's part
  cotangent[3, 64 * 3 + 5] = np.inf  # its own
  options = dict(params=None, grads=codec, key=jax.random.key(0))
  _, dw, new = map(
    np.asarray, mapped("vmap", gathering(**options), N)(w, old, cotangent)
  )
  assert np.isnan(dw[2, :32]).all() and not np.isfinite(dw[3, 5])
  assert np.isfinite(dw[:2]).all() and np.isfinite(dw[2, 32:]).all()
  assert np.isfinite(new).all()
  assert_same_bits(new[1, 128:160], old[1, 128:160])
  assert new[3, 64 * 3 + 5] == old[3, 64 * 3 + 5]
  assert (new[2, :32] != old[2, :32]).all()


@pytest.mark.parametrize("check_vma", [True, False])
def test_axes_of_a_mesh(check_vma):
  """Over one of two, where gradients stay per host; and over both together."""
  devices = np.array(jax.devices()[:N]).reshape(2, 2)
  mesh = jax.sharding.Mesh(devices, ("host", "chip"))
  w, x = numbers(8, 3), numbers(N, 8, 3)

  def grads(name, w, residual, x):
    loss = lambda w, e: jnp.sum(
      x[0] * gather(w, axis_name=name, params=None, grads=COARSE, residual=e)
    )
    w = jax.lax.pcast(w, "host", to="varying") if check_vma and name == "chip" else w
    dw, new = jax.grad(loss, (0, 1))(w, residual)
    return dw[None], new

  for name, spec in (("chip", P("chip")), (("host", "chip"), P(("host", "chip")))):
    both = P(("host", "chip"))
    step = jax.shard_map(
      lambda *args, name=name: grads(name, *args),
      mesh=mesh,
      in_specs=(spec, both, both),
      out_specs=(both, both),
      check_vma=check_vma,
    )
    dw, new = jax.jit(step)(w, np.zeros((N * 8, 3), np.float32), x)
    new, hosts = np.asarray(new).reshape(N, 8, 3), x.reshape(2, 2, 8, 3)
    if name == "chip":  # [hosts, chips, 4, 3]
      got = np.asarray(dw).reshape(2, 8, 3)
      assert_rounded(got + new.reshape(2, 2, 8, 3).sum(1), hosts.sum(1))
    else:
      assert_rounded(np.asarray(dw).reshape(8, 3) + new.sum(0), x.sum(0))


def test_weights_of_equal_type_on_hosts_get_the_sum_over_hosts():
  """By JAX, as everywhere where types are checked; residuals stay each chip's own."""
  devices = np.array(jax.devices()[:N]).reshape(2, 2)
  both = P(("host", "chip"))
  w, x = numbers(8, 3), numbers(N, 8, 3)

  def grads(w, residual, x):
    loss = lambda w, e: jnp.sum(
      x[0] * gather(w, axis_name="chip", params=None, grads=COARSE, residual=e)
    )
    return jax.grad(loss, (0, 1))(w, residual)

  step = jax.shard_map(
    grads,
    mesh=jax.sharding.Mesh(devices, ("host", "chip")),
    in_specs=(P("chip"), both, both),
    out_specs=(P("chip"), both),
  )
  dw, new = jax.jit(step)(w, np.zeros((N * 8, 3), np.float32), x)
  assert_rounded(dw + np.asarray(new).reshape(N, 8, 3).sum(0), x.sum(0))
