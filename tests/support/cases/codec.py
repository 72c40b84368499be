"""Provides every codec that can be built, and what the laws must know of each.

A new codec is one more case. A case says, beside the codec, how the page reads its
payload, what a NaN spoils, and what may stand behind the end of a leaf.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from gradcomp.codecs import (
  QSGD,
  BlockFloat,
  BlockTop,
  Codec,
  Dense,
  EightBit,
  FloatCast,
  Lossless,
  Natural,
  OneBit,
  RandomK,
  Sign,
  Ternary,
  TopK,
)
from tests.specs import (
  block_float,
  block_top,
  dense,
  eight_bit,
  float_cast,
  levels,
  lossless,
  natural,
  one_bit,
  planes,
  qsgd,
  random_k,
  rotation,
  sign,
  ternary,
  top_k,
)

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
LEVELS = ("sign_magnitude", "uniform")

# One bit has no room for a sign.
SCHEMES = [
  (bits, levels)
  for bits in WIDTHS
  for levels in LEVELS
  if (bits, levels) != (1, "sign_magnitude")
]


class Case(NamedTuple):
  """A codec and its particulars.

  Attributes:
    codec: as users make it.
    read: ``read(rows, stats, shape)``, the values by the page alone.
    spoils: what a non-finite element does. The number of consecutive elements of which
      all become NaN, None for all of a leaf, ``"column"`` for all of its column;
      ``"itself"`` if it stays what it is; ``"sent"`` if it is sent as it is, and may
      displace others; ``"row"`` if what is sent of its row is no longer finite.
    own: ``own(x, rows, value)`` asserts that statistics are those of the leaf's own
      elements; None where zeros behind a leaf change nothing, which the law shows.
    unclipped: the codec of what is left of a leaf that is not finite, if another.
    shape: of the leaf that the laws try; None for two tiles and a part of a third.
    slow: whether plain runs leave it out: what is its own is the same code elsewhere.
  """

  codec: Codec
  read: Callable[[np.ndarray, np.ndarray | None, tuple[int, ...]], np.ndarray]
  spoils: int | str | None
  own: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None
  unclipped: Codec | None = None
  shape: tuple[int, ...] | None = None
  slow: bool = False

  @property
  def leaf(self) -> tuple[int, ...]:
    """The shape that the laws try, of a size that divides nothing."""
    return self.shape or (2 * self.codec.tile_size + 77,)


def _qsgd(slow=False, **hyper):
  codec = QSGD(**hyper)
  layout = dict(bits=codec.bits, bucket_size=codec.bucket_size)

  def read(rows, stats, shape):
    if codec.rotate:
      tiles = read_tiles(rows, stats, (len(rows) * codec.tile_size,))
      whole = rotation.unrotate(tiles, group=codec.rotate, **layout)
      return whole[: int(np.prod(shape))]
    return read_tiles(rows, stats, shape)

  def read_tiles(rows, stats, shape):
    size = int(np.prod(shape))
    if codec.levels == "nonuniform":
      return levels.decode(rows, size, **layout)
    return qsgd.decode(rows, size, levels=codec.levels, scales=stats, **layout)

  own = None
  if codec.norm == "rms":
    own = functools.partial(_scales_are_of_copies, codec)
  elif codec.bucket_size is None and codec.norm == "l2":
    # A whole tensor's l2 norm is added in another order when zeros follow.
    own = _scale_is_the_norm
  spoils = codec.bucket_size
  if codec.rotate and spoils:
    spoils *= 8  # the planes that a group lies in
  return Case(codec, read, spoils, own, slow=slow)


def _scales_are_of_copies(codec, x, rows, value):
  if codec.share_scale:
    return  # they are not in the rows, which the page reads with them
  found = np.ascontiguousarray(rows[:, codec.bucket_size :]).view(np.float32)
  layout = dict(bits=codec.bits, bucket_size=codec.bucket_size)
  leaf = planes.filled(x, codec.bucket_size)
  if codec.rotate:
    leaf = rotation.rotate(leaf, group=codec.rotate, **layout)
  expected = qsgd.scales_of(leaf, norm="rms", **layout)
  # At most 64 additions in binary32, a square root and a product: 1e-6 is 8 ulp.
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def _scale_is_the_norm(x, rows, value):
  found = np.ascontiguousarray(rows[:, -1:]).view(np.float32)
  # Some 10^4 squares, added in binary32 by halves, and a square root.
  np.testing.assert_allclose(found, np.linalg.norm(np.float64(x)), rtol=1e-6)


def _dense(dtype, numpy_dtype, slow=False, **hyper):
  read = lambda rows, stats, shape: dense.decode(
    rows, int(np.prod(shape)), dtype=numpy_dtype
  )
  return Case(Dense(dtype=dtype, **hyper), read, "itself", slow=slow)


def _one_bit(bucket_size):
  read = lambda rows, stats, shape: one_bit.decode(
    rows, int(np.prod(shape)), bucket_size=bucket_size
  )

  def own(x, rows, value):
    tail = x[x.size // bucket_size * bucket_size :]
    expected = one_bit.ideal(tail)
    # Sums of at most 512 elements of one sign in binary32.
    np.testing.assert_allclose(value[x.size - tail.size :], expected, rtol=1e-6)

  return Case(OneBit(bucket_size=bucket_size), read, bucket_size, own)


def _one_bit_columns():
  read = lambda rows, stats, shape: one_bit.decode(
    rows, int(np.prod(shape)), column=shape[0]
  ).reshape(shape)

  def own(x, rows, value):
    for column, found in zip(x.reshape(45, 6).T, value.reshape(45, 6).T, strict=True):
      expected = one_bit.ideal(column)
      # Sums of at most 45 elements of one sign in binary32.
      np.testing.assert_allclose(found, expected, rtol=1e-6)

  return Case(OneBit(per_column=True), read, "column", own, shape=(45, 2, 3))


def _sign(**hyper):
  codec = Sign(**hyper)
  given = dict(bucket_size=codec.bucket_size, scale=codec.scale)
  read = lambda rows, stats, shape: sign.decode(rows, int(np.prod(shape)), **given)

  def own(x, rows, value):
    tail = x[x.size // codec.bucket_size * codec.bucket_size :]
    copies = np.float64(np.resize(tail, codec.bucket_size))
    # Sums of at most 64 magnitudes in binary32, by halves.
    np.testing.assert_allclose(abs(value[-1]), np.abs(copies).mean(), rtol=1e-6)

  return Case(codec, read, codec.bucket_size, own if codec.scale == "mean" else None)


def _ternary(slow=False, **hyper):
  codec = Ternary(**hyper)
  read = lambda rows, stats, shape: ternary.decode(
    rows,
    int(np.prod(shape)),
    packing=codec.packing,
    bucket_size=codec.bucket_size,
    scales=stats,
  )
  if codec.clip_sigmas is None:
    return Case(codec, read, codec.bucket_size, slow=slow)

  def own(x, rows, value):
    # A leaf is clipped to its own standard deviation, in which zeros would count. It
    # is summed over at most some 10^4 elements in binary32.
    limit = codec.clip_sigmas * x.std(dtype=np.float64)
    np.testing.assert_allclose(np.abs(value).max(), limit, rtol=1e-5)

  # A leaf that is not finite has no standard deviation: no bucket of it is clipped.
  unclipped = dataclasses.replace(codec, clip_sigmas=None, scaler="clipped")
  return Case(codec, read, codec.bucket_size, own, unclipped, slow=slow)


def _eight_bit(slow=False, **hyper):
  codec = EightBit(**hyper)
  read = lambda rows, stats, shape: eight_bit.decode(
    rows,
    int(np.prod(shape)),
    data_type=codec.dtype,
    bucket_size=codec.bucket_size,
    exponent_offset=codec.exponent_offset,
  )
  return Case(codec, read, codec.bucket_size, slow=slow)


def _float_cast(slow=False, **hyper):
  codec = FloatCast(**hyper)

  def read(rows, stats, shape):
    known = dict(scale=codec.scale)
    if stats is not None:
      known = dict(byte=int(stats[0, 0]), addends=codec.addends)
    return float_cast.decode(
      rows,
      int(np.prod(shape)),
      exponent_bits=codec.exponent_bits,
      mantissa_bits=codec.mantissa_bits,
      **known,
    )

  spoils = None if codec.scale == "auto" else "itself" if codec.mantissa_bits else 1
  return Case(codec, read, spoils, slow=slow)


def _block_float(slow=False, **hyper):
  codec = BlockFloat(**hyper)
  layout = dict(element=codec.element, scale=codec.scale, block_size=codec.block_size)

  def read(rows, stats, shape):
    size = int(np.prod(shape))
    if not codec.rotate:
      return block_float.decode(rows, size, **layout)
    tiles = block_float.decode(rows, len(rows) * codec.tile_size, **layout)
    group = dict(bits=4, bucket_size=planes.ROW_WORDS, group=codec.rotate)
    return rotation.unrotate(tiles, **group)[:size]

  # With scales of numbers, those of blocks are multiples of the leaf's.
  spoils = codec.block_size if codec.scale == "e8m0" else None
  if codec.rotate and spoils:
    spoils = codec.tile_size  # in all planes of which a group lies
  return Case(codec, read, spoils, slow=slow)


def _lossless():
  read = lambda rows, stats, shape: lossless.decode(rows, int(np.prod(shape)))
  return Case(Lossless(), read, "itself")


def _natural(slow=False, **hyper):
  read = lambda rows, stats, shape: natural.decode(rows, int(np.prod(shape)))
  return Case(Natural(**hyper), read, 1, slow=slow)


def _top_k(slow=False, **hyper):
  codec = TopK(**{"density": 0.02, **hyper})

  def read(rows, stats, shape):
    size = int(np.prod(shape))
    n = codec.range_size or size
    return top_k.decode(
      rows,
      size,
      range_size=n,
      slots=top_k.slots_of(codec.density, n, codec.selection, codec.slack),
      quantize=codec.quantize,
      value_dtype=jnp.dtype(codec.dtype).name,
    )

  shape = None if codec.range_size else (2077,)
  spoils = "sent" if codec.quantize is None else "row"
  return Case(codec, read, spoils, shape=shape, slow=slow)


def _random_k(**hyper):
  codec = RandomK(density=0.1, **hyper)

  def read(rows, stats, shape):
    size = int(np.prod(shape))
    n = codec.range_size or size
    stride = random_k.stride_of(codec.density, n)
    return random_k.decode(rows, size, range_size=n, stride=stride)

  shape = None if codec.range_size else (2077,)
  return Case(codec, read, "row", shape=shape)


def _block_top(slow=False, **hyper):
  codec = BlockTop(**hyper)
  read = lambda rows, stats, shape: block_top.decode(
    rows,
    int(np.prod(shape)),
    block_size=codec.block_size,
    count=codec.count,
    value_bits=codec.bits,
  )
  spoils = codec.block_size if codec.bits == 32 else codec.tile_size
  return Case(codec, read, spoils, slow=slow)


# Each width by bucket. Level scheme, norm, rounding and one scale a tensor are the same
# code for all widths: a few show it, for each codec takes seconds to compile.
QSGD_CASES = [
  _qsgd(
    bits=bits,
    bucket_size=bucket_size,
    norm=norm,
    levels=levels,
    rounding=rounding,
    slow=bits in (5, 6, 7),
  )
  for bits, levels in SCHEMES
  for bucket_size, norm, rounding, widths in (
    (64, "max", "stochastic", WIDTHS),
    (32, "l2", "nearest", (4,)),
    (None, "l2", "stochastic", (3,)),
    (None, "max", "nearest", (8,)),
  )
  if bits in widths and (levels == "sign_magnitude" or bits in (1, 4))
]
SHARED_QSGD_CASES = [
  _qsgd(bits=4, bucket_size=64, share_scale=True),
  _qsgd(bits=3, bucket_size=None, levels="uniform", share_scale=True),
  _qsgd(
    bits=8, bucket_size=64, norm="l2", rounding="nearest", share_scale=True, slow=True
  ),
]
CLIPPED_QSGD_CASES = [
  _qsgd(norm="rms", levels="uniform", **hyper)
  for hyper in (
    dict(bits=1, bucket_size=64, slow=True),
    dict(bits=2, bucket_size=64, rounding="nearest"),
    dict(bits=3, bucket_size=32, rounding="nearest", slow=True),
    dict(bits=4, bucket_size=32),
    dict(bits=2, bucket_size=64, rounding="nearest", share_scale=True),
  )
]
ROTATED_QSGD_CASES = [
  _qsgd(bits=4, bucket_size=64, rotate=8),
  _qsgd(bits=1, bucket_size=32, levels="uniform", rotate=8, slow=True),
  _qsgd(
    bits=2,
    bucket_size=32,
    norm="rms",
    levels="uniform",
    rounding="nearest",
    rotate=32,
  ),
  _qsgd(bits=4, bucket_size=None, rotate=32, slow=True),
  _qsgd(bits=4, bucket_size=64, share_scale=True, rotate=32),
]
EIGHT_BIT_CASES = [
  _eight_bit(),
  _eight_bit(dtype="dynamic_map", slow=True),
  _eight_bit(dtype="static_tree"),
  _eight_bit(dtype="linear", slow=True),
  _eight_bit(dtype="mantissa", slow=True),
  _eight_bit(bucket_size=64, rounding="stochastic", slow=True),
  _eight_bit(dtype="dynamic_map", rounding="stochastic"),
  _eight_bit(dtype="mantissa", exponent_offset=1),
]
BLOCK_FLOAT_CASES = [
  _lossless(),
  _block_float(element="e2m1"),
  _block_float(rounding="stochastic", slow=True),
  _block_float(element="e2m1", rounding="stochastic", slow=True),
  _block_float(slow=True),
  _block_float(element="e5m2", slow=True),
  _block_float(element="e3m2", slow=True),
  _block_float(element="e2m3", rounding="stochastic", slow=True),
  _block_float(element="e2m1", scale="e4m3", block_size=16),
  _block_float(element="e2m1", rotate=32),
  _block_float(element="e2m1", rounding="stochastic", rotate=8, slow=True),
  _block_float(element="e2m1", scale="e4m3", block_size=16, rotate=32, slow=True),
  _block_float(
    element="e2m1", scale="e4m3", block_size=16, rounding="stochastic", slow=True
  ),
]
SPARSE_CASES = [
  *(
    _top_k(
      selection=selection,
      quantize=quantize,
      range_size=1000,
      slow=(selection, quantize)
      not in {
        ("exact", None),
        ("trimmed", "mean"),
        ("threshold", "asq"),
        ("sampled", None),
      },
    )
    for selection, quantize in itertools.product(
      ("exact", "trimmed", "threshold", "sampled", "auto"), (None, "asq", "mean")
    )
    if selection != "sampled" or quantize is None
  ),
  _top_k(slow=True),
  _top_k(range_size=1000, dtype=jnp.bfloat16),
  _top_k(range_size=1000, dtype=jnp.float16, slow=True),
  _random_k(),
  _random_k(range_size=1000),
]
CASES = [
  *QSGD_CASES,
  *SHARED_QSGD_CASES,
  *CLIPPED_QSGD_CASES,
  *ROTATED_QSGD_CASES,
  # The levels' fit is a property of a leaf: the laws take those of the first step.
  *(
    _qsgd(bits=bits, bucket_size=64, levels="nonuniform", slow=bits != 3)
    for bits in (2, 3, 4)
  ),
  _dense(jnp.float32, np.float32),
  _dense(jnp.bfloat16, ml_dtypes.bfloat16),
  _dense(jnp.float16, np.float16, slow=True),
  _dense(jnp.bfloat16, ml_dtypes.bfloat16, rounding="stochastic"),
  _dense(jnp.float16, np.float16, slow=True, rounding="stochastic"),
  _one_bit(64),
  _one_bit(512),
  _one_bit_columns(),
  _sign(),
  _sign(scale="one", bucket_size=32),
  _sign(scale="one", vote="majority"),
  _ternary(),
  _ternary(share_scale=False, slow=True),
  _ternary(bucket_size=64, slow=True),
  _ternary(bucket_size=64, share_scale=False),
  _ternary(packing="base3", slow=True),
  _ternary(packing="base3", share_scale=False),
  _ternary(bucket_size=64, clip_sigmas=None),
  _ternary(bucket_size=64, clip_sigmas=None, share_scale=False, slow=True),
  _ternary(scaler="sigma"),
  _ternary(bucket_size=64, share_scale=False, rounding="nearest", slow=True),
  *EIGHT_BIT_CASES,
  *(
    _float_cast(exponent_bits=exponent, mantissa_bits=mantissa, **hyper)
    for exponent, mantissa, hyper in (
      (5, 2, dict()),
      (4, 3, dict(addends=8)),
      (3, 0, dict(slow=True)),
      (5, 10, dict(rounding="toward_zero", slow=True)),
      (5, 2, dict(rounding="stochastic")),
      (5, 10, dict(scale=1.0, slow=True)),
      (4, 3, dict(scale=1.0, rounding="toward_zero", slow=True)),
      (3, 0, dict(scale=1.0)),
      (5, 2, dict(scale=1.0, rounding="stochastic", slow=True)),
      (8, 23, dict(scale=64.0)),
    )
  ),
  _natural(),
  _natural(rounding="nearest", slow=True),
  *BLOCK_FLOAT_CASES,
  *SPARSE_CASES,
  _block_top(),
  _block_top(block_size=8, count=2, bits=8),
  _block_top(block_size=16, bits=32),
  _block_top(block_size=256, count=3, slow=True),
]
