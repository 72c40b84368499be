"""FloatCast sends the page's rows and byte, and its sums never overflow."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp import floats
from gradcomp._src.codecs.rounds import payload_of
from gradcomp._src.testing.noise import mean_is_the_leaf
from gradcomp._src.testing.payloads import half_precision_is_computed_in_float32
from gradcomp.codecs import Context, Leaf
from tests.specs import float_cast, float_sums
from tests.specs import floats as oracle_floats
from tests.specs.floats import Format
from tests.support import laws
from tests.support.assertions import assert_same_floats
from tests.support.cases.float import cast_of, codec_of, wide_leaf

# Formats of all widths, 4, 8, 16 and 32 bits, filled and not.
CASES = [
  ((3, 0), "nearest_even", "auto"),
  ((3, 0), "stochastic", 0.37),
  ((2, 1), "stochastic", "auto"),
  ((1, 1), "toward_zero", "auto"),
  ((5, 2), "nearest_even", "auto"),
  ((5, 2), "stochastic", "auto"),
  ((5, 2), "toward_zero", 1024.0),
  ((4, 3), "nearest_even", 1.0),
  ((6, 9), "stochastic", "auto"),
  ((8, 7), "nearest_even", "auto"),
  ((6, 14), "stochastic", "auto"),
  ((8, 23), "nearest_even", "auto"),
  ((8, 23), "stochastic", 3.0),
]


@functools.cache
def encoder(codec):
  """With statistics that are given."""
  return jax.jit(lambda x, byte: payload_of(codec, x, Context(laws.KEY, agreed=byte)))


def stats_of(byte):
  return jnp.full((1, 1), byte, jnp.uint8)


def assert_documented(codec, payload, cast, x):
  """Rows are the oracle's, and both it and the page's decoder read the same values."""
  rows = cast.encode(x, np.asarray(laws.KEY))
  np.testing.assert_array_equal(payload.rows, rows)
  decoded = laws.decoder(codec, x.shape)(payload)
  assert_same_floats(decoded, cast.decode(rows, x.size))
  read = float_cast.decode(
    np.asarray(payload.rows),
    x.size,
    exponent_bits=codec.exponent_bits,
    mantissa_bits=codec.mantissa_bits,
    byte=cast.byte,
    scale=cast.scale,
    addends=codec.addends,
  )
  np.testing.assert_array_equal(decoded, read)


@pytest.mark.parametrize("fmt, rounding, scale", CASES)
def test_rows_are_the_documented_ones(fmt, rounding, scale):
  """Rows and values bit for bit, the byte, and that unused bits are zero."""
  codec = codec_of(fmt, rounding, scale)
  x = wide_leaf(codec.tile_size + 77)
  payload = laws.encoder(codec)(jnp.asarray(x), laws.KEY)
  cast = cast_of(codec)
  if scale == "auto":
    chex.assert_type(payload.agreed, jnp.uint8)
    chex.assert_shape(payload.agreed, (1, 1))
    byte = float_cast.aps_byte(x)
    assert payload.agreed == byte
    cast = cast_of(codec, byte)
  else:
    assert payload.agreed is None
  assert codec.tile_size == 32 // cast.width * 128
  chex.assert_shape(payload.rows, (2, 128))
  assert_documented(codec, payload, cast, x)


@pytest.mark.parametrize("fmt, rounding, scale", [CASES[0], CASES[5], CASES[10]])
def test_under_the_byte_of_others(fmt, rounding, scale):
  """Another worker's leaf is larger, and there are 5 of them."""
  codec = codec_of(fmt, rounding, scale).bind(Leaf((), addends=5))
  assert codec == codec_of(fmt, rounding, scale, addends=5)
  x = wide_leaf(codec.tile_size + 77)
  byte = float_cast.aps_byte(8 * x, 5)
  cast = cast_of(codec, byte)
  payload = encoder(codec)(jnp.asarray(x), stats_of(byte))
  assert_documented(codec, payload, cast, x)


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


@pytest.mark.parametrize("addends", range(1, 21))
def test_the_byte_is_exact(addends):
  """ceil(log2(N a)) in integers, at powers of two and beside them, over N or not."""
  rng = np.random.default_rng(addends)
  exponents = 2.0 ** np.arange(-126, 128)
  near = np.float32(exponents[3 * addends :: 7] / addends)
  near = np.concatenate([near, np.float32(exponents)])
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


@pytest.mark.parametrize("fmt", [(3, 0), (5, 2), (1, 4), (5, 10), (6, 14)])
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
  leaves = leaves[(np.abs(leaves) > 0).all(axis=0, keepdims=True).repeat(7, 0)]
  leaves = leaves.reshape(7, -1)
  restored = jax.jit(jax.vmap(lambda x: codec.decode(codec.encode(x), like=x)))(leaves)
  assert_same_floats(restored, leaves)


