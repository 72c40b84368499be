"""OneBit sends the paper's means in the page's rows, and feedback loses nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp.codecs import OneBit
from tests.plugins.slow_cases import slow
from tests.specs import one_bit
from tests.support import laws


def rows_of(codec, x):
  return np.asarray(laws.encoder(codec)(jnp.asarray(x), laws.KEY).rows)


def test_minus_zero_counts_as_zero():
  for x, expected in (
    ([-3, -1, 2, 4], [-2, -2, 3, 3]),  # the example of the definition
    ([-0.0, -2, -4, 6], [3, -3, -3, 3]),
  ):
    np.testing.assert_array_equal(laws.round_trip(OneBit(), np.float32(x)), expected)


HUGE = np.float32([3e38, 3.4e38, -3e38] * 64 + [np.finfo(np.float32).max] * 64)


@pytest.mark.parametrize("x", [laws.gaussian(3 * 64 + 9), HUGE], ids=["normal", "huge"])
def test_each_bucket_is_the_papers_quantiser(x):
  """The largest finite number is its own mean: one that rounds up is infinite."""
  expected = np.concatenate(
    [one_bit.ideal(x[i : i + 64]) for i in range(0, x.size, 64)]
  )
  restored = laws.round_trip(OneBit(), x)
  np.testing.assert_allclose(restored, expected, rtol=laws.mean_bound(64))


def test_a_side_without_elements_has_the_mean_zero():
  x = np.repeat(np.float32([2, -2]), 64)
  means = rows_of(OneBit(), x)[0, 64:].view(np.float32)
  np.testing.assert_array_equal(means[:2], [2, 0])
  np.testing.assert_array_equal(means[32:34], [0, -2])
  assert not means[2:32].any() and not means[34:].any()  # beyond the end


def test_zeros_count_in_rows_but_not_behind_a_leaf():
  """A leaf's filling is no element; in later stages rows are, filling included."""
  codec, x = OneBit(), np.float32([64])
  np.testing.assert_array_equal(laws.round_trip(codec, x), [64])
  tile = np.zeros((1, codec.tile_size), np.float32)
  tile[0, 0] = 64
  restored = np.asarray(codec.decode_rows(laws.encoded_rows(codec, tile))).ravel()
  np.testing.assert_array_equal(restored[:64], 1)
  assert not restored[64:].any()


def bits_an_element(codec, shape):
  payload = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(shape, jnp.float32))
  return 32 * payload.rows.size / np.prod(shape)


def test_bytes_of_columns_and_of_buckets():
  """A convolution's columns have three elements: two means and a word are as long."""
  assert bits_an_element(OneBit(per_column=True), (3, 3, 64, 64)) == 32
  assert bits_an_element(OneBit(), (64, 3, 64, 64)) == 2
  assert bits_an_element(OneBit(bucket_size=512), (512, 512)) == 1.125  # 1 / 28.4


@pytest.mark.parametrize("shape", [(), (5,), (33, 7), *slow(((1,),), ((70, 2, 3),))])
def test_columns_are_the_oracles(shape):
  codec = OneBit(per_column=True)
  x = laws.gaussian(shape)
  rows, column = rows_of(codec, x), (*shape, 1)[0]
  means = np.ascontiguousarray(rows[:, -2:]).view(np.float32)
  expected = one_bit.means_of(x, column=column)
  np.testing.assert_allclose(means, expected, rtol=laws.mean_bound(70))
  np.testing.assert_array_equal(rows, one_bit.encode(x, column=column, means=means))
  expected = one_bit.decode(rows, x.size, column=column).reshape(shape)
  np.testing.assert_array_equal(laws.round_trip(codec, x), expected)


def test_columns_are_the_first_dimension_by_all_others():
  x = np.float32([[[1, -1], [2, 5]], [[3, -3], [-2, 6]]])
  expected = np.float32([[[2, -2], [2, 5.5]], [[2, -2], [-2, 5.5]]])
  np.testing.assert_array_equal(laws.round_trip(OneBit(per_column=True), x), expected)
