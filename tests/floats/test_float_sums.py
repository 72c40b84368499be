"""Sums, products and reductions in a format are the exact result, rounded once."""

from fractions import Fraction

import jax
import ml_dtypes
import numpy as np
import pytest

from gradcomp import floats
from tests.errors import table
from tests.plugins.slow_cases import one_in
from tests.specs import float_sums
from tests.specs import floats as oracle_floats
from tests.specs.floats import Format
from tests.support.assertions import assert_same_floats
from tests.support.cases.float import library, name

FORMATS = [
  *(Format(5, 2), Format(4, 3), Format(3, 0), Format(5, 10), Format(8, 7)),
  *(Format(6, 14), Format(8, 23), Format(7, 22), Format(4, 3, "nan")),
  Format(5, 12, subnormals=False),
]
METHODS = ("sequential", "pairwise", "kahan")
FMT = floats.FloatFormat(5, 2)
PRODUCTS = [(Format(5, 2), None, "sequential"), (Format(4, 3), Format(5, 10), "kahan")]
PRODUCTS.append((Format(5, 10), Format(3, 0), "pairwise"))
ORDERS = [("gathered", None, 5, "kahan"), ("ring", None, 5, "sequential")]
ORDERS += [("hierarchical", 3, 6, "sequential"), ("hierarchical", 2, 4, "kahan")]
ones = lambda *shape: np.ones(shape, np.float32)

# As one program each: operations one by one are up to forty.
add, multiply = (jax.jit(f, static_argnums=2) for f in (floats.add, floats.multiply))
total = jax.jit(floats.reduce_sum, static_argnums=(1, 2, 3))
matmul = jax.jit(floats.matmul, static_argnums=(2, 3, 4))
static = dict(static_argnums=(1, 2), static_argnames=("group_size", "method"))
all_reduce = jax.jit(floats.all_reduce, **static)
round_off_error = jax.jit(floats.round_off_error)


def operands(fmt, count, seed=0):
  """Two arrays of all signs and sizes, each a number of the format.

  With 8 exponent bits only what stays above 2^-126, whose subnormal numbers XLA flushes
  on CPUs: sums of up to 2^24 ulp, and the last bits of products.
  """
  rng = np.random.default_rng(seed)
  low = -30 if fmt.e == 8 else -fmt.bias - fmt.m
  size = 2.0 ** rng.integers(low, 2 ** (fmt.e - 1) - 1, count)
  a = rng.uniform(-2, 2, count) * size
  # A third are of any size, a third near each other, a third nearly cancel.
  apart = 2.0 ** rng.integers(-fmt.m - 4, fmt.m + 4, count)
  b = np.where(np.arange(count) % 3, a * rng.uniform(-2, 2, count), -a)
  b = np.where(np.arange(count) % 3 == 1, b * apart, b)
  b = np.where(np.abs(b) > 2.0**-30, b, 1.5) if fmt.e == 8 else b
  zeros = np.float32([0, -0.0, 0, -0.0, np.inf, np.inf, np.nan, 1])
  others = np.float32([0, -0.0, -0.0, 1, -np.inf, 1, 1, -np.inf])
  with np.errstate(over="ignore"):
    a, b = np.float32(a), np.float32(b)
  both = np.concatenate([a, zeros]), np.concatenate([b, others])
  return [oracle_floats.quantize(x, fmt) for x in both]


@pytest.mark.parametrize("fmt", one_in(2, FORMATS), ids=name)
def test_sums_and_products_are_rounded_once(fmt):
  a, b = operands(fmt, 12000)
  assert_same_floats(add(a, b, library(fmt)), float_sums.add(a, b, fmt))
  product = float_sums.multiply(a, b, fmt)
  assert_same_floats(multiply(a, b, library(fmt)), product)
  if fmt.subnormals and fmt.specials == "ieee":  # the oracle's own proof
    finite = np.flatnonzero(np.isfinite(a) & np.isfinite(b))[-200:]
    pairs = [(Fraction(float(a[i])), Fraction(float(b[i]))) for i in finite]
    exact = [oracle_floats.round_exactly(u + v, fmt) for u, v in pairs]
    np.testing.assert_array_equal(float_sums.add(a, b, fmt)[finite], exact)
    exact = [oracle_floats.round_exactly(u * v, fmt) for u, v in pairs]
    np.testing.assert_array_equal(product[finite], exact)


def test_operands_are_rounded_first():
  fmt = Format(5, 2)
  x, y = np.float32([1.3, 1e5, 0.1]), np.float32([2.7, -1e5, 3e-6])
  rounded = [oracle_floats.quantize(part, fmt) for part in (x, y)]
  assert_same_floats(add(x, y, FMT), float_sums.add(*rounded, fmt))
  assert_same_floats(multiply(x, y, FMT), float_sums.multiply(*rounded, fmt))
  half = x.astype(ml_dtypes.bfloat16)
  rounded = oracle_floats.quantize(half.astype(np.float32), fmt)
  expected = float_sums.add(rounded, np.float32(1.5), fmt)
  assert_same_floats(add(half, np.float16(1.5), FMT), expected)


