"""Makes cases: a codec, and what the laws must know of it.

A case says how the page writes and reads its payload, and what a NaN spoils.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
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


class Case(NamedTuple):
  """A codec and its particulars.

  Attributes:
    codec: as users make it.
    read: ``read(rows, stats, shape)``, the values by the page alone.
    spoils: what a non-finite element does. The number of consecutive elements of which
      all become NaN, None for all of a leaf, ``"column"`` for all of its column;
      ``"itself"`` if it stays what it is; ``"sent"`` if it is sent as it is, and may
      displace others; ``"row"`` if what is sent of its row is no longer finite.
    write: ``write(x, key, rows, stats, per_row)``, the rows of a finite leaf by the
      page alone; without a key it rounds to nearest, and ``per_row`` gives each row a
      scale. Of rows that were found it takes no more than sums in binary32, after it
      has compared them. None where another test has the rule of selection.
    exact: whether what is written without such rows has the library's bits: norms and
      means of buckets are summed in other orders, and rotations are done elsewhere.
      None where a worker needs more than its key and its leaf.
    unclipped: the codec of what is left of a leaf that is not finite, if another.
    shape: of the leaf that the laws try; None for two tiles and a part of a third.
    slow: whether plain runs leave it out: what is its own is the same code elsewhere.
  """

  codec: Codec
  read: Callable[[np.ndarray, np.ndarray | None, tuple[int, ...]], np.ndarray]
  spoils: int | str | None
  write: Callable[..., np.ndarray] | None = None
  exact: bool | None = None
  unclipped: Codec | None = None
  shape: tuple[int, ...] | None = None
  slow: bool = False

  @property
  def leaf(self) -> tuple[int, ...]:
    """The shape that the laws try, of a size that divides nothing."""
    return self.shape or (2 * self.codec.tile_size + 77,)

  def through(self, x, key, per_row=False):
    """What numbers become that are written and read, float32 of x's shape."""
    if per_row and isinstance(self.codec, BlockFloat):  # whose scale is of all rows
      return np.stack([self.through(row, key) for row in x])
    rows = self.write(x, key, per_row=per_row)
    return self.read(rows, None, x.shape).reshape(x.shape)


def _random(codec, key):
  """The key, where numbers are rounded at random."""
  return key if codec.needs_key else None


def _rounding(codec, key):
  return "nearest" if key is None else codec.rounding


def _known(rows, words, stats, expected, rtol):
  """The scales that rows or workers have, of which those of sums may be near."""
  if rows is None:
    return expected
  found = planes.as_floats(rows[:, words:]) if stats is None else stats
  found = np.broadcast_to(found, (len(rows), found.shape[1]))
  np.testing.assert_allclose(found, expected, rtol=rtol)
  return found


def of_qsgd(slow=False, **hyper):
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

  def write(x, key, rows=None, stats=None, per_row=False):
    how = dict(key=_random(codec, key), rounding=_rounding(codec, key))
    if codec.levels == "nonuniform":
      return levels.encode(x, k=levels.first(codec.bits), **how, **layout)
    if codec.norm == "rms":
      x = planes.filled(x, codec.bucket_size)
    if codec.rotate:
      x = rotation.rotate(x, group=codec.rotate, **layout)
    # Squares are added in another order, by halves, and a root is taken.
    expected = qsgd.scales_of(x, norm=codec.norm, scale_per_row=per_row, **layout)
    rtol = 0 if codec.norm == "max" else 1e-6
    how["scales"] = _known(rows, codec.bucket_size or 512, stats, expected, rtol)
    how["inline"] = stats is None
    return qsgd.encode(x, norm=codec.norm, levels=codec.levels, **how, **layout)

  spoils = codec.bucket_size
  if codec.rotate and spoils:
    spoils *= 8  # the planes that a group lies in
  exact = None
  if not codec.share_scale and codec.levels != "nonuniform":
    exact = codec.norm == "max" and not codec.rotate
  return Case(codec, read, spoils, write, exact, slow=slow)


def of_dense(dtype, numpy_dtype, slow=False, **hyper):
  codec = Dense(dtype=dtype, **hyper)
  read = lambda rows, stats, shape: dense.decode(
    rows, int(np.prod(shape)), dtype=numpy_dtype
  )
  write = lambda x, key, *_, **__: dense.encode(
    x, dtype=numpy_dtype, key=_random(codec, key)
  )
  return Case(codec, read, "itself", write, exact=True, slow=slow)


