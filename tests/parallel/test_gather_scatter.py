"""Differentiable collectives are JAX's own, and what the page says of each codec."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp.codecs import QSGD, Dense, EightBit, OneBit
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits
from tests.support.cases import parallel as cases
from tests.support.cases.parallel import CODECS, dither, mapped, numbers, roundtrip

N = 4
DRAWN = jax.random.wrap_key_data(np.array(cases.KEY, np.uint32))
RING = [(0, 2), (2, 1), (1, 3), (3, 0)]
X = numbers(N, 3, 200, seed=3)  # no whole rows
WEIGHTS = numbers(N, 3, 200 * N, seed=4)
OLD = 0.1 * numbers(N, 3, 200 * N, seed=5)

# Codecs, and whether a worker's own part is sent as it is, or as others get it.
FEW = ("bf16", "eight_bit_buckets", "qsgd8", "float_cast", "ternary", "natural")
EXACT = [(name, "exact") for name in FEW]
EXACT += slow(*[(name, "exact") for name in CODECS if name not in FEW])
ROWS = EXACT + slow(*[(name, "coded") for name in CODECS])
EIGHT = laws.here(EightBit(bucket_size=64))
RANDOM = laws.here(QSGD(bits=4, bucket_size=64))
COARSE = laws.here(QSGD(bits=2, bucket_size=32, rounding="nearest"))
TERNARY = laws.here(CODECS["ternary"])
ADDING = {"psum_scatter": (True, False), "all_gather": (False, True)}
ADDING["gather"] = ADDING["all_gather"]  # values, and gradients

FLOATS = dict(axis_name="data", codec=Dense())
WHOLE = dict(axis=1, params=None, grads=None)
whole = lambda x: lax.all_gather(x, "data", axis=1, tiled=True)
# Our options, the collective of JAX, and the weights of the loss.
PAIRS = {
  "all_gather": (FLOATS | {"axis": 1}, whole, WEIGHTS),
  "psum_scatter": (
    FLOATS | {"axis": -1},
    lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
    X[:, :, :50],
  ),
  "all_to_all": (
    FLOATS | {"split_axis": 1, "concat_axis": 0},
    lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True),
    X.reshape(N, 12, 50),
  ),
  "ppermute": (
    FLOATS | {"perm": RING},
    lambda x: lax.ppermute(x, "data", RING),
    X[::-1],
  ),
  "gather": (WHOLE | {"axis_name": "data"}, whole, WEIGHTS),
}


def gathering(**options):
  """``(w, residual, cotangent) -> (whole, dw, new residual)`` of a gather."""

  def run(w, residual, cotangent):
    function = lambda w, e: parallel.gather(w, axis_name="data", residual=e, **options)
    whole, back = jax.vjp(function, w, residual)
    return whole, *back(cotangent)

  return run


@functools.cache
def run(name, own):
  """Returns the results of collectives with a codec and ``KEY``, by their names."""
  codec = laws.here(CODECS[name])
  key = DRAWN if codec.needs_key else None
  options = dict(axis_name="data", codec=codec, key=key)
  axis = dict(axis=1, own=own)
  gather = lambda x: parallel.all_gather(x, **options, **axis)
  both = dict(params=codec, grads=laws.kept(codec), axis=1, key=key)

  def every(x, weights, old):
    return {
      "all_gather": cases.with_gradient(gather, None)(x, weights),
      "psum_scatter": parallel.psum_scatter(weights, **options, **axis),
      "psum": parallel.psum(x, **options),
      "gather": gathering(**both)(x, old, weights),
    }

  return jax.tree.map(np.asarray, mapped("vmap", every, N)(X, WEIGHTS, OLD))


@functools.cache
def plain(mode):
  """Values and gradients in float32: of ours and JAX's, and of what JAX has not.

  ``sum_gradients`` is a psum the other way round: the weights of a psum's loss, and the
  argument of ``sum_gradients``, are equal on all workers.
  """
  equal, z = WEIGHTS[0, :, :200], X + 1j * X[::-1]

  def every(x, weights, old, z, dz):
    found = {}
    for name, (options, theirs, _) in PAIRS.items():
      ours = functools.partial(getattr(parallel, name), **options)
      ways = [cases.with_gradient(way, None) for way in (ours, theirs)]
      found[name] = [way(x, weights[name]) for way in ways]
    value, back = jax.vjp(whole, z)
    found["complex"] = (value, *back(dz))
    entry = lambda x: parallel.sum_gradients(x, **FLOATS)
    found["psum"] = cases.with_gradient(lambda x: parallel.psum(x, **FLOATS), equal)(x)
    found["sum_gradients"] = cases.with_gradient(entry, x)(jnp.asarray(equal))
    found["kept"] = gathering(**WHOLE)(x, old, weights["gather"])
    pairs = jnp.stack([old, old], -1)
    found["kept complex"] = gathering(**WHOLE | {"axis": -1})(z, pairs, dz)
    return found

  weights = {name: pair[2] for name, pair in PAIRS.items()}
  given = X, weights, OLD, z, WEIGHTS - 2j * WEIGHTS[::-1]
  return equal, jax.tree.map(np.asarray, mapped(mode, every, N)(*given))


@pytest.mark.parametrize("mode", modes.MODES)
def test_float32_is_what_jax_sends(mode):
  """Bit by bit where nothing is added, and up to rounding where something is."""
  equal, found = plain(mode)
  for name in PAIRS:
    adding = ADDING.get(name, (False, False))
    for ours, theirs, adds in zip(*found[name], adding, strict=True):
      (cases.assert_rounded if adds else assert_same_bits)(ours, theirs)
  # The cotangent of a sum is that of all workers together: nothing is sent for it.
  (total, dx), (value, gradient) = found["psum"], found["sum_gradients"]
  cases.assert_rounded(total, np.stack([X.sum(0)] * N))
  assert_same_bits(dx, np.stack([equal] * N))
  assert_same_bits(value, np.stack([equal] * N))
  cases.assert_rounded(gradient, np.stack([X.sum(0)] * N))
  for array in (total, gradient):
    assert_same_bits(array[1:], np.stack([array[0]] * (N - 1)))


@pytest.mark.parametrize("mode", modes.MODES)
def test_a_residual_is_sent_along_with_a_gradient(mode):
  """Nothing is lost in float32; those of complex numbers are pairs."""
  _, found = plain(mode)
  sums = np.stack(np.split(OLD.sum(0), N, axis=1))
  for theirs, (whole, dw, new), e in (
    (found["gather"][1], found["kept"], sums),
    (found["complex"], found["kept complex"], sums - 1j * sums),
  ):
    assert_same_bits(whole, theirs[0])
    cases.assert_rounded(dw, theirs[1] + e)
    assert not new.any()


def own_or_coded(own, codec, x, sender, receiver, key):
  return x if own == "exact" and sender == receiver else roundtrip(codec, x, key)


@pytest.mark.bits
@pytest.mark.parametrize("name, own", ROWS)
def test_each_codec_is_what_the_page_says(name, own):
  """Forward and backward, of a gather and of sums, in the order of workers."""
  codec, found = CODECS[name], run(name, own)
  value, gradient = found["all_gather"]
  for me in range(N):
    sent = [own_or_coded(own, codec, X[i], i, me, dither(i)) for i in range(N)]
    assert_same_bits(value[me], np.concatenate(sent, axis=1))
    for stages, got in (((1,), gradient), ((), found["psum_scatter"])):
      mine = WEIGHTS[:, :, 200 * me : 200 * (me + 1)]
      draws = [dither(i, me, *stages) for i in range(N)]
      parts = [own_or_coded(own, codec, mine[i], i, me, draws[i]) for i in range(N)]
      np.testing.assert_array_equal(got[me], cases.in_order(parts))


@pytest.mark.bits
@pytest.mark.parametrize("name, own", EXACT)
def test_a_psum_is_what_the_page_says(name, own):
  """Two stages, of which the second has keys of its own."""
  codec, parts = CODECS[name], X.reshape(N, N, -1)
  sums = [
    cases.in_order([roundtrip(codec, parts[i, me], dither(i, me)) for i in range(N)])
    for me in range(N)
  ]
  whole = [roundtrip(codec, x, dither(me, 0, 2, me)) for me, x in enumerate(sums)]
  want = np.concatenate(whole).reshape(X.shape[1:])
  assert_same_bits(run(name, own)["psum"], np.stack([want] * N))


@pytest.mark.bits
@pytest.mark.parametrize("name, own", EXACT)
def test_a_gather_is_what_the_page_says(name, own):
  """Forward all parts are rounded, backward all but the owner's own."""
  codec, (whole, dw, new) = CODECS[name], run(name, own)["gather"]
  want = np.concatenate([roundtrip(codec, X[i], dither(i)) for i in range(N)], axis=1)
  assert_same_bits(whole, np.stack([want] * N))
  sent = np.split(WEIGHTS + OLD, N, axis=2)
  for me in range(N):
    parts = [
      roundtrip(codec, sent[me][i], dither(i, me, 1)) if i != me else sent[me][i]
      for i in range(N)
    ]
    np.testing.assert_array_equal(dw[me], cases.in_order(parts))
    for i in range(N):
      # XLA may multiply and subtract in one operation: an ulp of numbers up to 4.
      kept, lost = new[i, :, 200 * me : 200 * (me + 1)], sent[me][i] - parts[i]
      np.testing.assert_allclose(kept, lost, rtol=0, atol=2**-22)