@pytest.mark.parametrize("fmt", [(3, 0), (4, 0), (2, 1), (5, 2), (4, 3), (1, 2)])
def test_sums_of_any_number_of_workers_never_overflow(fmt):
  """Algorithm 1's promise for N = 1 ... 300, all at their largest, in every order.

  Kahan's and exact sums keep it only where what is cast is not below the normal
  numbers, for there it becomes up to twice as large: APS makes them the largest number.
  """
  fmt, most = Format(*fmt), 300
  top = oracle_floats.magnitudes_top(fmt)
  counts = np.arange(1, most + 1)
  edges = np.stack([1.0 + 0 * counts, 1.99999 + 0 * counts], axis=1)
  # What is just at, below and above a power of two when N of them are added.
  over = 2.0 ** np.ceil(np.log2(counts)) / counts
  edges = np.concatenate([edges, over[:, None], over[:, None] * [[1.0001, 0.9999]]], 1)
  edges = edges.astype(np.float32)
  shifts = np.array(
    [
      [float_cast.aps_shift(float_cast.aps_byte(a, n), fmt.e, n) for a in edges[n - 1]]
      for n in counts.tolist()
    ]
  )
  x = np.ldexp(edges.astype(np.float64), shifts)
  v = oracle_floats.quantize(x, fmt)
  add = lambda a, b: float_sums.add(a, b, fmt)
  s, total, q, wide = v, v, np.zeros_like(v), v
  sums = {1: v}
  for k in range(2, most + 1):
    used = counts[:, None] >= k
    s = np.where(used, add(s, v), s)
    sums[k] = s
    if k <= 40:
      y = add(v, -q)
      t = add(total, y)
      total, q = (
        np.where(used, new, old)
        for new, old in ((t, total), (add(add(t, -total), -y), q))
      )
    wide = np.where(used, wide + v, wide)
  assert (s <= top).all()
  for result in (total, oracle_floats.quantize(wide, fmt)):
    assert (result <= top)[x >= 2.0 ** (1 - fmt.bias)].all()
  for size in (2, 3, 4, 5, 8, 16):  # groups' sums, added up
    groups = most // size
    rows = counts % size == 0
    part = group = sums[size][rows]
    for k in range(2, groups + 1):
      part = np.where(counts[rows, None] // size >= k, add(part, group), part)
    assert (part <= top).all()


@pytest.mark.parametrize("fmt", [(3, 0), (8, 23)])
def test_leaves_of_zeros_and_of_subnormal_numbers_are_zero(fmt):
  """CPD's are NaN: the logarithm of zero."""
  codec = codec_of(fmt)
  tiny = np.float32([1e-40, -1e-45, 0, 1.17e-38])
  for x in (np.zeros(700, np.float32), np.zeros(0, np.float32), tiny):
    payload = laws.encoder(codec)(jnp.asarray(x), laws.KEY)
    assert payload.agreed == 0
    assert (laws.round_trip(codec, x) == 0).all()
  x = np.float32([1.0, 1e-40])
  np.testing.assert_array_equal(laws.round_trip(codec, x), np.float32([1, 0]))


@pytest.mark.parametrize(
  "fmt, bad", [((3, 0), np.nan), ((3, 0), np.inf), ((5, 2), np.nan), ((5, 2), -np.inf)]
)
def test_what_is_not_finite(fmt, bad):
  """With a byte the whole leaf is NaN; with a constant scale only the element."""
  x = laws.gaussian(300)
  x[17] = bad
  codec = codec_of(fmt)
  payload = laws.encoder(codec)(jnp.asarray(x), laws.KEY)
  assert payload.agreed == 255
  assert np.isnan(laws.round_trip(codec, x)).all()
  # Under the agreed byte: whatever a worker's own leaf is.
  clean = encoder(codec)(jnp.asarray(laws.gaussian(300)), stats_of(255))
  assert np.isnan(laws.decoder(codec, (300,))(clean)).all()
  plain = codec_of(fmt, scale=2.0)
  cast = cast_of(plain)
  restored = laws.round_trip(plain, x)
  assert_same_floats(restored, cast.decode(cast.encode(x), x.size))
  chex.assert_tree_all_finite(np.delete(restored, 17))
  expected = np.nan if fmt[1] == 0 else bad
  np.testing.assert_array_equal(restored[17], np.float32(expected))


@pytest.mark.parametrize(
  "codec", [codec_of((5, 2)), codec_of((4, 3), scale=2.0)], ids=["auto", "constant"]
)
def test_half_precision_is_computed_in_float32(codec):
  half_precision_is_computed_in_float32(codec)


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
  chex.assert_tree_all_finite(laws.round_trip(fixed, large))
  assert (laws.round_trip(fixed, small) == 0).mean() > 0.5
  assert np.isinf(laws.round_trip(codec_of((5, 2), scale=1.0), large)).any()
  for leaf in (large, small):
    error = floats.round_off_error(leaf, laws.round_trip(auto, leaf))
    assert error < 2.0**-3


def test_facts():
  # Not with stochastic casts either: sums are rounded to nearest.
  assert not codec_of((5, 2), "stochastic").unbiased
  for codec in (codec_of((5, 2)), codec_of((5, 2), "stochastic", 1.0)):
    assert (codec.agree(jnp.ones(3)) is not None) == (codec.scale == "auto")
    assert codec.needs_key == (codec.rounding == "stochastic")
    assert hash(codec) == hash(eval(repr(codec)))
