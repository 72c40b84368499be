"""BlockTop is what its page says: the largest of blocks, by an independent oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp.codecs import BlockTop, Payload
from gradcomp.exchange import AllGather
from tests.plugins.slow_cases import slow
from tests.specs import block_top
from tests.support import laws

CODEC = BlockTop()
CODECS = [
  CODEC,
  BlockTop(block_size=16, count=3),
  BlockTop(block_size=8, count=2, bits=8),
  BlockTop(block_size=128, bits=8),
  BlockTop(count=2, bits=32),
  *slow(BlockTop(block_size=4096), BlockTop(block_size=8, count=4)),
]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=laws.name)


def options(codec):
  return dict(block_size=codec.block_size, count=codec.count, value_bits=codec.bits)


def leaf(codec):
  """Blocks of many magnitudes, with zeros, ties, and the ends of every rounding."""
  size = codec.block_size
  x = laws.gaussian(2 * codec.tile_size + 5 * size + 3).reshape(-1)
  blocks = x[: x.size // size * size].reshape(-1, size)  # a view
  blocks *= np.float32(10) ** np.random.default_rng(1).uniform(-2, 0, (len(blocks), 1))
  blocks[:8] = 0
  blocks[8:16] = np.round(4 * blocks[8:16] / abs(blocks[8:16]).max()) / 4
  # One element alone, in the first and in the last place, around each limit.
  scale = abs(blocks[: codec.tile_size // size]).max()
  parts = np.float32([3 / 16, 3 / 8, 1 / 2, 11 / 16, 1]) * scale
  near = np.stack([np.nextafter(parts, np.float32(0)), parts, -parts]).ravel()
  around = blocks[16 : 16 + 2 * near.size]
  around[:] = 0
  around[: near.size, 0] = near
  around[near.size :, -1] = near
  return x


@every_codec
def test_values_are_the_oracles(codec):
  x = leaf(codec)
  rows = block_top.encode(x, **options(codec))
  encoded = laws.encoder(codec)(jnp.asarray(x), None)
  np.testing.assert_array_equal(encoded.rows, rows)
  expected = block_top.decode(rows, x.size, **options(codec))
  assert np.count_nonzero(expected) > 0
  np.testing.assert_array_equal(laws.round_trip(codec, x), expected)


@every_codec
def test_what_is_sent_and_the_residual_are_the_leaf(codec):
  """Exactly, for the residual is their difference. And no element grows by it."""
  x = leaf(codec)
  for part in (x, x[: codec.tile_size], x[:77]):
    rows, rest, *_ = jax.jit(partial(laws.encoded, laws.here(codec)))(part)
    sent = np.asarray(codec.decode(Payload(rows), like=part))
    np.testing.assert_array_equal(rest, part - sent)
    # A product by 3/8 is rounded, and is at most twice what it stands for.
    assert (np.abs(rest) <= np.abs(part) * np.float32(1 + 2.0**-22)).all()


def near_roundings(codec):
  """Tiles of scales from 2**-40 to 2**40.

  The largest element of a block is a few units of the last place from where it is
  rounded otherwise.
  """
  tiles, size = 9, codec.block_size
  draw = np.random.default_rng(2)
  x = draw.standard_normal((tiles, codec.tile_size // size, size)).astype(np.float32)
  scale = np.float32(2) ** draw.permutation(np.linspace(-40, 40, tiles)).reshape(-1, 1)
  scale = (scale * draw.uniform(1, 2, scale.shape)).astype(np.float32)
  limits = np.float32([3 / 16, 3 / 8, 1 / 2, 11 / 16, *np.arange(1, 256, 2) / 254])
  largest = scale * draw.choice(limits, x.shape[:2])
  largest = largest.view(np.int32) + draw.integers(-2, 3, x.shape[:2], np.int32)
  largest = np.minimum(largest.view(np.float32), scale)
  largest[:, :1] = scale
  at = np.abs(x).argmax(axis=2)[..., None]
  top = np.take_along_axis(x, at, axis=2)
  x *= np.abs(largest[..., None] / top)
  np.put_along_axis(x, at, largest[..., None] * np.sign(top), axis=2)
  return x.ravel()


@every_codec
def test_what_is_sent_and_the_residual_add_up_to_the_leaf(codec):
  """To the bit: each difference is a float32. Zeros of both signs are equal here."""
  x = near_roundings(codec)
  rows, rest, *_ = jax.jit(partial(laws.encoded, laws.here(codec)))(x)
  sent = np.asarray(laws.decoder(codec, x.shape)(Payload(rows)))
  assert 0 < np.count_nonzero(sent) < x.size
  np.testing.assert_array_equal(sent + np.asarray(rest), x)


def test_with_whole_values_the_largest_are_gone():
  """What remains is below 1 - count / B of the square, the bound of any selection."""
  codec = BlockTop(block_size=16, count=2, bits=32)
  x = laws.gaussian(codec.tile_size)
  rest = x - laws.round_trip(codec, x)
  assert np.count_nonzero(rest) == x.size * 14 // 16
  assert np.square(rest).sum() < 14 / 16 * np.square(x).sum()


def test_energy_is_that_of_the_notes():
  """Of Gaussian elements the largest of 64 hold E[max^2] / 64 = 0.108."""
  x = laws.gaussian(64 * CODEC.tile_size)
  kept = lambda codec: 1 - np.square(x - laws.round_trip(codec, x)).sum() / x.size
  # Of 8192 blocks, whose largest squares deviate by 2.2 / 64: five standard errors.
  assert abs(kept(BlockTop(bits=32)) - 0.108) < 5 * 2.2 / 64 / 8192**0.5 + 0.001
  # Eleven sixteenths of s are the limit: errors of up to 5/16 s are 1/8 of the square.
  assert kept(CODEC) > 0.09


def test_the_pages_example():
  codec = BlockTop(block_size=8)
  x = jnp.zeros(17).at[jnp.array([0, 1, 15, 16])].set(jnp.array([1.0, -4, 2, 1.5]))
  rows = np.asarray(laws.encoder(codec)(x, None).rows)
  assert rows.shape == (1, 33)
  assert rows[0, :3].tolist() == [0x1B, 0x01, 0x1C]
  assert rows[0, 32] == 0x40800000
  assert not rows[0, 3:32].any()
  value = laws.round_trip(codec, x)
  assert np.flatnonzero(value).tolist() == [1, 15, 16]
  assert value[[1, 15, 16]].tolist() == [-4, 4, 1.5]


@pytest.mark.parametrize("bits", [2, 8, 32])
def test_of_equal_elements_the_first_is_sent(bits):
  codec = BlockTop(block_size=8, bits=bits)
  x = np.zeros(64, np.float32)
  x[3:8], x[4] = 1, -1
  x[17:20] = 1, 1 + 2.0**-21, 1 + 2.0**-20  # three bits do not count, and the last does
  value = laws.round_trip(codec, x)
  assert np.flatnonzero(value).tolist() == [3, 19]
  x[19] = 1 + 2.0**-21
  assert np.flatnonzero(laws.round_trip(codec, x)).tolist() == [3, 17]


@pytest.mark.parametrize(
  "bits, place, value, reason",
  [
    (2, 32, 0x7F800000, "a scale must be"),
    (2, 32, 0, "under a scale of 0"),
    (2, 31, 1, "fill the last tile"),
    (2, 0, 1 << 31, "unused bits"),
    (8, 0, 1 << 8, "level 0"),
    (32, 0, 7, "the value 0"),
  ],
)
def test_what_no_encoder_sends_is_refused(bits, place, value, reason):
  codec = BlockTop(block_size=8, bits=bits)
  x = np.zeros(17, np.float32)
  x[9] = 1
  rows = np.array(laws.encoder(codec)(jnp.asarray(x), None).rows)
  read = lambda: block_top.decode(rows, 17, **options(codec))
  np.testing.assert_array_equal(read(), x)
  rows[0, place] = value
  with pytest.raises(ValueError, match=reason):
    read()


def test_zeros_send_nothing():
  x = np.zeros(CODEC.tile_size, np.float32)
  x[::2] = -0.0
  assert not np.asarray(laws.encoder(CODEC)(jnp.asarray(x), None).rows).any()
  x[70] = -2
  value = laws.round_trip(CODEC, x)
  assert np.flatnonzero(value).tolist() == [70]


@pytest.mark.parametrize("bits", [2, 8, 32])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(bits, bad):
  """Also two of a block, of which only one is sent."""
  codec = BlockTop(bits=bits)
  x = laws.gaussian(2 * codec.tile_size)
  clean = laws.round_trip(codec, x).copy()
  x[[130, 131]] = bad
  value = laws.round_trip(codec, x)
  spoiled = slice(128, 192) if bits == 32 else slice(0, codec.tile_size)
  assert np.isnan(value[spoiled]).all()
  clean[spoiled] = np.nan
  np.testing.assert_array_equal(value, clean)


def test_bytes():
  """A byte for 64 elements, and a scale for 8192."""
  for size in (1, 8192, 2**24):
    leaf = jax.ShapeDtypeStruct((size,), jnp.float32)
    rows = jax.eval_shape(laws.here(CODEC).encode, leaf).rows
    assert rows.size * 4 == -(-size // 8192) * (8192 // 64 + 4)
  assert CODEC.density == 1 / 64


def test_encoding_and_decoding_are_one_pass():
  """No sort, no scatter, no gather; temporaries of an eighth of the leaf, and less."""
  x = jax.ShapeDtypeStruct((2**20,), jnp.float32)
  codec = laws.here(CODEC)
  encode = jax.jit(lambda x: codec.encode(x).rows).lower(x).compile()
  rows = jax.eval_shape(lambda x: codec.encode(x).rows, x)
  decode = jax.jit(codec.decode_rows).lower(rows).compile()
  for program in (encode, decode):
    text = program.as_text()
    assert not any(word in text for word in ("sort(", "scatter(", "gather(", "topk"))
  # The largest of eight lanes of a block, and what is as long as the entries.
  assert encode.memory_analysis().temp_size_in_bytes <= 4 * 2**20 * (1 / 8 + 4 / 64)
  assert decode.memory_analysis().temp_size_in_bytes <= 4 * 2**20 * 3 / 64


@every_codec
def test_entries_are_what_a_row_sends(codec):
  x = leaf(codec)
  rows = laws.encoder(codec)(jnp.asarray(x), None).rows
  places, values = jax.jit(codec.entries)(rows)
  assert places.shape == values.shape == (len(rows), codec.slots)
  found = np.zeros((len(rows), codec.tile_size), np.float32)
  for row, at, value in zip(found, np.asarray(places), np.asarray(values), strict=True):
    np.add.at(row, at, value)
  np.testing.assert_array_equal(found.ravel()[: x.size], laws.round_trip(codec, x))


def test_the_short_form_keeps_what_is_not_sent():
  """All that three steps send, and what remains, is the sum of three gradients."""
  tx = gradcomp.blocktop(8, bits=32, min_leaf_size=0)
  gradient = jnp.asarray(np.random.default_rng(0).integers(-9, 10, 1700), jnp.float32)
  state = tx.init(gradient)
  total = 0
  for _ in range(3):
    update, state = jax.jit(tx.update)(gradient, state)
    total += update
  assert 0 < np.count_nonzero(total) < 1700
  np.testing.assert_array_equal(total + state.residual, 3 * gradient)


def test_momentum_is_masked_where_something_was_sent():
  tx = gradcomp.blocktop(8, feedback="momentum", min_leaf_size=0)
  gradient = jnp.asarray(laws.gaussian(1600))
  update, state = jax.jit(tx.update)(gradient, tx.init(gradient))
  sent = np.asarray(update) != 0
  assert sent.sum() == 200 - np.asarray(update.reshape(-1, 8) == 0).all(axis=1).sum()
  np.testing.assert_array_equal(np.asarray(state.velocity)[sent], 0)
  assert (np.asarray(state.velocity)[~sent] != 0).all()


def test_workers_gather_until_it_sends_more_than_a_mean():
  tx = gradcomp.blocktop(axis_name="data")
  params = jnp.zeros(2**20)
  told = gradcomp.explain(tx, params, workers=8)
  assert "all_gather" in str(told)
  assert told.bytes_sent == 7 * 2**20 // 8192 * 132
  assert "two_shot" in str(gradcomp.explain(tx, params, workers=1024))


def test_a_sum_is_divided_by_those_who_sent_an_element():
  """Zeros are sent by nobody, and where nobody sends something the mean is zero."""
  x = jax.random.normal(jax.random.key(3), (3, 2048)).at[:, :64].set(0.0)
  mean = gradcomp.compress(
    BlockTop(block_size=8, bits=32),
    axis_name="data",
    exchange=AllGather(merge="senders"),
    feedback=None,
    min_leaf_size=0,
  )
  got = jax.vmap(lambda x: mean.update(x, mean.init(x))[0], axis_name="data")(x)
  blocks = np.asarray(x).reshape(3, -1, 8)
  largest = np.abs(blocks).argmax(axis=2)[..., None] == np.arange(8)
  sent = np.where(largest, blocks, 0.0)
  number = np.maximum((sent != 0).sum(axis=0), 1)
  expected = (sent.sum(axis=0) / number).reshape(-1)
  # Three float32 are added and divided: each rounds by at most 2**-24 of a sum below 8.
  np.testing.assert_allclose(got[0], expected, atol=2e-6, rtol=0)
