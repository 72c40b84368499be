"""EightBit has the paper's data types, and rounds to their numbers."""

import hashlib

import jax
import numpy as np
import pytest

from gradcomp._src.testing.noise import mean_is_the_leaf
from gradcomp.codecs import EightBit
from tests.specs import eight_bit, planes
from tests.support import laws

every_type = pytest.mark.parametrize("data_type", eight_bit.DATA_TYPES)


def wide_range(size):
  """Normal numbers over eight decades, with both zeros among them."""
  decades = np.random.default_rng(1).uniform(-8, 0, size)
  x = (laws.gaussian(size) * 10**decades).astype(np.float32)
  x[3], x[40] = 0.0, -0.0
  return x


def scales_of(codec, x):
  """Each element's scale, float64[size]."""
  rule = dict(data_type=codec.dtype, bucket_size=codec.bucket_size)
  scales = eight_bit.scales_of(x, rounding=codec.rounding, **rule)
  each = np.broadcast_to(scales, (len(scales), 4)).ravel().astype(np.float64)
  return each.repeat(codec.bucket_size or 512)[: x.size]


def decoded_table(data_type):
  """What all 256 codes decode to under the scale 1."""
  words = planes.pack(np.tile(np.arange(256), 8), 8, 512)
  rows = np.concatenate([words, np.float32([[1]]).view(np.uint32)], axis=1)
  codec = EightBit(dtype=data_type)
  return np.asarray(jax.jit(codec.decode_rows)(rows)).ravel()[:256]


@every_type
def test_tables_are_the_papers(data_type):
  """Each rounded once; zero is exact, codes are ordered, a sign bit mirrors them."""
  table = decoded_table(data_type)
  levels = eight_bit.levels(data_type).astype(np.float32)
  np.testing.assert_array_equal(table[: len(levels)], levels)
  assert table[0] == 0 and (np.diff(levels) > 0).all()
  mirrored = np.arange(1, min(len(levels), 128))
  np.testing.assert_array_equal(table[128 + mirrored], -levels[mirrored])


def test_the_dynamic_tree_gives_the_papers_examples():
  """Section 3.1, with 1 as the largest element and as many digits as are printed."""
  x = np.float32([1, 0.2345678, 0.0000234])
  restored = laws.round_trip(EightBit(dtype="dynamic_tree"), x)
  assert [f"{restored[1]:.6f}", f"{restored[2]:.6f}"] == ["0.236719", "0.000019"]


def test_dynamic_numbers_are_closest_where_the_paper_says():
  """Its example 0.2345678: the dynamic tree, the static tree, then the mantissa."""
  types = ("dynamic_tree", "static_tree", "mantissa")
  errors = [np.abs(decoded_table(t) - 0.2345678).min() for t in types]
  assert errors[0] < errors[1] < errors[2]


def test_the_dynamic_tree_is_that_of_its_author():
  """Numbers of the table 8bit_floats.hdf5 of his clusterNet: at its ends and splits.

  It has 126 numbers from 2.75e-6 on, which are all of ours but zero and the smallest.
  """
  theirs = {0: 2.75e-6, 1: 7.25e-6, 2: 1.875e-5, 3: 3.625e-5, 4: 5.875e-5}
  theirs |= {61: 0.098281242, 62: 0.10546875, 93: 0.44453126, 94: 0.45859376}
  theirs |= {125: 0.99140614}
  ours = decoded_table("dynamic_tree")[2:128]
  # His tables were made in binary32, up to three roundings from ours.
  np.testing.assert_allclose(ours[[*theirs]], [*theirs.values()], rtol=3 * 2.0**-24)


def test_the_dynamic_map_is_that_of_bitsandbytes():
  """Its create_dynamic_map() in binary32, where linspace rounds a product once.

  The hash is that of the map which bitsandbytes 0.4x on PyTorch makes, sorted.
  """
  found = [0.0, 1.0]
  for i in range(7):
    count = 2**i + 1
    start, stop = np.float32(0.1), np.float32(1)
    step = np.float64((stop - start) / np.float32(count - 1))
    index = np.arange(count)
    up, down = start + step * index, stop - step * (count - 1 - index)
    edges = np.where(index < count // 2, up, down).astype(np.float32)
    means = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (i - 6))
    found += [*means, *-means]
  theirs = np.sort(np.array(found, np.float32))
  assert hashlib.sha1(theirs.tobytes()).hexdigest().startswith("cb07ba0d1557")
  # Ours are rounded once, theirs up to five times: at most an ulp apart.
  np.testing.assert_allclose(np.sort(decoded_table("dynamic_map")), theirs, rtol=2**-23)


