"""An honest codec, and others that each break one law."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.sums.records import Encoded
from gradcomp.codecs import QSGD, Codec, Dense, Payload, RandomK
from gradcomp.kernels import pack_planes, random_lanes, unpack_planes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Honest(Codec):
  """Rounds at random to 128 steps of the largest element of each bucket: a byte each.

  Products are with powers of two, and exact: no compiler can change them.
  """

  bucket_size: int = 32

  unbiased = needs_key = True

  @property
  def tile_size(self):
    return 4 * self.bucket_size

  @property
  def row_words(self):
    return self.bucket_size + 4

  def scales(self, planes):
    largest = jnp.abs(planes).max(axis=-1, keepdims=True)
    return jnp.where(largest < 2.0**-100, 0.0, largest)

  def drawn(self, context):
    return context.drawn

  def lanes(self, drawn, rows):
    return jnp.stack(random_lanes(drawn, (rows, self.bucket_size), 4), axis=1)

  def rounded(self, steps, lanes):
    return jnp.floor(steps + lanes * 2.0**-16)

  def encode_rows(self, tiles, context):
    planes = tiles.reshape(-1, 4, self.bucket_size)
    scales = self.scales(planes)
    lanes = self.lanes(self.drawn(context), planes.shape[0])
    steps = jnp.where(scales > 0, planes / scales, 0.0) * 64
    steps = jnp.where(jnp.isfinite(steps), steps, 0.0)
    codes = (self.rounded(steps, lanes.astype(jnp.float32)) + 128).astype(jnp.uint32)
    words = pack_planes(list(codes.swapaxes(0, 1)), 8)
    bits = jax.lax.bitcast_convert_type(scales[..., 0], jnp.uint32)
    return jnp.concatenate([words, bits], axis=1)

  def levels(self, codes):
    return codes.astype(jnp.float32) - 128

  def decode_rows(self, rows):
    codes = unpack_planes(rows[:, : self.bucket_size], 8)
    scales = jax.lax.bitcast_convert_type(rows[:, self.bucket_size :], jnp.float32)
    return self.levels(codes) * (scales / 64)[..., None]


class Biased(Honest):
  """Rounds up too seldom, and says that it is unbiased."""

  def rounded(self, steps, lanes):
    return jnp.floor(steps + lanes * 2.0**-17)


class SameRows(Honest):
  """Rounds all rows by the random bits of the first one."""

  def lanes(self, drawn, rows):
    return jnp.broadcast_to(super().lanes(drawn, 1), (rows, 4, self.bucket_size))


class SamePlanes(Honest):
  """Rounds the four elements of a word by the same random bits."""

  def lanes(self, drawn, rows):
    return jnp.repeat(super().lanes(drawn, rows)[:, :1], 4, axis=1)


class SameColumns(Honest):
  """Rounds a bucket by one random number."""

  def lanes(self, drawn, rows):
    return jnp.repeat(super().lanes(drawn, rows)[..., :1], self.bucket_size, axis=2)


class Shrinking(Honest):
  """Rounds magnitudes down more often than up: errors of both signs hide it."""

  def rounded(self, steps, lanes):
    return jnp.sign(steps) * jnp.floor(jnp.abs(steps) + lanes * 2.0**-16 * 0.97)


class LosingSigns(Honest):
  """Takes the last element of a bucket for positive, which most are by chance."""

  def decode_rows(self, rows):
    tiles = super().decode_rows(rows)
    return tiles.at[..., -1].set(jnp.abs(tiles[..., -1]))


class Leaking(Honest):
  """Fills the last tile with ones, which count in its scale."""

  def encode_leaf(self, x, context, *, keep=False):
    flat = jnp.pad(x.reshape(-1), (0, -x.size % self.tile_size), constant_values=1.0)
    return super().encode_leaf(flat, context)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanOfAll(Honest):
  """Sends signs and the mean magnitude of a bucket, in which what fills it counts."""

  unbiased = needs_key = False

  def encode_rows(self, tiles, context):
    planes = tiles.reshape(-1, 4, self.bucket_size)
    codes = (jnp.sign(planes) + 1).astype(jnp.uint32)
    means = jnp.abs(planes).sum(axis=-1) / self.bucket_size
    bits = jax.lax.bitcast_convert_type(means, jnp.uint32)
    words = pack_planes(list(codes.swapaxes(0, 1)), 8)
    return jnp.concatenate([words, bits], axis=1)

  def levels(self, codes):
    return (codes.astype(jnp.float32) - 1) * 64


class HidingNan(Honest):
  """Takes zero for what is not finite."""

  def encode_rows(self, tiles, context):
    tiles = jnp.where(jnp.isfinite(tiles), tiles, 0.0)
    return super().encode_rows(tiles, context)


class ZerosNotZeros(Honest):
  """Has levels at odd halves of a step, and no scale of zero."""

  def scales(self, planes):
    return jnp.maximum(super().scales(planes), 1e-3)

  def levels(self, codes):
    return codes.astype(jnp.float32) - 127.5


class MoreThanClaimed(Honest):
  """Sends scales that it does not count."""

  @property
  def row_words(self):
    return self.bucket_size


class WrongDtype(Honest):
  """Returns float32 whatever it is asked for."""

  def decode(self, payload, *, like):
    return super().decode(payload, like=like).astype(jnp.float32)


class WrongResidual(Honest):
  """Forgets a tenth of what it does not send."""

  def encode_leaf(self, x, context, *, keep=False):
    rows = super().encode_leaf(x, context).rows
    return Encoded(rows, 0.9 * (x - self.decode(Payload(rows), like=x)))


class MixedRows(Honest):
  """Decodes every row by the scales of the first one."""

  def decode_rows(self, rows):
    first = jnp.broadcast_to(rows[:1], rows.shape)
    size = self.bucket_size
    return super().decode_rows(
      jnp.concatenate([rows[:, :size], first[:, size:]], axis=1)
    )


class WithoutMask(Honest):
  """Draws what all workers draw, so that their errors add up."""

  def drawn(self, context):
    shared = super().drawn(context)
    return shared.at[2].set(0)


class DrawingInPython(Honest):
  """Draws while it is traced."""

  def rounded(self, steps, lanes):
    return jnp.floor(steps + np.random.default_rng().random(steps.shape))


class AskingForValues(Honest):
  """Decides in Python by a value."""

  def scales(self, planes):
    return (
      super().scales(planes) if planes.max() > 0 else jnp.zeros_like(planes[..., :1])
    )


class Printing(Honest):
  """Prints from the device."""

  def scales(self, planes):
    jax.debug.print("{}", planes.max())
    return super().scales(planes)


class Communicating(Honest):
  """Agrees on a scale by itself."""

  def scales(self, planes):
    return jax.lax.pmax(super().scales(planes), "data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unhashable(Honest):
  """Has a list among its fields."""

  names: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True)
class Thawed:
  """Can be changed."""

  bits: int = 8


class OwnElements(RandomK):
  """Lets each worker choose its own elements, whose values are added by place."""

  def encode_leaf(self, x, context, *, keep=False):
    if context.dither is not None:
      context = context._replace(key=context.key ^ context.dither[2])
    return super().encode_leaf(x, context, keep=keep)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfAnyRange(Dense):
  """Sends halves, and does not say that they are."""

  dtype: jnp.dtype = jnp.float16

  largest = None


class HalvingLarge(Honest):
  """Halves a leaf that has a large number."""

  def encode_rows(self, tiles, context):
    largest = jnp.max(jnp.abs(jnp.where(jnp.isfinite(tiles), tiles, 0)), initial=0)
    tiles = jnp.where(largest > 100, tiles * 0.5, tiles)
    return super().encode_rows(tiles, context)


class Saturating(Honest):
  """Cuts numbers to 2^20."""

  def encode_rows(self, tiles, context):
    cut = jnp.clip(tiles, -(2.0**20), 2.0**20)
    return super().encode_rows(jnp.where(jnp.isfinite(tiles), cut, tiles), context)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nearest(Honest):
  """Rounds to nearest."""

  unbiased = needs_key = False

  def drawn(self, context):
    return None

  def lanes(self, drawn, rows):
    return jnp.uint32(2**15)


class Swapping(Nearest):
  """Decodes every pair of neighbors in swapped order."""

  def decode_rows(self, rows):
    tiles = super().decode_rows(rows)
    return jnp.flip(tiles.reshape(-1, 2), axis=1).reshape(tiles.shape)


class Larger(Nearest):
  """Decodes everything 1 % too large."""

  def decode_rows(self, rows):
    return super().decode_rows(rows) * 1.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keeping(QSGD):
  """Says that feedback suits it, which does not."""

  bits: int = 2

  contraction = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failing(Honest):
  """Fails while it encodes."""

  error: Exception = dataclasses.field(default_factory=lambda: ValueError("no rows"))

  def encode_rows(self, tiles, context):
    raise self.error


class FloatRows(Honest):
  """Sends floats, which XLA may send as others."""

  def encode_leaf(self, x, context, *, keep=False):
    rows = super().encode_leaf(x, context).rows
    return Encoded(jax.lax.bitcast_convert_type(rows, jnp.float32))

  def decode(self, payload, *, like):
    words = jax.lax.bitcast_convert_type(payload.rows, jnp.uint32)
    return super().decode(Payload(words), like=like)