@pytest.mark.parametrize("fmt", [Format(7, 22), Format(6, 14), Format(5, 12)], ids=name)
def test_sums_that_double_rounding_gets_wrong(fmt):
  """1 + half a step of the format + a little that binary32 loses."""
  step = 2.0**-fmt.m
  a = np.float32([1, 1, 1 + step, 1 + step, 1, -1])
  # Two steps of a number twice as large, and as little as the format has beside it.
  little = 2.0 ** (2 - fmt.bias - fmt.m)
  b = np.float32([step / 2 + 2.0**-27, step / 2 - 2.0**-27] * 2 + [little, little])
  b = oracle_floats.quantize(b, fmt)
  ours = np.asarray(add(a, b, library(fmt)))
  pairs = [map(Fraction, map(float, pair)) for pair in zip(a, b, strict=True)]
  assert_same_floats(ours, [oracle_floats.round_exactly(sum(x), fmt) for x in pairs])
  if fmt.m == 22:  # what is tested here is seen by this
    assert (oracle_floats.quantize(a + b, fmt) != ours).any()


def beside_half_a_step():
  """Numbers of 23 bits whose product is next to half a step of the format."""
  fmt, rng = Format(7, 22), np.random.default_rng(0)
  a = rng.integers(2**22, 2**23, 100000)
  b = (2 * rng.integers(2**21, 2**22, 100000) + 1) * 2**22 // a  # about half of a step
  a, b = a * 2.0**-22, b * 2.0**-22
  naive = oracle_floats.quantize((a * b).astype(np.float32), fmt)
  differs = np.flatnonzero(naive != oracle_floats.quantize(a * b, fmt))
  assert differs.size > 100
  yield fmt, a[differs], b[differs]


