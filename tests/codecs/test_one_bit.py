"""OneBit sends the paper's means in the page's rows, and feedback loses nothing."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp.codecs import OneBit, Payload
from tests.specs import one_bit
from tests.support import laws
from tests.support.assertions import assert_same_bits

COLUMN_SHAPES = [(), (1,), (5,), (33, 7), (70, 2, 3)]


def rows_of(codec, x):
  return np.asarray(laws.encoder(codec)(jnp.asarray(x), laws.KEY).rows)


def test_the_example_of_the_definition():
  x = np.float32([-3, -1, 2, 4])
  np.testing.assert_array_equal(laws.round_trip(OneBit(), x), [-2, -2, 3, 3])


def test_what_the_codec_says_of_itself():
  for codec in (OneBit(), OneBit(per_column=True)):
    assert not codec.unbiased and not codec.needs_key
    assert codec.agree(jnp.ones(3)) is None


@pytest.mark.parametrize("bucket_size", [32, 64, 512])
def test_payload_is_the_oracles(bucket_size):
  """Words bit for bit, means to the order of additions; then both decode alike."""
  codec = OneBit(bucket_size=bucket_size)
  x = laws.gaussian(codec.tile_size + 5 * bucket_size + 13)
  x[3], x[40], x[64:128] = 0.0, -0.0, 0.0
  rows = rows_of(codec, x)
  means = rows[:, bucket_size:].view(np.float32)
  expected = one_bit.means_of(x, bucket_size=bucket_size)
  np.testing.assert_allclose(means, expected, rtol=laws.mean_bound(bucket_size))
  np.testing.assert_array_equal(
    rows, one_bit.encode(x, bucket_size=bucket_size, means=means)
  )


LARGEST = np.full(64, np.finfo(np.float32).max)
HUGE = np.concatenate([np.float32([3e38, 3.4e38, -3e38] * 64), LARGEST])


@pytest.mark.parametrize("x", [laws.gaussian(3 * 64 + 9), HUGE], ids=["normal", "huge"])
def test_each_bucket_is_the_papers_quantiser(x):
  """The largest finite number is its own mean: one that rounds up is infinite."""
  restored = laws.round_trip(OneBit(), x)
  for start in range(0, x.size, 64):
    bucket = slice(start, start + 64)
    np.testing.assert_allclose(
      restored[bucket],
      one_bit.ideal(x[bucket]),
      rtol=laws.mean_bound(64),
    )


def test_a_side_without_elements_has_the_mean_zero():
  x = np.repeat(np.float32([2, -2]), 64)
  means = rows_of(OneBit(), x)[0, 64:].view(np.float32)
  np.testing.assert_array_equal(means[:2], [2, 0])
  np.testing.assert_array_equal(means[32:34], [0, -2])
  assert not means[2:32].any() and not means[34:].any()  # beyond the end


def test_minus_zero_counts_as_zero():
  x = np.float32([-0.0, -2, -4, 6])
  np.testing.assert_array_equal(laws.round_trip(OneBit(), x), [3, -3, -3, 3])


def test_zeros_count_in_rows_but_not_behind_a_leaf():
  """A leaf's filling is no element; in later stages rows are, filling included."""
  codec, x = OneBit(), np.float32([64])
  np.testing.assert_array_equal(laws.round_trip(codec, x), [64])
  tile = np.zeros((1, codec.tile_size), np.float32)
  tile[0, 0] = 64
  restored = np.asarray(codec.decode_rows(laws.encoded_rows(codec, tile))).ravel()
  np.testing.assert_array_equal(restored[:64], 1)
  assert not restored[64:].any()


@pytest.mark.parametrize("bucket_size", [64, 512])
def test_constant_buckets_keep_their_value(bucket_size):
  """Exactly, though their sums are rounded; a short last bucket too."""
  values = np.float32([1, -0.5, 2.0**127, -(2.0**-96), -1 / 3, 3e38, -7e-20, np.pi])
  x = np.repeat(values, bucket_size)
  for leaf in (x, x[:-5]):
    restored = laws.round_trip(OneBit(bucket_size=bucket_size), leaf)
    np.testing.assert_array_equal(restored, leaf)
  columns = x.reshape(-1, bucket_size).T
  restored = laws.round_trip(OneBit(per_column=True), columns)
  np.testing.assert_array_equal(restored, columns)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_element_spoils_its_bucket_wherever_it_is(bad):
  buckets = np.ones((65, 64), np.float32)
  buckets[:, ::2] = -1
  clean = buckets.copy()
  np.fill_diagonal(buckets, bad)
  restored = laws.round_trip(OneBit(), buckets)
  assert np.isnan(restored[:64]).all()
  np.testing.assert_array_equal(restored[64], clean[64])