def test_the_two_directions_have_codecs_of_their_own():
  """None sends float32; the cotangents of the second are powers of two."""
  x, weights = numbers(N, 40, seed=5), numbers(N, 40 * N, seed=6)
  bf16, natural = CODECS["bf16"], laws.here(CODECS["natural"])

  def function(x, weights):
    options = dict(axis_name="data", codec=bf16, own="coded", key=jax.random.key(0))
    each = [
      jax.vjp(lambda x, b=b: parallel.all_gather(x, backward=b, **options), x)
      for b in (None, natural)
    ]
    ways = dict(params=None, grads=COARSE), dict(params=COARSE, grads=None)
    old = jnp.zeros_like(weights)
    gathered = [gathering(**way)(x, old, weights) for way in ways]
    return [(y, *back(weights)) for y, back in each], gathered

  found, (down, up) = jax.device_get(mapped("vmap", function, N)(x, weights))
  (first, exact), (second, rounded) = found
  assert_same_bits(first, second)
  want = np.concatenate([roundtrip(bf16, x, None)[i] for i in range(N)])
  assert_same_bits(first[0], want)
  sums = weights.sum(0).reshape(N, -1)
  cases.assert_rounded(exact, sums)
  assert 1e-3 < np.abs(rounded - sums).max() < np.abs(weights).max() * N
  assert_same_bits(down[0][0], x.reshape(-1))
  assert np.abs(up[0][0] - x.reshape(-1)).max() > 0.1
  cases.assert_rounded(up[1], sums)
  assert np.abs(down[1] - sums).max() > 0.1


