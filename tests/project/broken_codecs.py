"""An honest codec, and others that each break one law."""

import dataclasses
import re

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
  tile_size = property(lambda self: 4 * self.bucket_size)
  row_words = property(lambda self: self.bucket_size + 4)

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


DECODE, READ = Codec.decode, Honest.decode_rows


def broken(name, of=Honest, given=(), fields=(), **parts):
  """An instance of a codec with other parts, and with further fields."""
  fields = [(field, object, value) for field, value in dict(fields).items()]
  own = {"frozen": True, "kw_only": True, "bases": (of,), "namespace": parts}
  return dataclasses.make_dataclass(name, fields, **own)(**dict(given))


def as_words(x):
  return jax.lax.bitcast_convert_type(x, jnp.uint32)


def with_ones(self, x, context, *, keep=False):
  """Fills the last tile with ones, which count in its scale."""
  flat = jnp.pad(x.reshape(-1), (0, -x.size % self.tile_size), constant_values=1.0)
  return Honest.encode_leaf(self, flat, context)


def forgets_a_tenth(self, x, context, *, keep=False):
  rows = Honest.encode_leaf(self, x, context).rows
  return Encoded(rows, 0.9 * (x - self.decode(Payload(rows), like=x)))


def sends_floats(self, x, context, *, keep=False):
  rows = Honest.encode_leaf(self, x, context).rows
  return Encoded(jax.lax.bitcast_convert_type(rows, jnp.float32))


def reads_floats(self, payload, *, like):
  return DECODE(self, Payload(as_words(payload.rows)), like=like)


def chooses_by_worker(self, x, context, *, keep=False):
  if context.dither is not None:
    context = context._replace(key=context.key ^ context.dither[2])
  return RandomK.encode_leaf(self, x, context, keep=keep)


def mean_magnitudes(self, tiles, context):
  """Sends signs and the mean magnitude of a bucket, in which what fills it counts."""
  planes = tiles.reshape(-1, 4, self.bucket_size)
  codes = (jnp.sign(planes) + 1).astype(jnp.uint32)
  means = as_words(jnp.abs(planes).sum(axis=-1) / self.bucket_size)
  return jnp.concatenate([pack_planes(list(codes.swapaxes(0, 1)), 8), means], axis=1)


def takes_first_scales(self, rows):
  first = jnp.broadcast_to(rows[:1], rows.shape)
  parts = rows[:, : self.bucket_size], first[:, self.bucket_size :]
  return READ(self, jnp.concatenate(parts, axis=1))


def drops_signs(self, rows):
  """Takes the last element of a bucket for positive, which most are by chance."""
  tiles = READ(self, rows)
  return tiles.at[..., -1].set(jnp.abs(tiles[..., -1]))


def swaps(self, rows):
  tiles = READ(self, rows)
  return jnp.flip(tiles.reshape(-1, 2), axis=1).reshape(tiles.shape)


def encodes(change):
  """An encoder of tiles that are changed where they are finite, or from a NaN."""

  def encode_rows(self, tiles, context):
    return Honest.encode_rows(self, change(tiles), context)

  return encode_rows


def halved_if_large(tiles):
  largest = jnp.max(jnp.abs(jnp.where(jnp.isfinite(tiles), tiles, 0)), initial=0)
  return jnp.where(largest > 100, tiles * 0.5, tiles)


def cut(tiles):
  return jnp.where(jnp.isfinite(tiles), jnp.clip(tiles, -(2.0**20), 2.0**20), tiles)


def prints(self, planes):
  jax.debug.print("{}", planes.max())
  return Honest.scales(self, planes)


some_scales, some_lanes = Honest.scales, Honest.lanes
SIZES = {"density": 0.1, "range_size": 100}
CERTAIN = {"unbiased": False, "needs_key": False}
NEAREST = CERTAIN | {"drawn": lambda *_: None, "lanes": lambda *_: jnp.uint32(2**15)}


def of_one(*where):
  """Draws lanes of which all are those at one place: of rows, planes or columns."""

  def lanes(self, drawn, rows):
    whole = some_lanes(self, drawn, rows)
    return jnp.broadcast_to(whole[where], whole.shape)

  return lanes


