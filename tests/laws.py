"""The laws that every codec obeys, as functions of a codec.

A new codec is one more line in ``CODECS``. A law raises AssertionError; where it allows
a difference, the reason stands beside the number.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_one_bit

from gradcomp.codecs import QSGD, Dense, EightBit, FloatCast, OneBit, Ternary

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
LEVELS = ("sign_magnitude", "uniform")

# One bit has no room for a sign.
SCHEMES = [
  (bits, levels)
  for bits in WIDTHS
  for levels in LEVELS
  if (bits, levels) != (1, "sign_magnitude")
]

# Each width by bucket. Level scheme, norm, rounding and one scale a tensor are the same
# code for all widths: a few show it, for each codec takes seconds to compile.
QSGD_CODECS = [
  QSGD(bits=bits, bucket_size=bucket_size, norm=norm, levels=levels, rounding=rounding)
  for bits, levels in SCHEMES
  for bucket_size, norm, rounding, widths in (
    (64, "max", "stochastic", WIDTHS),
    (32, "l2", "nearest", (4,)),
    (None, "l2", "stochastic", (3,)),
    (None, "max", "nearest", (8,)),
  )
  if bits in widths and (levels == "sign_magnitude" or bits in (1, 4))
]
DENSE_CODECS = [Dense(), Dense(dtype=jnp.bfloat16), Dense(dtype=jnp.float16)]
# The levels' fit is a property of a leaf: the laws take the levels of the first step.
LEVELS_CODECS = [
  QSGD(bits=bits, bucket_size=64, levels="nonuniform") for bits in (2, 3, 4)
]
ONE_BIT_CODECS = [OneBit(), OneBit(bucket_size=512)]
TERNARY_CODECS = [
  Ternary(share_scale=False),
  Ternary(share_scale=False, bucket_size=64),
  Ternary(share_scale=False, packing="base3"),
  Ternary(share_scale=False, bucket_size=64, clip_sigmas=None),
]
EIGHT_BIT_CODECS = [
  EightBit(),
  EightBit(data_type="dynamic_map"),
  EightBit(data_type="static_tree"),
  EightBit(data_type="linear"),
  EightBit(data_type="mantissa"),
  EightBit(block_size=64, rounding="stochastic"),
  EightBit(data_type="dynamic_map", rounding="stochastic"),
  EightBit(data_type="mantissa", exponent_offset=1),
]
# With scale="auto" a byte travels beside the rows: test_float_cast.py.
FLOAT_CODECS = [
  FloatCast(exponent_bits=5, mantissa_bits=10, scale=1.0),
  FloatCast(exponent_bits=4, mantissa_bits=3, scale=1.0, rounding="toward_zero"),
  FloatCast(exponent_bits=3, mantissa_bits=0, scale=1.0),
  FloatCast(exponent_bits=5, mantissa_bits=2, scale=1.0, rounding="stochastic"),
]
CODECS = (
  QSGD_CODECS
  + DENSE_CODECS
  + LEVELS_CODECS
  + ONE_BIT_CODECS
  + TERNARY_CODECS
  + EIGHT_BIT_CODECS
  + FLOAT_CODECS
)

KEY = jnp.array([0x9E3779B9, 0x7F4A7C15], jnp.uint32)


def name(codec):
  """A short test id."""
  if isinstance(codec, Dense):
    return f"dense-{jnp.dtype(codec.dtype).name}"
  if isinstance(codec, QSGD):
    parts = [codec.levels, codec.bucket_size, codec.norm, codec.rounding]
    if codec.share_scale:
      parts.append("shared")
    return "-".join([f"qsgd{codec.bits}", *map(str, parts)])
  parts = [str(getattr(codec, field.name)) for field in dataclasses.fields(codec)]
  return "-".join([type(codec).__name__.lower(), *parts])


def sharing(codec):
  """How many consecutive elements share a scale; None where a whole leaf does."""
  if isinstance(codec, Dense | FloatCast):
    return 1
  return codec.block_size if isinstance(codec, EightBit) else codec.bucket_size


def clips(codec):
  """Whether elements are cut to a limit that is made of the whole leaf."""
  return isinstance(codec, Ternary) and codec.clip_sigmas is not None


def encode(codec, x, key, stats=None):
  """The payload of a leaf; under the first levels where levels are fitted."""
  if codec.fitted and stats is None:
    stats = codec.init()
  return codec.encode(x, key=key if codec.needs_key else None, stats=stats)


@functools.cache
def encoder(codec):
  return jax.jit(functools.partial(encode, codec))


@functools.cache
def decoder(codec, shape, dtype=jnp.float32):
  like = jax.ShapeDtypeStruct(shape, dtype)
  return jax.jit(lambda payload: codec.decode(payload, like=like))


def round_trip(codec, x, key=KEY):
  x = jnp.asarray(x)
  return np.asarray(decoder(codec, x.shape, x.dtype)(encoder(codec)(x, key)))


def gaussian(size, seed=0):
  return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def payload_is_the_documented_rows(codec, x):
  """Rows of one tile each, nothing beside them, and all bytes are in the leaves."""
  payload = encoder(codec)(jnp.asarray(x), KEY)
  (rows,) = jax.tree.leaves(payload)
  assert rows.dtype == jnp.uint32
  assert rows.shape == (-(-x.size // codec.tile_size), codec.row_words)
  assert sum(leaf.nbytes for leaf in jax.tree.leaves(payload)) == 4 * rows.size


def shape_and_dtype_return(codec, shape, dtype):
  """Half precision is computed in float32 and comes back as it was."""
  x = jnp.asarray(gaussian(shape), dtype)
  restored = round_trip(codec, x)
  assert restored.shape == shape and restored.dtype == jnp.dtype(dtype)
  wide = round_trip(codec, x.astype(jnp.float32))
  np.testing.assert_array_equal(np.asarray(jnp.asarray(wide).astype(dtype)), restored)


def zeros_stay(codec, size):
  assert (round_trip(codec, np.zeros(size, np.float32)) == 0).all()


def rows_stand_alone(codec, x):
  """Each row decodes alone to its own tile: what lets workers own ranges of rows."""
  rows = np.asarray(encoder(codec)(jnp.asarray(x), KEY).rows)
  decode = jax.jit(codec.decode_rows)
  together = np.asarray(decode(rows))
  for i, row in enumerate(rows):
    alone = np.asarray(decode(row[None]))
    np.testing.assert_array_equal(together[i], alone[0])


def rows_encode_like_leaves(codec, x):
  """``encode_rows`` of whole tiles is ``encode`` of the same elements."""
  tiles = jnp.asarray(x[: x.size // codec.tile_size * codec.tile_size])
  key = KEY if codec.needs_key else None
  stats = codec.init() if codec.fitted else None
  shaped = tiles.reshape(-1, codec.tile_size // 32, 32)
  np.testing.assert_array_equal(
    np.asarray(encoder(codec)(tiles, KEY).rows),
    np.asarray(jax.jit(codec.encode_rows)(shaped, key=key, stats=stats)),
  )


def padding_never_leaks(codec, x):
  """A short leaf is the same leaf with zeros behind it.

  Not where zeros are elements that count: in the means of OneBit, and in the standard
  deviation that Ternary clips to. There, what a leaf gives is that of its own elements.
  """
  if isinstance(codec, OneBit):
    tail = x[x.size // codec.bucket_size * codec.bucket_size :]
    np.testing.assert_allclose(
      round_trip(codec, x)[x.size - tail.size :],
      oracle_one_bit.one_bit_ideal(tail),
      rtol=1e-6,  # sums of at most 512 elements of one sign in binary32
    )
    return
  if clips(codec):
    limit = codec.clip_sigmas * x.std(dtype=np.float64)
    largest = np.abs(round_trip(codec, x)).max()
    # Summed over at most some 10^4 elements in binary32.
    np.testing.assert_allclose(largest, limit, rtol=1e-5)
    return
  missing = -x.size % codec.tile_size
  padded = np.concatenate([x, np.zeros(missing, np.float32)])
  np.testing.assert_array_equal(
    np.asarray(encoder(codec)(jnp.asarray(x), KEY).rows),
    np.asarray(encoder(codec)(jnp.asarray(padded), KEY).rows),
  )


def batches_are_independent(codec, x):
  """vmap over leaves and keys is a loop."""
  batch = jnp.stack([jnp.asarray(x), 3 * jnp.asarray(x[::-1].copy())])
  keys = jnp.stack([KEY, KEY + 1])
  rows = jax.jit(jax.vmap(functools.partial(encode, codec)))(batch, keys).rows
  for i in range(2):
    np.testing.assert_array_equal(
      np.asarray(rows[i]), np.asarray(encoder(codec)(batch[i], keys[i]).rows)
    )


def non_finite_buckets_are_nan(codec, x, bad):
  """The bucket of a NaN or infinity comes out NaN, all others as if it were not there.

  Dense codecs keep each element: there a bucket is one element, and what it holds. So
  do casts, but for infinities without mantissa bits, which are NaN.
  A leaf without a standard deviation is not clipped: in other buckets neither.
  """
  position = x.size // 2
  dirty = x.copy()
  dirty[position] = bad
  unclipped = dataclasses.replace(codec, clip_sigmas=None) if clips(codec) else codec
  clean, restored = round_trip(unclipped, x), round_trip(codec, dirty)
  count = sharing(codec) or x.size
  bucket = np.arange(x.size) // count == position // count
  if sharing(codec) == 1 and getattr(codec, "mantissa_bits", 1):
    np.testing.assert_array_equal(restored[position], dirty[position])
  else:
    assert np.isnan(restored[bucket]).all()
  np.testing.assert_array_equal(restored[~bucket], clean[~bucket])


def mean_is_the_input(codec, x, draws, z=5.0, mean=None, step=None, stats=None):
  """z-test of unbiasedness: |mean - x| <= z * sigma / sqrt(draws) for every element.

  Where a codec clips, `mean` is what it is to be unbiased of. Where steps are small,
  `step` tells those of all elements, which keeps the test sharp. `stats` are levels.

  With z = 5 and at most 10^4 elements a correct codec fails with probability 6e-3;
  the keys are fixed, so it does so always or never. An element between two levels that
  are a step apart has sigma <= step / 2; the fixed-point grid adds 2^-16 of a step.
  """
  keys = jax.vmap(lambda i: jnp.stack([KEY[0], i]))(jnp.arange(draws, dtype=jnp.uint32))

  @jax.jit
  def total(x, mean, keys):
    def add(sums, key):
      value = codec.decode(encode(codec, x, key, stats), like=x)
      error = value.astype(jnp.float32) - mean
      return (sums[0] + error, sums[1] + error * error), None

    zeros = jnp.zeros_like(x)
    return jax.lax.scan(add, (zeros, zeros), keys)[0]

  first, second = (
    np.asarray(s, np.float64) / draws
    for s in total(jnp.asarray(x), jnp.asarray(x if mean is None else mean), keys)
  )
  if step is None:
    step = 2 * np.abs(round_trip(codec, x) - x).max() + np.abs(x).max()
  assert np.isfinite(first).all()
  sigma = np.sqrt(np.maximum(second, 0))
  # An element that rounds up with a probability below about 1 / draws may never do so:
  # its sample sigma is then too small; one more draw of a step covers it.
  slack = (z * z / draws + 2.0**-16) * step
  assert (np.abs(first) <= z * sigma / np.sqrt(draws) + slack).all()
  # All elements together: errors are independent, so the mean error is sharper.
  pooled = z * np.sqrt(second.sum() / draws) / x.size + 2.0**-16 * np.max(step)
  assert abs(first.mean()) <= pooled
