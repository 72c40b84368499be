"""Rounding to any format agrees with ml_dtypes and with exact arithmetic."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gradcomp import floats
from gradcomp._src.kernels.common.float_codes import to_codes
from tests.errors import table
from tests.plugins.slow_cases import one_in, slow
from tests.specs import floats as oracle_floats
from tests.specs.floats import Format
from tests.support.assertions import assert_same_floats
from tests.support.cases.float import library, name

TWINS = {
  "float8_e5m2": Format(5, 2),
  "float8_e4m3": Format(4, 3),
  "float8_e3m4": Format(3, 4),
  "float8_e4m3fn": Format(4, 3, "nan"),
  "float8_e4m3fnuz": Format(4, 3, "negative_zero"),
  "float8_e4m3b11fnuz": Format(4, 3, "negative_zero", True, 11),
  "float8_e5m2fnuz": Format(5, 2, "negative_zero"),
  "float6_e2m3fn": Format(2, 3, "none"),
  "float6_e3m2fn": Format(3, 2, "none"),
  "float4_e2m1fn": Format(2, 1, "none"),
  "bfloat16": Format(8, 7),
  "float16": Format(5, 10),
}
OTHERS = [
  *(Format(3, 0), Format(2, 1), Format(1, 1), Format(1, 6), Format(8, 0)),
  *(Format(6, 9), Format(8, 4), Format(4, 0, "nan"), Format(3, 0, "negative_zero")),
  *(Format(2, 0, "none"), Format(1, 5, "none"), Format(5, 2, subnormals=False)),
  *(Format(3, 0, subnormals=False), Format(4, 3, "nan", False)),
  *(Format(4, 2, "negative_zero", False), Format(3, 3, "none", False)),
  *(Format(4, 3, "ieee", True, -20), Format(3, 2, "none", True, 100)),
]
WIDE = [
  *(Format(8, 20), Format(6, 23), Format(8, 23), Format(7, 22), Format(6, 14)),
  *(Format(5, 18, "nan"), Format(7, 16, subnormals=False)),
]
RANDOM = 2**20 // (len(OTHERS) + len(WIDE)) + 1  # 10^6 values together


def with_neighbors(x):
  """Each number, the float32 numbers beside it, and all of their negatives."""
  x = np.asarray(x, np.float32)
  with np.errstate(over="ignore"):
    x = np.concatenate([x, *(np.nextafter(x, np.float32(to)) for to in (-9e9, np.inf))])
  return np.concatenate([x, -x])


def boundaries(fmt):
  """All numbers, what is halfway between two, what is beside those, and extremes."""
  table = oracle_floats.magnitudes(fmt)
  with np.errstate(over="ignore"):
    middles = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    table = table.astype(np.float32)
  extremes = [np.inf, 3.4028235e38, 2.0**-126, 2.0**-149, 1e-40, 0]
  return with_neighbors(np.concatenate([table, middles, np.float32(extremes)]))


def random_values(fmt, count, seed=0):
  """Half of them any float32 numbers, half of them near the format's."""
  rng = np.random.default_rng(seed)
  words = rng.integers(0, 2**32, count // 2, dtype=np.uint32)
  low, high = 1 - fmt.bias - fmt.m - 2, min(127, 2**fmt.e - fmt.bias)
  near = rng.uniform(1, 2, count // 2) * 2.0 ** rng.integers(low, high + 1, count // 2)
  near = near.astype(np.float32) * rng.choice(np.float32([1, -1]), count // 2)
  x = np.concatenate([words.view(np.float32), near])
  return x if fmt.specials != "none" else x[~np.isnan(x)]


FUNCTIONS = (floats.to_code, floats.round_to)


@functools.partial(jax.jit, static_argnums=0)
def every(fmt, x, codes):
  """`to_code` and `round_to` of numbers, and `from_code`, as one program."""
  return floats.to_code(x, fmt), floats.round_to(x, fmt), floats.from_code(codes, fmt)


def assert_rounds(fmt, x, more_codes=()):
  """`to_code`, `from_code` and `round_to` are the oracle's, bit for bit."""
  expected = oracle_floats.encode(x, fmt)
  decoded = np.concatenate([expected, np.array(more_codes, np.uint32)])
  codes, rounded, values = jax.device_get(every(library(fmt), x, decoded))
  chex.assert_type(codes, np.uint32)
  np.testing.assert_array_equal(codes, expected)
  assert_same_floats(values, oracle_floats.decode(decoded, fmt))
  assert_same_floats(rounded, oracle_floats.quantize(x, fmt))
  return codes, rounded, values


@pytest.mark.parametrize("twin", TWINS)
def test_every_code_and_boundary_of_a_type_of_ml_dtypes(twin):
  fmt, dtype = TWINS[twin], np.dtype(getattr(ml_dtypes, twin, twin))
  word = np.uint8 if dtype.itemsize == 1 else np.uint16
  codes = np.arange(2**fmt.bits, dtype=np.uint32)
  x = boundaries(fmt)
  if fmt.specials != "none":
    x = np.concatenate([x, np.float32([np.nan])])
  with np.errstate(all="ignore"):
    theirs = x.astype(dtype)
  mask = np.uint32(2**fmt.bits - 1)
  ours, rounded, values = assert_rounds(fmt, x, codes)
  expected = codes.astype(word).view(dtype).astype(np.float32)
  assert_same_floats(values[x.size :], expected)
  np.testing.assert_array_equal(ours, theirs.view(word).astype(np.uint32) & mask)
  assert_same_floats(rounded, theirs.astype(np.float32))


@pytest.mark.parametrize("fmt", one_in(3, OTHERS), ids=name)
def test_other_formats_by_enumeration(fmt):
  x = np.concatenate([boundaries(fmt), random_values(fmt, RANDOM)])
  by_table = oracle_floats.encode_by_table(x, fmt)
  np.testing.assert_array_equal(by_table, oracle_floats.encode(x, fmt))
  codes = np.arange(2**fmt.bits, dtype=np.uint32)
  every_number = oracle_floats.decode(codes, fmt)
  _, rounded, _ = assert_rounds(fmt, np.concatenate([x, every_number]), codes)
  again = rounded[x.size :]
  np.testing.assert_array_equal(again, every_number)  # some have no minus zero


# The units of the first and third are the least and the largest to which sums of floats
# round; those of the second and fourth are not.
FAR = [Format(3, 2, "none", True, bias) for bias in (124, 125, -105, -106)]
SHIFTED = [*OTHERS[:3], Format(5, 2), Format(8, 4), *FAR]


@pytest.mark.parametrize("fmt", SHIFTED, ids=name)
@pytest.mark.parametrize("rounding", ["nearest_even", *slow("toward_zero")])
def test_a_product_with_a_power_of_two_is_rounded_once(fmt, rounding):
  """Subnormal numbers are zero, and so are products with the exponents of a format."""
  if fmt in FAR:
    assert_rounds(fmt, np.concatenate([boundaries(fmt), random_values(fmt, RANDOM)]))
  options = dict(fmt=library(fmt), rounding=rounding)
  shifted = jax.jit(lambda x, k: to_codes(x, exponent=k, **options))
  edges = boundaries(fmt)
  for exponent in (-512, -255, -150, -126, -112, -3, 0, 7, 112, 254, 512):
    with np.errstate(over="ignore", under="ignore"):
      near = np.ldexp(edges, -exponent)
    x = np.concatenate([near, random_values(fmt, 4000)]).astype(np.float32)
    x = np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)
    x = np.where(np.isfinite(x), x, np.float32(0))  # of one shape: one program
    product = np.ldexp(x.astype(np.float64), exponent)
    tiny = (np.abs(product) < 2.0**-126) & (fmt.bias == 127)
    product = np.where(tiny, np.copysign(0.0, product), product)
    fits = np.abs(product) < min(2.0 ** (library(fmt).max_exponent + 1), 2.0**128)
    x, product = (np.where(fits, y, y.dtype.type(0)) for y in (x, product))
    expected = oracle_floats.encode(product, fmt, rounding)
    np.testing.assert_array_equal(shifted(x, np.int32(exponent)), expected)


@pytest.mark.parametrize("fmt", one_in(2, WIDE), ids=name)
def test_wide_formats_by_rational_numbers(fmt):
  x = random_values(fmt, RANDOM)
  top = oracle_floats.magnitudes_top(fmt)
  edges = [top, top * (1 + 2.0 ** -(fmt.m + 1)), 2.0 ** (1 - fmt.bias - fmt.m)]
  with np.errstate(over="ignore"):
    edges += [2.0 ** (1 - fmt.bias), 1.5 * 2.0 ** (1 - fmt.bias - fmt.m)]
    x = np.concatenate([with_neighbors(np.float32(edges)), x])
  assert_rounds(fmt, x)
  if fmt.subnormals:
    some = x[np.isfinite(x) & (x != 0)][:300]
    exact = [oracle_floats.round_exactly(float(v), fmt) for v in some]
    assert_same_floats(oracle_floats.quantize(some, fmt), exact)


def test_what_a_format_says_of_itself():
  for fmt in (*TWINS.values(), *OTHERS, *WIDE):
    ours = library(fmt)
    assert (ours.bits, ours.max_code) == (fmt.bits, fmt.max_code)
    assert ours.exponent_bias == fmt.bias
    ends = np.array([1 if fmt.subnormals else 2**fmt.m, fmt.max_code])
    smallest, top = oracle_floats.decode(ends, fmt)
    assert (ours.smallest, ours.max_finite) == (smallest, top)
    assert ours.max_exponent == np.floor(np.log2(np.float64(top)))
    assert ours.smallest_normal == 2.0 ** (1 - fmt.bias)
    assert hash(ours) == hash(library(fmt)) and ours == library(fmt)


@pytest.mark.parametrize("rounding", ["toward_zero", "stochastic"])
@pytest.mark.parametrize(
  "fmt",
  [Format(5, 2), Format(3, 0), Format(4, 3, "nan", False)]
  + slow((Format(4, 3, "none", False),), (Format(8, 7),), (Format(6, 20),)),
  ids=name,
)
def test_other_rules_are_the_pages(fmt, rounding):
  """The page has 16 bits for messages; here R are all 32 of jax.random.bits."""
  key, x = jax.random.key(5, impl="threefry2x32"), random_values(fmt, 20000)
  own = {"draws": np.asarray(jax.random.bits(key, x.shape, jnp.uint32))}
  both = jax.jit(lambda x: [f(x, library(fmt), rounding, key=key) for f in FUNCTIONS])
  codes, rounded = map(np.asarray, both(x))
  np.testing.assert_array_equal(codes, oracle_floats.encode(x, fmt, rounding, **own))
  assert_same_floats(rounded, oracle_floats.quantize(x, fmt, rounding, **own))
  if rounding == "toward_zero":  # it never overflows
    finite = np.isfinite(x)
    assert (np.abs(rounded[finite]) <= np.abs(x[finite])).all()


def test_arrays_of_any_shape_and_half_precision_return_as_they_were():
  fmt, ours = Format(5, 2), floats.FloatFormat(5, 2)
  x = random_values(fmt, 2000)
  wide = oracle_floats.quantize(x, Format(7, 23))
  assert_same_floats(floats.round_to(x, floats.FloatFormat(7, 23)), wide)
  shapes = ((), (0,), (1,), (7,), (2, 3), (3, 0), (2, 2, 2))
  given = [x[: math.prod(shape)].reshape(shape) for shape in shapes]
  with np.errstate(over="ignore", invalid="ignore"):
    given += [x.astype(dtype) for dtype in (jnp.float16, jnp.bfloat16)]
  found = jax.jit(lambda arrays: [floats.round_to(x, ours) for x in arrays])(given)
  for one, rounded in zip(given, found, strict=True):
    chex.assert_type(rounded, one.dtype)
    expected = oracle_floats.quantize(one.astype(np.float32), fmt)
    assert_same_floats(np.asarray(rounded).astype(np.float32), expected)


def test_derivatives():
  """Zero, or straight through; also inside what JAX traces again."""
  x, fmt = np.float32([1.1, -300.0, 1e-9]), floats.FloatFormat(5, 2)
  for through in (False, True):
    f = lambda x, through=through: floats.round_to(x, fmt, straight_through=through)
    value, slope = jax.jit(lambda x, f=f: (f(x), jax.vjp(f, x)[1](x)[0]))(x)
    np.testing.assert_array_equal(slope, x * through)
    np.testing.assert_array_equal(value, oracle_floats.quantize(x, Format(5, 2)))

  @jax.checkpoint
  def step(x, key):
    x = floats.round_to(x, fmt, "stochastic", key=key, straight_through=True)
    return 2 * x, None

  keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), 3)
  loss = lambda x: jax.lax.scan(step, x, keys)[0].sum()
  np.testing.assert_array_equal(jax.jit(jax.grad(loss))(np.ones(4, np.float32)), 8.0)


X, FORMAT = np.ones(3, np.float32), floats.FloatFormat(5, 2)
ROWS = """
f(np.ones(3, v), FORMAT) for f in *FUNCTIONS for v in "int32", "bool", "complex64" ->
  TypeError: `x` ... float ... {v!s}
f(X, FORMAT, "up") for f in *FUNCTIONS -> `rounding` ... nearest_even ... 'up'
f(X, FORMAT, "stochastic") for f in *FUNCTIONS -> `key` ... stochastic
FloatFormat(v, 2) for v in 0, 9, 5.0, True -> `exponent_bits` ... {v}
FloatFormat(5, v) for v in -1, 24, None -> `mantissa_bits` ... {v}
# 2^(30 + 98), and 2^(1 - 126 - 2), which is subnormal.
FloatFormat(5, 2, bias=v) for v in 1.0, -98, 126 -> `bias` ... {v}
"""

test_what_cannot_be_rounded_or_is_no_format = table.refused(ROWS, globals())