def of_one_bit(bucket_size):
  rule = dict(bucket_size=bucket_size)
  read = lambda rows, stats, shape: one_bit.decode(rows, int(np.prod(shape)), **rule)

  def write(x, key, rows=None, stats=None, per_row=False):
    # Sums of at most a bucket of one sign in binary32, and a division.
    rtol = (bucket_size + 1) * 2.0**-24
    means = _known(rows, bucket_size, None, one_bit.means_of(x, **rule), rtol)
    return one_bit.encode(x, means=means, **rule)

  return Case(OneBit(bucket_size=bucket_size), read, bucket_size, write, exact=False)


def of_one_bit_columns():
  read = lambda rows, stats, shape: one_bit.decode(
    rows, int(np.prod(shape)), column=shape[0]
  ).reshape(shape)

  def write(x, key, rows, stats):
    # Sums of at most a column of one sign in binary32, and a division.
    rtol, column = (len(x) + 1) * 2.0**-24, len(x)
    means = _known(rows, -2, None, one_bit.means_of(x, column=column), rtol)
    return one_bit.encode(x, column=column, means=means)

  return Case(OneBit(per_column=True), read, "column", write, shape=(45, 2, 3))


def of_sign(**hyper):
  codec = Sign(**hyper)
  rule = dict(bucket_size=codec.bucket_size, scale=codec.scale)
  read = lambda rows, stats, shape: sign.decode(rows, int(np.prod(shape)), **rule)

  def write(x, key, rows=None, stats=None, per_row=False):
    scales = None
    if codec.scale == "mean":
      # Sums of a bucket's magnitudes in binary32, by halves.
      expected = sign.scales_of(x, **rule)
      scales = _known(rows, codec.bucket_size, None, expected, 1e-6)
    return sign.encode(x, scales=scales, **rule)

  exact = False if codec.scale == "mean" else None
  return Case(codec, read, codec.bucket_size, write, exact)


def of_ternary(slow=False, **hyper):
  codec = Ternary(**hyper)
  rule = dict(packing=codec.packing, bucket_size=codec.bucket_size)
  read = lambda rows, stats, shape: ternary.decode(
    rows, int(np.prod(shape)), scales=stats, **rule
  )

  def write(x, key, rows=None, stats=None, per_row=False):
    # Squares of some 10^4 elements in binary32, in no documented order.
    limit = ternary.clip_limit(x, codec.clip_sigmas)
    how = dict(scaler=codec.scaler, limit=limit, scale_per_row=per_row)
    expected = ternary.scales_of(x, **how, **rule)
    rtol = 0 if codec.clip_sigmas is None else 1e-5
    scales = _known(rows, codec.bucket_size or 512, stats, expected, rtol)
    # The largest scale is the limit, or all are below it and nothing is clipped.
    known = dict(scales=scales, limit=scales.max(), inline=stats is None)
    how = dict(key=_random(codec, key), rounding=_rounding(codec, key))
    return ternary.encode(x, **how, **known, **rule)

  unclipped = None
  if codec.clip_sigmas is not None:
    # A leaf that is not finite has no standard deviation: no bucket of it is clipped.
    unclipped = dataclasses.replace(codec, clip_sigmas=None, scaler="clipped")
  exact = None if codec.share_scale or codec.clip_sigmas is not None else True
  return Case(codec, read, codec.bucket_size, write, exact, unclipped, slow=slow)


def of_eight_bit(slow=False, **hyper):
  codec = EightBit(**hyper)
  rule = dict(data_type=codec.dtype, bucket_size=codec.bucket_size)
  rule["exponent_offset"] = codec.exponent_offset
  read = lambda rows, stats, shape: eight_bit.decode(rows, int(np.prod(shape)), **rule)

  def write(x, key, rows=None, stats=None, per_row=False):
    how = dict(rounding=_rounding(codec, key))
    scales = eight_bit.scales_of(x, scale_per_row=per_row, **how, **rule)
    how["key"] = _random(codec, key)
    return eight_bit.encode(x, scales=scales, **how, **rule)

  return Case(codec, read, codec.bucket_size, write, exact=True, slow=slow)