@pytest.mark.parametrize("codec", [OneBit(), OneBit(per_column=True)], ids=laws.name)
def test_the_residual_is_what_decoding_leaves(codec):
  x = laws.gaussian((70, 3))
  rows, residual, *_ = jax.jit(partial(laws.encoded, codec))(jnp.asarray(x))
  np.testing.assert_array_equal(rows, rows_of(codec, x))
  restored = codec.decode(Payload(rows), like=x)
  assert_same_bits(residual, x - np.asarray(restored))


def test_with_feedback_nothing_is_lost():
  """What 20 steps sent, and the last residual, are what they were given."""
  codec = OneBit()
  step = jax.jit(partial(laws.encoded, codec))
  residual = np.zeros(500, np.float32)
  given, sent = np.zeros(500), np.zeros(500)
  largest = 0.0
  for seed in range(20):
    x = laws.gaussian(500, seed)
    value = x + residual
    rows, residual, *_ = step(jnp.asarray(value))
    given += x
    sent += np.asarray(laws.decoder(codec, x.shape)(Payload(rows)), np.float64)
    residual = np.asarray(residual)
    largest = max(largest, np.abs(value).max(), np.abs(residual).max())
  # Two roundings a step, each of half an ulp of a value that is at most `largest`.
  np.testing.assert_allclose(sent + residual, given, atol=40 * 2.0**-24 * largest)
  assert np.abs(residual).max() > 0.1  # it is not small: without it much is lost


def bits_an_element(codec, shape):
  payload = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(shape, jnp.float32))
  return 32 * payload.rows.size / np.prod(shape)


def test_bytes_of_columns_and_of_buckets():
  """A convolution's columns have three elements: two means and a word are as long."""
  shape = (3, 3, 64, 64)
  assert bits_an_element(OneBit(per_column=True), shape) == 32
  assert bits_an_element(OneBit(), (64, 3, 64, 64)) == 2
  assert bits_an_element(OneBit(bucket_size=512), (512, 512)) == 1.125  # 1 / 28.4


@pytest.mark.parametrize("shape", COLUMN_SHAPES)
def test_columns_are_the_oracles(shape):
  codec = OneBit(per_column=True)
  x = laws.gaussian(shape)
  rows, column = rows_of(codec, x), (*shape, 1)[0]
  means = np.ascontiguousarray(rows[:, -2:]).view(np.float32)
  expected = one_bit.means_of(x, column=column)
  np.testing.assert_allclose(means, expected, rtol=laws.mean_bound(70))
  np.testing.assert_array_equal(rows, one_bit.encode(x, column=column, means=means))
  np.testing.assert_array_equal(
    laws.round_trip(codec, x),
    one_bit.decode(rows, x.size, column=column).reshape(shape),
  )


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_an_empty_leaf_has_no_columns(shape):
  codec, x = OneBit(per_column=True), np.zeros(shape, np.float32)
  assert len(rows_of(codec, x)) == 0
  chex.assert_shape(laws.round_trip(codec, x), shape)


def test_columns_are_the_first_dimension_by_all_others():
  x = np.float32([[[1, -1], [2, 5]], [[3, -3], [-2, 6]]])
  expected = np.float32([[[2, -2], [2, 5.5]], [[2, -2], [-2, 5.5]]])
  np.testing.assert_array_equal(laws.round_trip(OneBit(per_column=True), x), expected)


def test_a_bad_element_spoils_its_column():
  x = laws.gaussian((33, 4))
  clean = laws.round_trip(OneBit(per_column=True), x)
  x[32, 1], x[0, 2] = np.nan, -np.inf
  restored = laws.round_trip(OneBit(per_column=True), x)
  assert np.isnan(restored[:, 1:3]).all()
  np.testing.assert_array_equal(restored[:, [0, 3]], clean[:, [0, 3]])
