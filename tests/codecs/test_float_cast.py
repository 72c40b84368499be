"""FloatCast sends the page's rows and byte, and its sums never overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp import floats
from gradcomp._src.codecs.protocol import payload_of
from gradcomp._src.testing.noise import mean_is_the_leaf
from gradcomp.codecs import Context, Leaf
from tests.plugins.slow_cases import slow
from tests.specs import float_cast, float_sums
from tests.specs import floats as oracle_floats
from tests.specs.floats import Format
from tests.support import laws
from tests.support.assertions import assert_same_floats
from tests.support.cases.float import cast_of, codec_of, wide_leaf


def encoded(codec, x, byte):
  """The payload with statistics that are given."""
  stats = None if byte is None else jnp.full((1, 1), byte, jnp.uint8)
  encode = lambda x, stats: payload_of(codec, x, Context(laws.KEY, agreed=stats))
  return jax.jit(encode)(x, stats)


@pytest.mark.parametrize(
  "fmt, rounding, scale",
  [
    ((6, 14), "stochastic", "auto"),
    *slow(((2, 1), "stochastic", "auto"), ((6, 9), "toward_zero", 0.37)),
  ],
)
def test_formats_that_do_not_fill_their_bits(fmt, rounding, scale):
  """Under a byte of others, too: one leaf is larger, and there are five of them."""
  codec = codec_of(fmt, rounding, scale)
  if scale == "auto":
    codec = codec.bind(Leaf((), addends=5))
    assert codec == codec_of(fmt, rounding, scale, addends=5)
  x = wide_leaf(codec.tile_size + 77)
  byte = float_cast.aps_byte(8 * x, 5) if scale == "auto" else None
  cast = cast_of(codec, byte)
  payload = encoded(codec, x, byte)
  rows = cast.encode(x, np.asarray(laws.KEY))
  np.testing.assert_array_equal(payload.rows, rows)
  assert_same_floats(laws.decoder(codec, x.shape)(payload), cast.decode(rows, x.size))


def test_results_below_the_smallest_normal_number_are_zero():
  """With 8 exponent bits a shift can leave a subnormal number: its code is zero's."""
  codec = codec_of((8, 23))
  x = np.float32([1.5 * 2.0**127, 2.0**-126, -(2.0**-126), 2.0**-125, 1e-40])
  payload = laws.encoder(codec)(jnp.asarray(x), laws.KEY)
  cast = cast_of(codec, float_cast.aps_byte(x))
  assert cast.shift == -1
  np.testing.assert_array_equal(payload.rows, cast.encode(x))
  expected = np.float32([1.5 * 2.0**127, 0, -0.0, 2.0**-125, 0])
  assert_same_floats(laws.round_trip(codec, x), expected)


@pytest.mark.parametrize("addends", [1, 3, 5, 8, 20, *slow(2, 4, 6, 7, *range(9, 20))])
def test_the_byte_is_exact(addends):
  """ceil(log2(N a)) in integers, at powers of two and beside them, over N or not."""
  rng = np.random.default_rng(addends)
  exponents = 2.0 ** np.arange(-126, 128)
  near = np.float32([*exponents[3 * addends :: 7] / addends, *exponents])
  near = np.concatenate([near, np.nextafter(near, np.float32(0))])
  near = np.concatenate([near, np.nextafter(near, np.float32(3e38))])
  words = rng.integers(0, 0x7F800000, 200, dtype=np.uint32)
  extremes = np.float32([0, 2.0**-126, 1e-40, 3.4028235e38, np.inf, np.nan])
  largest = np.concatenate([near, words.view(np.float32), extremes])
  leaves = np.stack([-largest, np.zeros_like(largest), largest / 2], axis=1)
  codec = codec_of((5, 2), addends=addends)
  bytes_ = np.asarray(jax.jit(jax.vmap(codec.agree))(leaves)).ravel()
  expected = [float_cast.aps_byte(leaf, addends) for leaf in leaves]
  np.testing.assert_array_equal(bytes_, expected)