@pytest.mark.parametrize("mode", ["shard_map", "shard_map_unchecked"])
def test_what_is_sent_are_words_and_as_many_as_the_payloads_have(mode):

  def function(x, long):
    own = dict(axis_name="data", key=jax.random.key(1))
    gather = lambda x: parallel.all_gather(x, codec=EIGHT, backward=RANDOM, **own)
    y, back = jax.vjp(gather, x)
    total = parallel.psum(x.astype(jnp.float16), axis_name="data", codec=EIGHT)
    swap = dict(split_axis=0, concat_axis=0, codec=RANDOM)
    swapped = parallel.all_to_all(long, **swap, **own)
    sent = parallel.ppermute(x, axis_name="data", perm=[(0, 1)], codec=EIGHT)
    scales = parallel.all_gather(x, codec=TERNARY, **own)
    whole = gathering(params=EIGHT, grads=COARSE)(2 * x, 3 * long, long)
    return back(long), total, swapped, sent, y, scales, whole

  given = numbers(N, 5000), numbers(N, 5000 * N)
  report = gradcomp.wire_report(mapped(mode, function, N).lower(*given).compile())
  assert {c.dtype for c in report.collectives} <= {"u32", "u8"}
  share = (N - 1) / N
  a_quarter = 2 * share * N * cases.nbytes(EIGHT, 1250)
  once, coarse = cases.nbytes(EIGHT, 5000), cases.nbytes(COARSE, 5000)
  shared = cases.nbytes(TERNARY, 5000) + 4
  expected = {
    "all-gather": (N - 1) * (2 * once + shared) + a_quarter / 2,
    "all-to-all": share * N * (2 * cases.nbytes(RANDOM, 5000) + coarse) + a_quarter / 2,
    "collective-permute": once,
  }
  assert {c.kind for c in report.collectives} == set(expected)
  for kind, want in expected.items():
    found = [c for c in report.collectives if c.kind == kind]
    assert abs(sum(c.bytes_sent for c in found) / want - 1) < 0.01, kind
  same = 4 * 5000 * ((N - 1) * 3 + 3 * share * N + 2 * share + 1)
  assert report.dense_bytes == same  # in float32