@every_type
def test_codes_are_the_nearest(data_type):
  """As a search in float64 finds them, but for numbers almost between two levels."""
  codec, x = EightBit(dtype=data_type), wide_range(200_000)
  rows = np.asarray(laws.encoder(codec)(x, laws.KEY).rows)
  codes = planes.unpack(rows[:, :512], 8)[: x.size].astype(int)
  magnitudes = np.where(x < 0, codes % 128, codes)
  t = x / scales_of(codec, x)
  nearest = eight_bit.nearest(t, data_type)
  other = np.flatnonzero(magnitudes != nearest)
  # The position is cut, and its slope and offset are rounded: by two units of 2^-16 of
  # a step at most, by half a unit on average.
  assert len(other) <= 2.0**-15 * x.size
  assert (np.abs(magnitudes - nearest) <= 1).all()
  levels = eight_bit.levels(data_type)
  near, far = levels[nearest[other]], levels[magnitudes[other]]
  excess = np.abs(np.abs(t[other]) - far) - np.abs(np.abs(t[other]) - near)
  assert (excess <= 4 * 2.0**-16 * np.abs(far - near)).all()


@every_type
def test_the_largest_element(data_type):
  """It is the last level: 1 in three data types, and in the map if it is positive."""
  x = np.repeat(np.float32([0.1, 7, 3.4e38, 2.0**-96]), 64)
  codec = EightBit(dtype=data_type, bucket_size=64)
  for sign, last in (
    (1, eight_bit.levels(data_type)[-1]),
    (-1, eight_bit.largest_of_both_signs(data_type)),
  ):
    restored = laws.round_trip(codec, sign * x)
    np.testing.assert_array_equal(restored, np.float32(last) * sign * x)
  if eight_bit.levels(data_type)[-1] == 1:  # and so the scale: a second time is exact
    once = laws.round_trip(codec, np.abs(wide_range(256)))
    np.testing.assert_array_equal(laws.round_trip(codec, once), once)


@every_type
def test_stochastic_rounding_is_unbiased(data_type):
  """Its largest element too, and over all decades; against each element's own step."""
  codec = EightBit(dtype=data_type, bucket_size=64, rounding="stochastic")
  x = wide_range(500)
  scales, levels = scales_of(codec, x), eight_bit.levels(data_type)
  gaps = np.diff(levels)
  widest = np.max([gaps, [*gaps[1:], 0], [0, *gaps[:-1]]], axis=0)
  above = np.searchsorted(levels, np.abs(x) / scales).clip(1, len(gaps))
  mean_is_the_leaf(codec, x, draws=1000, step=widest[above - 1] * scales)


@pytest.mark.parametrize("data_type", ["linear", "dynamic_map"])
def test_zeros_among_others_stay_zero(data_type):
  """Of 2^20 draws, each with 2^-16 for an error of one fixed-point unit to show."""
  codec = EightBit(dtype=data_type, bucket_size=64, rounding="stochastic")
  x = np.zeros(2**20, np.float32)
  x[::64] = 1
  assert np.flatnonzero(laws.round_trip(codec, x)).size == 2**14


def test_fixed_exponents_saturate():
  """Of numbers beyond 10^k, or 15 * 10^(k-1), the largest level remains."""
  x = np.float32([1000, -1000, 10, 0, 3, 15, -15])
  static = EightBit(dtype="static_tree", exponent_offset=1)
  restored = laws.round_trip(static, x)[:4]
  np.testing.assert_array_equal(restored, np.float32([9.71875, -9.71875, 9.71875, 0]))
  restored = laws.round_trip(EightBit(dtype="mantissa", exponent_offset=1), x)
  # k / 15 is rounded, and its product with 15.
  np.testing.assert_allclose(restored, [15, -15, 10, 0, 3, 15, -15], rtol=2.0**-23)