def beside_half_of_the_smallest():
  """The bits that decide are below 2^-126, which XLA flushes on CPUs."""
  a = np.arange(2**22 + 1, 2**22 + 2**20)
  b = -(-(2**45) // a)
  beside = np.flatnonzero((a * b - 2**45 <= 8) & (a * b > 2**45) & (b < 2**23))
  assert beside.size
  yield Format(7, 22), a[beside] * 2.0**-62, b[beside] * 2.0**-68  # above 2^-85


def large_and_tiny():
  """With 8 exponent bits the factors of a small product can be far apart."""
  fmt, rng = Format(8, 22), np.random.default_rng(0)
  a, b = (oracle_floats.quantize(rng.uniform(1, 2, 20000), fmt) for _ in range(2))
  for up, down in ((2.0**70, 2.0**-120), (2.0**100, 2.0**-126), (2.0**-60, 1.0)):
    yield fmt, a * np.float32(up), b * np.float32(down)


@pytest.mark.parametrize(
  "factors", [beside_half_a_step, beside_half_of_the_smallest, large_and_tiny]
)
def test_products_that_double_rounding_gets_wrong(factors):
  for fmt, a, b in factors():
    a, b = np.float32(a), np.float32(b)
    expected = float_sums.multiply(a, b, fmt)
    assert_same_floats(multiply(a, b, library(fmt)), expected)
    if factors is beside_half_of_the_smallest:
      assert (expected == 2.0**-84).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fmt", one_in(3, [FORMATS[i] for i in (4, 0, 7)]), ids=name)
def test_sums_of_many(fmt, method):
  x, _ = operands(fmt, 13 * 21)
  x = np.where(np.isfinite(x[: 13 * 21]), x[: 13 * 21], 1).astype(np.float32)
  if fmt.e < 8:
    x *= np.float32(1.001)  # which the sum is to round first
  x = x.reshape(13, 21)
  rounded = oracle_floats.quantize(x, fmt)
  ways = {0: rounded, -1: rounded.T, None: rounded.ravel()}
  for axis in ways if fmt == FORMATS[0] else (0,):
    expected = float_sums.total(ways[axis], fmt, method)
    assert_same_floats(total(x, library(fmt), axis, method), expected)


@pytest.mark.parametrize("method", METHODS)
def test_sums_of_nothing_of_one_and_of_ones(method):
  """Ones in (5, 2) stop at 8, for 8 + 1 is 8; with a compensation they go on."""

  @jax.jit
  def sums(*parts):
    return [floats.reduce_sum(x, FMT, 0, method=method) for x in parts]

  given = np.zeros((0, 3), np.float32), ones(0), np.float32([[1.1, 1e9]]), ones(64)
  expected = [0] * 3, 0, [1, np.inf], 8 if method == "sequential" else 64
  for one, other in zip(sums(*given), expected, strict=True):
    np.testing.assert_array_equal(one, np.float32(other))


@pytest.mark.parametrize("fmt, accumulator, method", PRODUCTS, ids=name)
def test_matmul(fmt, accumulator, method):
  rng = np.random.default_rng(1)
  a = rng.standard_normal((5, 19)).astype(np.float32)
  b = rng.standard_normal((19, 3)).astype(np.float32)
  ours = matmul(a, b, library(fmt), accumulator and library(accumulator), method)
  assert_same_floats(ours, float_sums.matmul(a, b, fmt, accumulator, method))


def test_matmul_of_figure_12_and_of_nothing():
  """Of numbers 0, 1 and 2: sums are 1, 1 + 1, 2 + 1 = 2, a tie whose even code wins."""
  fmt, wide = floats.FloatFormat(2, 0), floats.FloatFormat(5, 10)

  @jax.jit
  def products(ones, x, empty):
    return (
      floats.matmul(ones, ones.T, fmt),
      floats.round_to(ones @ ones.T, fmt),
      floats.matmul(ones, ones.T, fmt, wide),
      floats.matmul(ones, ones.T, fmt, method="pairwise"),
      # Products are rounded before they meet the accumulator: 1.25 * 1.25 is 1.5 there.
      floats.matmul(x, x, FMT, wide),
    ), [floats.matmul(a, b, FMT) for a, b in empty]

  empty = [(ones(m, k), ones(k, n)) for m, k, n in ((2, 0, 3), (0, 2, 3), (2, 3, 0))]
  found, nothing = products(ones(1, 4), np.full((1, 1), 1.25, np.float32), empty)
  assert [x.item() for x in found] == [2, np.inf, 4, np.inf, 1.5]
  for product, (a, b) in zip(nothing, empty, strict=True):
    np.testing.assert_array_equal(product, a @ b)


def test_derivatives_of_matmul():
  """Zero, or those of the plain product of the rounded operands."""
  rng = np.random.default_rng(2)
  shapes = (3, 4), (4, 2), (3, 2)
  a, b, cotangent = (np.float32(rng.standard_normal(s)) for s in shapes)
  rounded = [oracle_floats.quantize(x, Format(5, 2)) for x in (a, b)]
  for through in (False, True):
    f = lambda a, b, through=through: floats.matmul(a, b, FMT, straight_through=through)
    slopes = jax.jit(lambda a, b, f=f: jax.vjp(f, a, b)[1](cotangent))(a, b)
    expected = [cotangent @ rounded[1].T, rounded[0].T @ cotangent]
    for slope, exact in zip(slopes, expected, strict=True):
      # Sums of at most four products in binary32.
      np.testing.assert_allclose(slope, exact * through, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order, group_size, workers, method", ORDERS)
def test_all_reduce(order, group_size, workers, method):
  rng = np.random.default_rng(workers)
  fmt, shape = Format(4, 3), () if workers == 6 else (7, 9)
  x = rng.standard_normal((workers, *shape)).astype(np.float32)
  ours = all_reduce(x, library(fmt), order, group_size=group_size, method=method)
  assert ours.shape == shape
  assert_same_floats(ours, float_sums.all_reduce(x, fmt, order, group_size, method))


def test_groups_lose_least():
  """256 workers' ones in (5, 2): rings stop at 8, as in table 9 of the paper."""
  exact = np.full(3, 256, np.float32)
  sums = lambda *order, **of: all_reduce(ones(256, 3), FMT, *order, **of)
  assert round_off_error(exact, sums("ring")) == 1 - 8 / 256
  assert round_off_error(exact, sums("hierarchical", group_size=16)) == 1 - 64 / 256


def test_round_off_error_is_equation_5():
  exact = np.float32([1, -2, 0, 4, 0])
  rounded = np.float32([1.5, -2, 7, 3, 0])
  np.testing.assert_allclose(round_off_error(exact, rounded), 0.25, rtol=1e-6)
  assert float(round_off_error(exact, exact)) == 0
  assert round_off_error(np.zeros(5, np.float32), ones(5)) == 0


integers = np.ones((2, 2), np.int32)
ROWS = """
floats.reduce_sum(ones(3), FMT, method="fast") -> `method` ... 'fast'
floats.reduce_sum(ones(3), FMT, 1) -> `axis` ... 1
floats.matmul(ones(2, 3), ones(2, 3), FMT) -> (2, 3)
floats.matmul(ones(1, 1), ones(1, 1), FMT, method="x") -> `method` ... 'x'
floats.all_reduce(np.float32(1), FMT) -> `x` ... first axis of workers
floats.all_reduce(ones(4, 1), FMT, "tree") -> `order` ... 'tree'
floats.all_reduce(ones(4, 1), FMT, method="x") -> `method` ... 'x'
floats.all_reduce(ones(4, 1), FMT, group_size=2) -> `group_size`
floats.all_reduce(ones(4, 1), FMT, "hierarchical", group_size=v) for v in None, 3, 1.5
  -> `group_size` ... {v}
f(integers, FMT) for f in floats.reduce_sum, floats.all_reduce ;
  floats.matmul(ones(1, 2), integers, FMT) ; floats.add(ones(2), integers, FMT) ->
  TypeError: real float dtype, got int32
"""

test_mistakes = table.refused(ROWS, globals())