@pytest.mark.parametrize("mode", ["shard_map", *slow("pmap", "vmap")])
def test_any_shape_and_dtype(mode):
  """Scalars, primes and nothing; half precision comes back as it was."""
  arrays = [np.float32(3.0), numbers(0, 3), numbers(7).astype(np.float16)]
  arrays.append(jnp.asarray(numbers(3, 1, 13), jnp.bfloat16))
  options = dict(axis_name="data", codec=EIGHT)

  def each(x):
    whole = parallel.all_gather(x, **options)
    back = parallel.psum_scatter(whole, **options)
    return x, whole, parallel.psum(x, **options), back

  function = lambda number: [each(x + number.astype(x.dtype)) for x in arrays]
  near = functools.partial(np.testing.assert_allclose, rtol=0.1)
  found = jax.device_get(mapped(mode, function, N)(np.float32(range(N))))
  for x, y, total, own in found:
    assert x.dtype == y.dtype == total.dtype == own.dtype
    assert y.shape[1:] == (N * (x.shape[1] if x.ndim > 1 else 1), *x.shape[2:])
    wide = np.float32(x)
    near(np.float32(y[0]), wide.reshape(y.shape[1:]), atol=0.2)
    near(np.float32(total[1]), wide.sum(0), atol=0.5)
    near(np.float32(own).reshape(wide.shape), N * wide, atol=0.5)


@pytest.mark.parametrize(
  "codec", [EIGHT, *slow(CODECS["float_cast"], CODECS["ternary"])], ids=str
)
def test_a_nan_is_seen_by_all(codec):
  """At least its own block is NaN, on every worker; also where it is rounded again."""
  x = numbers(N, 80)
  x[1, 70] = np.nan

  def function(x):
    own = dict(axis_name="data", codec=codec, key=DRAWN)
    gather, total = parallel.all_gather(x, **own), parallel.psum(x, **own)
    return gather[80 + 70], total[70], parallel.psum_scatter(x, **own)[10]

  gathered, total, part = mapped("vmap", function, N)(x)
  assert np.isnan(gathered).all() and np.isnan(total).all() and np.isnan(part[3])


