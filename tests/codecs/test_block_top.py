"""BlockTop is what its page says: the largest of blocks, by an independent oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.codecs.sums.records import Payload
from gradcomp.codecs import BlockTop
from gradcomp.exchange import AllGather
from tests.plugins.slow_cases import slow
from tests.specs import block_top
from tests.support import laws

CODEC = BlockTop()
CODECS = [
  CODEC,
  BlockTop(block_size=16, count=3),
  BlockTop(block_size=8, count=2, bits=8),
  BlockTop(count=2, bits=32),
  *slow(
    BlockTop(block_size=128, bits=8),
    BlockTop(block_size=4096),
    BlockTop(block_size=8, count=4),
  ),
]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=laws.name)


@functools.cache
def encoded(codec):
  return jax.jit(functools.partial(laws.encoded, laws.here(codec)))


@functools.cache
def entries(codec):
  return jax.jit(codec.entries)


def leaf(codec):
  """Blocks of many magnitudes, with zeros and ties, and a part of a tile."""
  size = codec.block_size
  x = laws.gaussian(2 * codec.tile_size + 5 * size + 3).reshape(-1)
  blocks = x[: x.size // size * size].reshape(-1, size)  # a view
  blocks *= np.float32(10) ** np.random.default_rng(1).uniform(-2, 0, (len(blocks), 1))
  blocks[:8] = 0
  blocks[8:16] = np.round(4 * blocks[8:16] / abs(blocks[8:16]).max()) / 4
  return x


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
@pytest.mark.parametrize("kind", [leaf, near_roundings])
def test_what_is_sent_and_the_residual_add_up_to_the_leaf(codec, kind):
  """To the bit, and what is sent is the page's. Zeros of both signs are equal here."""
  x = kind(codec)
  rows, rest, *_ = encoded(codec)(x)
  rule = dict(block_size=codec.block_size, count=codec.count, value_bits=codec.bits)
  np.testing.assert_array_equal(rows, block_top.encode(x, **rule))
  sent = block_top.decode(np.asarray(rows), x.size, **rule)
  np.testing.assert_array_equal(laws.decoder(codec, x.shape)(Payload(rows)), sent)
  assert 0 < np.count_nonzero(sent) < x.size
  np.testing.assert_array_equal(sent + np.asarray(rest), x)
  # A product by 3/8 is rounded, and is at most twice what it stands for.
  assert (np.abs(rest) <= np.abs(x) * np.float32(1 + 2.0**-22)).all()
  places, values = entries(codec)(rows)
  assert places.shape == values.shape == (len(rows), codec.slots)
  found = np.zeros((len(rows), codec.tile_size), np.float32)
  np.add.at(found, (np.arange(len(rows))[:, None], places), values)
  np.testing.assert_array_equal(found.ravel()[: x.size], sent)


def test_energy_is_that_of_the_notes():
  """Of Gaussian elements the largest of 64 hold E[max^2] / 64 = 0.108."""
  x = laws.gaussian(64 * CODEC.tile_size)
  kept = lambda codec: 1 - np.square(x - laws.round_trip(codec, x)).sum() / x.size
  # Of 8192 blocks, whose largest squares deviate by 2.2 / 64: five standard errors.
  assert abs(kept(BlockTop(bits=32)) - 0.108) < 5 * 2.2 / 64 / 8192**0.5 + 0.001
  # Eleven sixteenths of s are the limit: errors of up to 5/16 s are 1/8 of the square.
  assert kept(CODEC) > 0.09


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


@pytest.mark.parametrize("bits", [2, 8, 32])
def test_two_that_are_not_finite_in_one_block(bits):
  """Only one of them is sent."""
  codec = BlockTop(bits=bits)
  x = laws.gaussian(2 * codec.tile_size)
  clean = laws.round_trip(codec, x).copy()
  spoiled = slice(128, 192) if bits == 32 else slice(0, codec.tile_size)
  clean[spoiled] = np.nan
  for bad in (np.nan, np.inf, -np.inf):
    x[[130, 131]] = bad
    np.testing.assert_array_equal(laws.round_trip(codec, x), clean)


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


def test_a_sum_is_divided_by_those_who_sent_an_element():
  """Zeros are sent by nobody, and where nobody sends something the mean is zero."""
  x = laws.gaussian((3, 2048))
  x[:, :64] = 0
  codec, exchange = BlockTop(block_size=8, bits=32), AllGather(merge="senders")
  tx = laws.compressed(codec, exchange, min_leaf_size=0)
  step = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
  got = jax.jit(step)(x)
  blocks = x.reshape(3, -1, 8)
  largest = np.abs(blocks).argmax(axis=2)[..., None] == np.arange(8)
  sent = np.where(largest, blocks, 0.0)
  number = np.maximum((sent != 0).sum(axis=0), 1)
  expected = (sent.sum(axis=0) / number).reshape(-1)
  # Three float32 are added and divided: each rounds by at most 2**-24 of a sum below 8.
  np.testing.assert_allclose(got[0], expected, atol=2e-6, rtol=0)