@pytest.mark.parametrize("fmt", [(3, 0), (5, 2), (6, 14), *slow(((1, 4),), ((5, 10),))])
def test_powers_of_two_lose_nothing(fmt):
  """The format's numbers up to 2^bias, times any power of two, come back exactly."""
  fmt, codec = Format(*fmt), codec_of(fmt)
  numbers = oracle_floats.magnitudes(fmt)[:-1] if fmt.bits <= 16 else np.arange(2.0**14)
  numbers = numbers * (1 if fmt.bits <= 16 else 2.0 ** (fmt.bias - 14))
  numbers = numbers[numbers <= 2.0**fmt.bias]
  assert numbers[-1] > 2.0 ** (fmt.bias - 1)
  numbers[-1] = 2.0**fmt.bias
  factors = 2.0 ** np.array([-90, -33, -1, 0, 1, 17, 90])
  leaves = (factors[:, None] * np.concatenate([numbers, -numbers])).astype(np.float32)
  leaves = leaves[:, leaves.all(axis=0)]
  restored = jax.jit(jax.vmap(lambda x: codec.decode(codec.encode(x), like=x)))(leaves)
  assert_same_floats(restored, leaves)


@pytest.mark.parametrize("fmt", [(3, 0), (4, 0), (2, 1), (5, 2), (4, 3), (1, 2)])
def test_sums_of_any_number_of_workers_never_overflow(fmt):
  """Algorithm 1's promise for N = 1 ... 300, all at their largest, in every order."""
  fmt, most = Format(*fmt), 300
  top = oracle_floats.magnitudes_top(fmt)
  counts = np.arange(1, most + 1)
  # What is just at, below and above a power of two when N of them are added.
  over = 2.0 ** np.ceil(np.log2(counts)) / counts
  edges = np.float32([1, 1.99999, *[0] * 3]) + over[:, None] * [0, 0, 1, 1.0001, 0.9999]
  edges = edges.astype(np.float32)
  shift = lambda a, n: float_cast.aps_shift(float_cast.aps_byte(a, n), fmt.e, n)
  shifts = [[shift(a, n) for a in edges[n - 1]] for n in counts.tolist()]
  v = oracle_floats.quantize(np.ldexp(edges.astype(np.float64), shifts), fmt)
  add = lambda a, b: float_sums.add(a, b, fmt)
  total, sums = v, {1: v}
  for k in range(2, most + 1):
    total = sums[k] = np.where(counts[:, None] >= k, add(total, v), total)
  assert (total <= top).all()
  for size in (2, 3, 4, 5, 8, 16):  # groups' sums, added up
    rows = counts % size == 0
    part = group = sums[size][rows]
    for k in range(2, most // size + 1):
      part = np.where(counts[rows, None] // size >= k, add(part, group), part)
    assert (part <= top).all()


def test_leaves_of_zeros_and_of_subnormal_numbers_are_zero():
  """CPD's are NaN: the logarithm of zero."""
  codec = codec_of((8, 23))
  tiny = np.float32([1e-40, -1e-45, 0, 1.17e-38])
  for x in (np.zeros(4, np.float32), tiny):
    payload = laws.encoder(codec)(x, laws.KEY)
    assert payload.agreed == 0
    assert (laws.round_trip(codec, x) == 0).all()
  x = np.float32([1.0, 1e-40, 0, 0])
  np.testing.assert_array_equal(laws.round_trip(codec, x), np.float32([1, 0, 0, 0]))


def test_what_is_not_finite():
  """With a byte of 255 all is NaN, whatever a worker's own leaf is."""
  x = laws.gaussian(300)
  codec = codec_of((5, 2))
  assert np.isnan(laws.decoder(codec, (300,))(encoded(codec, x, 255))).all()
  for bad in (np.nan, np.inf, -np.inf):
    x[17] = bad
    assert laws.encoder(codec)(x, laws.KEY).agreed == 255


@pytest.mark.parametrize("scale", ["auto", 8.0])
def test_stochastic_casts_are_unbiased(scale):
  """Without overflow, and down to what underflows."""
  codec = codec_of((4, 2), "stochastic", scale)
  x = np.concatenate([laws.gaussian(200), 1e-3 * laws.gaussian(200, 1)])
  mean_is_the_leaf(codec, x, draws=600)


def test_no_constant_scale_suits_two_layers():
  """Figure 3: what suits one makes the other overflow or underflow; APS suits both."""
  x = laws.gaussian(1000)
  fixed, auto = codec_of((5, 2), scale=2.0**-5), codec_of((5, 2))
  large, small = x * np.float32(2.0**18), x * np.float32(2.0**-12)
  assert np.isfinite(laws.round_trip(fixed, large)).all()
  assert (laws.round_trip(fixed, small) == 0).mean() > 0.5
  assert np.isinf(laws.round_trip(codec_of((5, 2), scale=1.0), large)).any()
  for leaf in (large, small):
    error = floats.round_off_error(leaf, laws.round_trip(auto, leaf))
    assert error < 2.0**-3