def test_complex_numbers_travel_as_pairs_and_equal_arrays_once():
  """What is equal on all workers has no axis of theirs under vmap, as JAX knows it."""
  x, equal = numbers(N, 2, 8) + 1j * numbers(N, 2, 8, seed=1), numbers(8)

  def function(x):
    loss = lambda x: jnp.sum(jnp.abs(parallel.psum(x, **FLOATS)) ** 2)
    whole = parallel.all_gather(x, axis=-1, **FLOATS)
    swapped = parallel.all_to_all(equal, split_axis=0, concat_axis=0, **FLOATS)
    part = parallel.psum_scatter(equal, **FLOATS)
    of_equal = part, swapped, parallel.psum(equal, **FLOATS)
    back = parallel.psum_scatter(whole, axis=-1, **FLOATS)
    return (whole, back, jax.grad(loss)(x)), of_equal

  (whole, back, gradient), (part, swapped, total) = mapped("vmap", function, N)(x)
  np.testing.assert_array_equal(whole[0], np.concatenate(x, axis=-1))
  np.testing.assert_allclose(back, N * x, rtol=1e-6)
  # JAX's gradient of |z|^2 is twice the conjugate of z.
  want = np.stack([2 * x.sum(0).conj()] * N)
  np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(part, 4 * equal.reshape(N, 2))
  every = np.repeat(equal.reshape(N, 1, 2), N, 1).reshape(N, 8)
  np.testing.assert_array_equal(swapped, every)
  np.testing.assert_array_equal(total, np.stack([4 * equal] * N))


def test_types_say_what_is_equal():
  """Only a sum, and what is rounded alike, may leave a map as replicated."""

  def out(function):
    own = lambda x: function(x, axis_name="data", codec=EIGHT)
    places = dict(mesh=modes.mesh(N), in_specs=P("data"), out_specs=P())
    return lambda x: jax.eval_shape(jax.shard_map(own, **places), x)

  x, same = numbers(N * 3), dict(own="coded", to="invarying")
  alike = functools.partial(parallel.all_gather, **same)
  assert out(parallel.psum)(x).shape == (3,) and out(alike)(x).shape == x.shape
  with pytest.raises(ValueError, match="out_specs"):
    out(parallel.all_gather)(x)


def test_random_numbers_differ_by_part_and_direction():
  """Half a step everywhere: equal draws would round equal numbers alike."""
  codec = QSGD(bits=2, bucket_size=32, norm="max")
  drawn = dict(axis_name="data", codec=codec, key=DRAWN)
  x = np.full((N, N * 64), 0.5, np.float32)
  x[:, ::32] = 1.0
  ring = [(0, 1), (1, 2), (2, 3), (3, 0)]

  def function(x):
    swap = dict(split_axis=0, concat_axis=0, own="coded")
    y, back = jax.vjp(lambda x: parallel.ppermute(x, perm=ring, **drawn), x)
    return parallel.all_to_all(x, **swap, **drawn), y, back(x)[0]

  parts, there, back = jax.device_get(mapped("vmap", function, N)(x))
  parts = parts.reshape(N, N, 64)
  assert all((parts[i, 0] != parts[j, 0]).any() for i in range(N) for j in range(i))
  assert (there[1] != back[0]).any()


# Weights in shards of workers.
PARTS = QSGD(bits=4), EightBit(), OneBit()  # in buckets of 32
PARTS = [laws.here(dataclasses.replace(x, bucket_size=32)) for x in PARTS]


@pytest.mark.parametrize("mode", ["shard_map", *slow("vmap")])
def test_parts_of_any_shape_and_dtype(mode):
  """Flat shards take all: fewer than N elements, primes, a scalar; half precision."""
  shapes = {(): np.float32, (3,): np.float32, (7, 11): jnp.bfloat16, (5,): np.float16}
  whole = [numbers(*shape).astype(dtype) for shape, dtype in shapes.items()]
  pad = lambda w: np.pad(w.reshape(-1), (0, -w.size % N)).reshape(N, -1)
  cut = [pad(w) for w in whole]

  def each(w, x):
    given = dict(axis_name="data", shape=x.shape, grads=None)
    gather = lambda w, e: parallel.gather(w, residual=e, params=None, **given)
    residual = parallel.gather_residual(w, axis_name="data")
    grads = jax.grad(lambda *given: jnp.sum(x * gather(*given)), (0, 1))(w, residual)
    return parallel.gather(w, params=PARTS[1], **given), *grads

  function = lambda shards, weights: [*map(each, shards, weights)]
  found = mapped(mode, function, N)(cut, [np.stack([w] * N) for w in whole])
  wide = functools.partial(np.asarray, dtype=np.float32)
  near = lambda a, b: np.testing.assert_allclose(wide(a), wide(b), rtol=0.1, atol=0.1)
  for w, shard, (y, dw, new) in zip(whole, cut, jax.device_get(found), strict=True):
    assert y.dtype == dw.dtype == w.dtype and y.shape[1:] == w.shape
    assert_same_bits(y[1:], np.stack([y[0]] * (N - 1)))
    near(y[0], w)
    near(dw, N * wide(shard))  # zeros where nothing was
    assert new.dtype == np.float32 and new.shape == (N, shard.size)