def of_float_cast(slow=False, **hyper):
  codec = FloatCast(**hyper)
  fields = dict(exponent_bits=codec.exponent_bits, mantissa_bits=codec.mantissa_bits)

  def known(byte):
    if byte is None:
      return fields | {"scale": codec.scale}
    return fields | {"byte": int(byte), "addends": codec.addends}

  def read(rows, stats, shape):
    byte = None if stats is None else stats[0, 0]
    return float_cast.decode(rows, int(np.prod(shape)), **known(byte))

  def write(x, key, rows=None, stats=None):
    byte = None if stats is None else float_cast.aps_byte(x, codec.addends)
    return float_cast.encode(x, key=key, rounding=codec.rounding, **known(byte))

  spoils = None if codec.scale == "auto" else "itself" if codec.mantissa_bits else 1
  return Case(codec, read, spoils, write, slow=slow)


def of_block_float(slow=False, **hyper):
  codec = BlockFloat(**hyper)
  layout = dict(element=codec.element, scale=codec.scale, block_size=codec.block_size)
  group = dict(bits=4, bucket_size=planes.ROW_WORDS, group=codec.rotate)

  def read(rows, stats, shape):
    size = int(np.prod(shape))
    if not codec.rotate:
      return block_float.decode(rows, size, **layout)
    tiles = block_float.decode(rows, len(rows) * codec.tile_size, **layout)
    return rotation.unrotate(tiles, **group)[:size]

  def write(x, key, *_, **__):
    x = rotation.rotate(x, **group) if codec.rotate else x
    return block_float.encode(x, key=_random(codec, key), **layout)

  # With scales of numbers, those of blocks are multiples of the leaf's.
  spoils = codec.block_size if codec.scale == "e8m0" else None
  if codec.rotate and spoils:
    # A group lies in all planes: of 32 elements in all blocks of them, of 8 in one.
    spoils = codec.tile_size if codec.rotate == 32 else "row"
  exact = None if codec.rotate else codec.scale == "e8m0"
  return Case(codec, read, spoils, write, exact, slow=slow)


def of_lossless():
  read = lambda rows, stats, shape: lossless.decode(rows, int(np.prod(shape)))
  write = lambda x, key, rows, stats: lossless.encode(x)
  return Case(Lossless(), read, "itself", write)


def of_natural(slow=False, **hyper):
  codec = Natural(**hyper)
  read = lambda rows, stats, shape: natural.decode(rows, int(np.prod(shape)))
  write = lambda x, key, *_, **__: natural.encode(x, key=_random(codec, key))
  return Case(codec, read, 1, write, exact=True, slow=slow)


def of_top_k(slow=False, **hyper):
  codec = TopK(**{"density": 0.02, **hyper})

  def rule(size):
    n = codec.range_size or size
    slots = top_k.slots_of(codec.density, n, codec.selection, codec.slack)
    dtype = jnp.dtype(codec.dtype).name
    return dict(range_size=n, slots=slots, quantize=codec.quantize, value_dtype=dtype)

  def read(rows, stats, shape):
    size = int(np.prod(shape))
    return top_k.decode(rows, size, **rule(size))

  write = exact = None
  if codec.quantize is None and codec.selection in ("exact", "auto"):
    write = lambda x, key, *_, **__: top_k.encode(x, **rule(x.size))
    exact = True if codec.selection == "exact" and codec.range_size else None
  shape = None if codec.range_size else (2077,)
  spoils = "sent" if codec.quantize is None else "row"
  return Case(codec, read, spoils, write, exact, shape=shape, slow=slow)


def of_random_k(**hyper):
  codec = RandomK(density=0.1, **hyper)

  def rule(size):
    n = codec.range_size or size
    return dict(range_size=n, stride=random_k.stride_of(codec.density, n))

  def read(rows, stats, shape):
    size = int(np.prod(shape))
    return random_k.decode(rows, size, **rule(size))

  write = lambda x, key, rows, stats: random_k.encode(x, key=key, **rule(x.size))
  shape = None if codec.range_size else (2077,)
  return Case(codec, read, "row", write, shape=shape)


def of_block_top(slow=False, **hyper):
  codec = BlockTop(**hyper)
  rule = dict(block_size=codec.block_size, count=codec.count, value_bits=codec.bits)
  read = lambda rows, stats, shape: block_top.decode(rows, int(np.prod(shape)), **rule)
  write = lambda x, key, *_, **__: block_top.encode(x, **rule)
  spoils = codec.block_size if codec.bits == 32 else codec.tile_size
  return Case(codec, read, spoils, write, exact=True, slow=slow)
