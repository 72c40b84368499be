"""Fitted levels are those that a full search finds, and rows are the page's."""

import functools

import jax
import numpy as np
import pytest

from gradcomp._src.testing.noise import mean_is_the_leaf
from gradcomp.codecs import QSGD, Context, Leaf, Memory
from tests.plugins.slow_cases import slow
from tests.specs import levels as oracle_levels
from tests.specs import qsgd
from tests.support import laws

every_width = pytest.mark.parametrize("bits", [3, *slow(2, 4)])


def nonuniform(bits, bucket_size=64, **options):
  codec = QSGD(bits=bits, bucket_size=bucket_size, levels="nonuniform", **options)
  return codec.bind(Leaf(()))


@functools.cache
def fitter(bits):
  return jax.jit(nonuniform(bits).fits.fit)


# Magnitudes in [0, 1], from a generator.
DRAWS = {
  "gaussian": lambda rng, n: np.abs(rng.standard_normal(n)).clip(0, 4) / 4,
  "laplace": lambda rng, n: np.abs(rng.laplace(size=n)).clip(0, 8) / 8,
  "uniform": lambda rng, n: rng.uniform(size=n),
  "spike at zero": lambda rng, n: (rng.uniform(size=n) >= 0.99) * rng.uniform(size=n),
  "two-valued": lambda rng, n: np.where(rng.uniform(size=n) < 0.7, 0.1, 0.6),
}


def fitted_to(x, bits, bucket_size=64):
  counts = oracle_levels.counts_of(x, bits=bits, bucket_size=bucket_size)
  return oracle_levels.best(counts, bits)


@every_width
def test_the_first_levels_are_equally_spaced(bits):
  levels = np.asarray(nonuniform(bits).init().shared)
  np.testing.assert_array_equal(256 * levels, oracle_levels.first(bits))
  both = np.concatenate([-levels[::-1], levels])
  # Each level is rounded to 1/256, by half of that at most.
  np.testing.assert_allclose(np.diff(both), 2 / (2**bits - 1), atol=1 / 256)


@every_width
@pytest.mark.parametrize("kind", DRAWS)
def test_the_fit_is_the_optimum(bits, kind):
  magnitudes = DRAWS[kind](np.random.default_rng(0), 10_000)
  counts = np.histogram(magnitudes, 256, (0, 1))[0].astype(np.int32)
  k = 256 * np.asarray(fitter(bits)(counts, nonuniform(bits).init().shared))
  assert (k == np.trunc(k)).all() and k[0] >= 0 and k[-1] == 256
  assert (np.diff(k) > 0).all()
  least = oracle_levels.variance(counts, oracle_levels.best(counts, bits))
  # Counts are rounded to one in 7936 of all; 7e-4 is the worst that this costs here.
  found = oracle_levels.variance(counts, k.astype(int))
  assert least * (1 - 1e-9) <= found <= least * (1 + 2e-3)
  # And the search matters: equally spaced levels are worse.
  first = oracle_levels.first(bits)
  assert kind == "uniform" or found < 0.95 * oracle_levels.variance(counts, first)


def test_extreme_counts():
  """Without counts levels stay. Of many workers a bin is an int32, a sum of two not."""
  kept = np.float32([0.25, 0.5, 0.75, 1])
  np.testing.assert_array_equal(fitter(3)(np.zeros(256, np.int32), kept), kept)
  counts = np.zeros(256, np.int32)
  counts[[3, 70, 200]] = 2**31 - 1
  levels = 256 * np.asarray(fitter(3)(counts, nonuniform(3).init().shared))
  best = oracle_levels.variance(counts, oracle_levels.best(counts, 3))
  assert oracle_levels.variance(counts, levels.astype(int)) == best


@pytest.mark.parametrize("bucket_size", [64, None])
def test_whole_leaves_are_counted(bucket_size):
  """Or 128 of its buckets, evenly.

  Buckets with a NaN and zero buckets are left out, as is the last broken one.
  """
  codec = nonuniform(3, bucket_size)
  x = laws.gaussian(150 * 64 + 13)
  if bucket_size is not None:
    x[64:128], x[200], x[300] = 0, np.nan, np.inf
  counts = np.asarray(jax.jit(codec.measure)(x))
  assert counts.dtype == np.int32
  assert counts.sum() == (125 * 64 if bucket_size else 18 * 512)
  expected = oracle_levels.counts_of(x, bits=3, bucket_size=bucket_size)
  np.testing.assert_array_equal(counts, expected)
  # A tensor of which an element is not finite has no scale.
  x[:] = [0] if bucket_size else [np.nan, *[1] * (x.size - 1)]
  assert not np.asarray(jax.jit(codec.measure)(x)).any()
  assert not np.asarray(codec.measure(np.zeros(0, np.float32))).any()
  short = np.asarray(jax.jit(codec.measure)(np.float32([-2, 1, 0.25, 0])))
  expected = np.bincount([0, 32, 128, 255], minlength=256)  # the last bin is closed
  np.testing.assert_array_equal(short, expected)


@pytest.mark.parametrize(
  "bucket_size, rounding", [(64, "stochastic"), (None, "nearest")]
)
@every_width
def test_payload_is_the_oracles(bits, bucket_size, rounding):
  """Bit for bit under given levels: fitted ones, or with the first at zero."""
  codec = nonuniform(bits, bucket_size, rounding=rounding)
  x = laws.gaussian(codec.tile_size + 3 * 64 + 13)
  x[3], x[40], x[64:96] = 0.0, -0.0, 0.0
  encode = jax.jit(functools.partial(laws.encode, codec, key=laws.KEY))
  for k in (fitted_to(x, bits), [0, *range(250, 249 + 2 ** (bits - 1) - 1), 256]):
    rule = dict(bits=bits, bucket_size=bucket_size, rounding=rounding)
    expected = oracle_levels.encode(x, k=k, key=laws.KEY, **rule)
    rows = encode(x, levels=np.float32(k) / 256).rows
    np.testing.assert_array_equal(rows, expected)


def test_without_levels_a_leaf_is_encoded_with_its_own():
  codec, x = nonuniform(3), laws.gaussian(2000)
  levels = fitter(3)(jax.jit(codec.measure)(x), codec.init().shared)
  encode = jax.jit(functools.partial(laws.encode, codec, key=laws.KEY))
  own = encode(x, levels=())
  np.testing.assert_array_equal(own.rows, encode(x, levels=levels).rows)


@every_width
def test_stochastic_rounding_is_unbiased(bits):
  """Under the fitted levels, against each element's own distance of levels."""
  codec, x = nonuniform(bits), laws.gaussian(500)
  k = fitted_to(x, bits)
  scales = qsgd.scales_of(x, bits=bits, bucket_size=64, norm="max")
  scales = scales.ravel().repeat(64)[: x.size]
  edges = np.concatenate([[-k[0]], k]) / 256
  above = np.searchsorted(edges, np.abs(x) / scales).clip(1, len(k))
  step = (edges[above] - edges[above - 1]) * scales
  context = Context(memory=Memory(np.float32(k) / 256))
  mean_is_the_leaf(codec, x, step=step, context=context)