@pytest.mark.parametrize("codec", [PARTS[0], *slow(*PARTS[1:])], ids=laws.name)
def test_a_nan_is_seen_by_its_owner_and_stays_out_of_residuals(codec):
  """Also one of the owner's own part."""
  w, old, cotangent = numbers(N, 64), numbers(N, 64 * N, seed=1), numbers(N, 64 * N)
  cotangent[1, 70 + 64] = np.nan  # of worker 2's part
  cotangent[3, 64 * 3 + 5] = np.inf  # its own
  run = gathering(params=None, grads=codec, key=jax.random.key(0))
  _, dw, new = jax.device_get(mapped("vmap", run, N)(w, old, cotangent))
  assert np.isnan(dw[2, :32]).all() and not np.isfinite(dw[3, 5])
  assert np.isfinite(dw[:2]).all() and np.isfinite(dw[2, 32:]).all()
  assert np.isfinite(new).all()
  assert_same_bits(new[1, 128:160], old[1, 128:160])
  assert new[3, 64 * 3 + 5] == old[3, 64 * 3 + 5]
  assert (new[2, :32] != old[2, :32]).all()


BOTH = P(("host", "chip"))
# By the axes of a gather: the spec of its shards. Those of chips differ between hosts
# by their type, or are equal, and JAX adds up their gradients where types are checked.
AXES = {"differ": P("chip"), "both": BOTH, "equal": P("chip")}


@pytest.mark.parametrize("check_vma", [True, False])
def test_axes_of_a_mesh(check_vma):
  """Over one of two, where gradients stay per host; and over both together."""
  mesh = Mesh(np.array(jax.devices()[:N]).reshape(2, 2), ("host", "chip"))
  w, x = numbers(8, 3), numbers(N, 8, 3)
  specs = {name: spec for name, spec in AXES.items() if check_vma or name != "equal"}

  def grads(shards, residual, x):
    def loss(w, e, over):
      given = dict(axis_name=over, params=None, grads=COARSE)
      return jnp.sum(x[0] * parallel.gather(w, residual=e, **given))

    if check_vma:
      shards["differ"] = jax.lax.pcast(shards["differ"], "host", to="varying")
    over = lambda name: ("host", "chip") if name == "both" else "chip"
    grad = jax.grad(loss, (0, 1))
    return {name: grad(w, residual, over(name)) for name, w in shards.items()}

  out = {name: (P("chip") if name == "equal" else BOTH, BOTH) for name in specs}
  places = dict(in_specs=(specs, BOTH, BOTH), out_specs=out, check_vma=check_vma)
  given = dict.fromkeys(specs, w), np.zeros((N * 8, 3), np.float32), x
  found = jax.device_get(jax.jit(jax.shard_map(grads, mesh=mesh, **places))(*given))
  for name, (dw, new) in found.items():
    new = new.reshape(N, 8, 3)
    if name == "differ":  # [hosts, 8, 3]
      sums = new.reshape(2, 2, 8, 3).sum(1)
      cases.assert_rounded(dw.reshape(2, 8, 3) + sums, x.reshape(2, 2, 8, 3).sum(1))
    else:
      cases.assert_rounded(dw.reshape(8, 3) + new.sum(0), x.sum(0))
