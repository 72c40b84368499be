"""Exact sums of integer codes, packed into as few bits as hold ``[-N m, N m]``."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.codecs.sums.records import Context
from gradcomp._src.codecs.sums.sum import (
  LeafRows,
  Partial,
  RowDecoder,
  Sent,
  Sum,
  SumFacts,
  sum_limit,
)
from gradcomp._src.codecs.sums.tiles import cutter, sum_in_order
from gradcomp._src.kernels.common import planes
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.kernels.materialize import packed, stored

if TYPE_CHECKING:
  from gradcomp._src.codecs.quantizing import SharedScales


_AGAIN = (
  "a codec that shares its scale, because partial sums are encoded again with scales "
  'of their own, got {codec}; use "psum", whose sums are exact, or share_scale=False.'
)
_FACTS = SumFacts(refusals={"passed": _AGAIN, "grouped": _AGAIN})


@dataclasses.dataclass(frozen=True)
class Codes(Sum):
  """Adds codes, ``int32[rows, P, B]``. Owners pack the sums into as few bits as fit."""

  codec: "SharedScales"  # encodes rows with the statistics of all workers

  @property
  def facts(self) -> SumFacts:
    return dataclasses.replace(_FACTS, max_code=self.codec.max_code)

  def unpacked(self, rows: Array) -> Array:
    return self.codec.codes(rows)

  def gathered(self, rows: Array, agreed: Array | None, scale: float) -> RowDecoder:
    return self._decoder(sum_in_order(self.codec.codes, rows), agreed, scale)

  def fold(self, rows: Array, scale: float, *, keep: bool) -> Partial:
    return Partial(sum_in_order(self.codec.codes, stored(rows)), scale=scale)

  def finish(
    self,
    partial: Partial,
    context: Context,
    residual: Array | None,
    workers: int,
    *,
    keep: bool,
  ) -> Sent:
    rows = packed(pack_sums(self.codec, partial.total, workers))
    return Sent(rows, scale=partial.scale)

  def value(
    self, rows: Array, agreed: Array | None, scale: float, share: int, workers: int
  ) -> RowDecoder:
    sums = jax.vmap(lambda words: unpack_sums(self.codec, words, share, workers))(rows)
    return self._decoder(sums.reshape(-1, *sums.shape[2:]), agreed, scale)

  def reduces_shorter(self, rows: int, workers: int) -> bool:
    # Both ways send (N-1)/N of the bytes that are counted here.
    integers = 2 * rows * self.codec.tile_size * sum_dtype(self.codec, workers).itemsize
    share = -(-rows // workers)
    sums, words = packed_shape(self.codec, workers, share)
    packed = 4 * workers * (share * self.codec.row_words + sums * words)
    return workers == 1 or integers <= packed

  def terms(self, rows: Array, workers: int) -> Array:
    return self.codec.codes(stored(rows)).astype(sum_dtype(self.codec, workers))

  def reduced(
    self, total: Array, leaves: Sequence[LeafRows], agreed: Array | None, scale: float
  ) -> RowDecoder:
    return self._decoder(total.astype(jnp.int32), agreed, scale)

  def _decoder(self, sums: Array, agreed: Array | None, scale: float) -> RowDecoder:
    assert agreed is not None
    cut, lines = cutter(sums), cutter(agreed)
    return lambda start, stop: self._values(cut(start, stop), lines(start, stop), scale)

  @functools.partial(jax.jit, static_argnums=(0, 3))  # leaves of a shape: traced once
  def _values(self, sums: Array, agreed: Array, scale: float) -> Array:
    return scaled(self.codec.from_codes(sums, agreed), scale)


def sum_bits(codec: "SharedScales", workers: int) -> int:
  """Returns the number of bits that hold every sum: ``ceil(log2(2 N m + 1))``."""
  return (2 * sum_limit(codec.max_code, workers, codec)).bit_length()


def sum_dtype(codec: "SharedScales", workers: int) -> jnp.dtype:
  """Returns the narrowest integer type that no sum of N workers can overflow."""
  limit = sum_limit(codec.max_code, workers, codec)
  kinds = (jnp.int8, jnp.int16, jnp.int32)
  return next(jnp.dtype(x) for x in kinds if limit <= jnp.iinfo(x).max)


def packed_shape(codec: "SharedScales", workers: int, rows: int) -> tuple[int, int]:
  """Returns the numbers of rows and words that the sums of ``rows`` rows pack into."""
  per_word = planes.planes_per_word(sum_bits(codec, workers))
  buckets = rows * codec.tile_size // codec.row_words
  return -(-buckets // per_word), codec.row_words


def pack_sums(codec: "SharedScales", sums: Array, workers: int) -> Array:
  """Packs sums, ``int32[rows, P, B]``, into words.

  A word holds the sums of one element in each of P' buckets. Code ``k`` of word ``w``
  of row ``t`` is the sum of element ``w`` of bucket ``t P' + k``, plus ``N m``.
  """
  codes = (sums + sum_limit(codec.max_code, workers, codec)).astype(jnp.uint32)
  return pack_buckets(codes, sum_bits(codec, workers))


def unpack_sums(codec: "SharedScales", words: Array, rows: int, workers: int) -> Array:
  """Unpacks the words of :func:`pack_sums` to sums, ``int32[rows, P, B]``."""
  count = codec.tile_size // codec.row_words
  codes = unpack_buckets(words, sum_bits(codec, workers), rows * count)
  sums = codes.astype(jnp.int32).reshape(rows, count, -1)
  return sums - sum_limit(codec.max_code, workers, codec)


def pack_buckets(codes: Array, bits: int) -> Array:
  """Packs buckets of codes, ``uint32[..., B]``, into words; zeros fill the last ones.

  The buckets that follow each other share words, as many as fit.
  """
  per_word = planes.planes_per_word(bits)
  buckets = codes.reshape(-1, codes.shape[-1])
  padded = jnp.pad(buckets, ((0, -len(buckets) % per_word), (0, 0)))
  return planes.pack_planes([padded[k::per_word] for k in range(per_word)], bits)


def unpack_buckets(words: Array, bits: int, buckets: int) -> Array:
  """Unpacks the words of :func:`pack_buckets` to ``uint32[buckets, B]``."""
  codes = planes.unpack_planes(words, bits)
  return codes.reshape(-1, words.shape[-1])[:buckets]