# Errors of both signs hide that `Shrinking` rounds magnitudes down too often.
BROKEN = {
  "Unhashable": dict(fields={"names": dataclasses.field(default_factory=list)}),
  "WrongDtype": dict(
    decode=lambda self, p, *, like: jnp.float32(DECODE(self, p, like=like))
  ),
  "FloatRows": dict(encode_leaf=sends_floats, decode=reads_floats),
  "AskingForValues": dict(
    scales=lambda self, x: some_scales(self, x) if x.max() > 0 else 0 * x[..., :1]
  ),
  "Printing": dict(scales=prints),
  "Communicating": dict(
    scales=lambda self, x: jax.lax.pmax(some_scales(self, x), "data")
  ),
  "DrawingInPython": dict(
    rounded=lambda self, x, _: jnp.floor(x + np.random.default_rng().random())
  ),
  "MoreThanClaimed": dict(row_words=property(lambda self: self.bucket_size)),
  "ZerosNotZeros": dict(
    scales=lambda self, x: jnp.maximum(some_scales(self, x), 1e-3),
    levels=lambda self, codes: codes.astype(jnp.float32) - 127.5,
  ),
  "MixedRows": dict(decode_rows=takes_first_scales),
  "WrongResidual": dict(encode_leaf=forgets_a_tenth),
  "Leaking": dict(encode_leaf=with_ones),
  "MeanOfAll": CERTAIN
  | dict(
    encode_rows=mean_magnitudes,
    levels=lambda self, codes: (codes.astype(jnp.float32) - 1) * 64,
  ),
  "OwnElements": dict(of=RandomK, given=SIZES, encode_leaf=chooses_by_worker),
  "HidingNan": dict(encode_rows=encodes(lambda x: jnp.where(jnp.isfinite(x), x, 0.0))),
  "Biased": dict(rounded=lambda self, x, lanes: jnp.floor(x + lanes * 2.0**-17)),
  "LosingSigns": dict(given={"bucket_size": 128}, decode_rows=drops_signs),
  "Shrinking": dict(
    rounded=lambda self, x, lanes: (
      jnp.sign(x) * jnp.floor(jnp.abs(x) + lanes * 2.0**-16 * 0.97)
    )
  ),
  "OfAnyRange": dict(of=Dense, given={"dtype": jnp.float16}, largest=None),
  "HalvingLarge": dict(encode_rows=encodes(halved_if_large)),
  "Saturating": dict(encode_rows=encodes(cut)),
  "SameRows": dict(lanes=of_one(slice(1))),
  "SamePlanes": dict(lanes=of_one(slice(None), slice(1))),
  "SameColumns": dict(lanes=of_one(..., slice(1))),
  "Swapping": NEAREST | dict(decode_rows=swaps),
  "Larger": NEAREST | dict(decode_rows=lambda self, x: 1.01 * READ(self, x)),
  "Keeping": dict(of=QSGD, given={"bits": 2}, contraction=0.5),
  "WithoutMask": dict(drawn=lambda self, context: context.drawn.at[2].set(0)),
}
# The law that each breaks, and what the sentence says of it.
SAID = """
Unhashable is_a_value: be hashable ... unhashable type: 'list'
WrongDtype shapes_and_dtypes_return: bfloat16[5,7] ... float32[5,7]
FloatRows shapes_and_dtypes_return: uint32[rows, words] ... float32[
AskingForValues is_pure: with shapes alone ... values are asked for
Printing is_pure: have no effects ... callbacks and prints
Communicating is_pure: without collectives ... data
DrawingInPython is_pure: the same program ... take `key`
MoreThanClaimed payload_is_rows_of_words: uint32[3,32] ... 432 bytes in place of 384
ZerosNotZeros zeros_decode_to_zeros: to zeros ... element [0]
MixedRows rows_stand_alone: without the others ... `decode_rows`
WrongResidual sent_and_unsent_are_the_leaf: return x - decode(encode(x))
Leaking padding_never_leaks: as exactly as 256 ... fills the last row
MeanOfAll padding_never_leaks: 171 elements ... is 0.0
OwnElements workers_choose_alike: send the same elements ... positions of worker 1
HidingNan non_finite_elements_are_seen: element 166 became ... its row is finite
Biased mean_is_the_leaf: be unbiased ... is off by -
LosingSigns mean_is_the_leaf: of element
Shrinking mean_is_the_leaf: be unbiased ... is off by
OfAnyRange half_precision_keeps_its_range: near the top number ... over ring ... inf
HalvingLarge large_numbers_keep_their_size: send 2^12 x ... times
Saturating large_numbers_keep_their_size: send 2^40 x ... times
SameRows elements_draw_apart: at one place of all buckets ... times
SamePlanes elements_draw_apart: draw for each element ... times
SameColumns elements_draw_apart: the errors of a bucket ... times
Swapping errors_are_contractions: lose at most 1 of the energy ... it loses 1.8
Larger decoded_leaves_do_not_grow: at most 1.005 of them ... come back as 1.01 of
Keeping residuals_are_bounded: at most 1 times the energy ... it has 6
WithoutMask errors_of_workers_cancel: at most 1.0 ... it has
"""


def named(name):
  """A broken codec, its law, and the words of the sentence."""
  law, words = re.search(rf"^{name} (\w+): (.*)$", SAID, re.M).groups()
  return broken(name, **BROKEN[name]), law, words.split(" ... ")
