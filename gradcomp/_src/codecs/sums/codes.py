"""Exact sums of codes and of signs, packed into as few bits as hold ``[-N m, N m]``."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.codecs.sums.records import Context
from gradcomp._src.codecs.sums.sum import (
  Coder,
  LeafRows,
  Partial,
  RowDecoder,
  Sent,
  Sum,
  SumFacts,
  sum_limit,
)
from gradcomp._src.codecs.sums.tiles import Tiles, cutter, sum_in_order
from gradcomp._src.kernels.common import planes
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.kernels.materialize import hidden, packed, slice_at, stored

_AGAIN = (
  "a codec that shares its scale, because partial sums are encoded again with scales "
  'of their own, got {codec}; use "psum", whose sums are exact, or share_scale=False.'
)
_FACTS = SumFacts(refusals={"passed": _AGAIN, "grouped": _AGAIN})


class ExactCoder(Coder, Protocol):
  @property
  def max_code(self) -> int: ...
  def codes(self, rows: Array) -> Array: ...
  def from_codes(self, codes: Array, agreed: Array) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Codes(Sum):
  """Adds codes, ``int32[rows, P, B]``. Owners pack the sums into as few bits as fit."""

  codec: ExactCoder  # encodes rows with the statistics of all workers

  @property
  def facts(self) -> SumFacts:
    return dataclasses.replace(_FACTS, max_code=self.codec.max_code)

  def unpacked(self, rows: Array) -> Array:
    return self.codec.codes(rows)

  def gathered(self, rows: Array, agreed: Array | None, scale: float) -> RowDecoder:
    assert agreed is not None
    # Fused into this sum, a slice from an unknown start would take twice as long.
    cut, lines = cutter(sum_in_order(self.codec.codes, rows)), cutter(agreed)
    return lambda a, b: self._values(cut(a, b), lines(a, b), 0, b - a, scale)

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
    return lambda a, b: self._values(sums, agreed, hidden(a), b - a, scale)

  @functools.partial(jax.jit, static_argnums=(0, 4, 5))  # leaves of a shape: once
  def _values(
    self, sums: Array, agreed: Array, start: Array | int, count: int, scale: float
  ) -> Array:
    part, lines = (slice_at(x, start, count) for x in (sums, agreed))
    return scaled(self.codec.from_codes(part, lines), scale)


def sum_bits(codec: ExactCoder, workers: int) -> int:
  """Returns the number of bits that hold every sum: ``ceil(log2(2 N m + 1))``."""
  return (2 * sum_limit(codec.max_code, workers, codec)).bit_length()


def sum_dtype(codec: ExactCoder, workers: int) -> jnp.dtype:
  """Returns the narrowest integer type that no sum of N workers can overflow."""
  limit = sum_limit(codec.max_code, workers, codec)
  kinds = (jnp.int8, jnp.int16, jnp.int32)
  return next(jnp.dtype(x) for x in kinds if limit <= jnp.iinfo(x).max)


def packed_shape(codec: ExactCoder, workers: int, rows: int) -> tuple[int, int]:
  """Returns the numbers of rows and words that the sums of ``rows`` rows pack into."""
  per_word = planes.planes_per_word(sum_bits(codec, workers))
  buckets = rows * codec.tile_size // codec.row_words
  return -(-buckets // per_word), codec.row_words


def pack_sums(codec: ExactCoder, sums: Array, workers: int) -> Array:
  """Packs sums, ``int32[rows, P, B]``, into words.

  A word holds the sums of one element in each of P' buckets. Code ``k`` of word ``w``
  of row ``t`` is the sum of element ``w`` of bucket ``t P' + k``, plus ``N m``.
  """
  codes = (sums + sum_limit(codec.max_code, workers, codec)).astype(jnp.uint32)
  return pack_buckets(codes, sum_bits(codec, workers))


def unpack_sums(codec: ExactCoder, words: Array, rows: int, workers: int) -> Array:
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


_PARTIAL = 'signs, of which no partial sum has one bit, got {codec}; use "two_shot".'
_OF_SIGNS = SumFacts(
  own_units=True,
  refusals=dict.fromkeys(("passed", "grouped", "reduced"), _PARTIAL),
)


class SignCoder(Coder, Protocol):
  @property
  def vote(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Votes(Tiles):
  """Counts signs as float32 integers, which are exact. An owner sends counts.

  With ``vote="majority"`` it sends the sign of the count, and a worker keeps what it is
  outvoted by, or the owner does for all.
  """

  codec: SignCoder
  facts: SumFacts = dataclasses.field(default=_OF_SIGNS, kw_only=True)

  @property
  def _decides(self) -> bool:
    return self.codec.vote == "majority"

  @functools.partial(jax.jit, static_argnums=(0, 2))  # leaves of a shape: traced once
  def mean(self, rows: Array, scale: float) -> Array:
    return self._value(self.codec.sum_rows(rows), scale, len(rows))

  def gathered_loss(
    self, rows: Array, agreed: Array | None, own: Array
  ) -> RowDecoder | None:
    if not self._decides:
      return None
    vote = self.gathered(rows, agreed, 1 / len(rows))
    return lambda start, stop: (
      self.codec.decode_rows(rows[own, start:stop]) - vote(start, stop)
    )

  def fold(self, rows: Array, scale: float, *, keep: bool) -> Partial:
    with jax.named_scope("gradcomp_decode"):
      count = self.codec.sum_rows(rows)
    if not self._decides:
      return Partial(count, scale=scale)
    winner = jnp.sign(count)
    lost = count - len(rows) * winner if keep else None
    return Partial(winner, lost=lost, scale=scale)

  def finish(
    self,
    partial: Partial,
    context: Context,
    residual: Array | None,
    workers: int,
    *,
    keep: bool,
  ) -> Sent:
    most = self._most(workers)
    # The code 0 is NaN, which takes no bit more: 2 m + 1 sums are an odd number.
    sums = jnp.where(jnp.isnan(partial.total), -most - 1, partial.total)
    codes = (sums.astype(jnp.int32) + (most + 1)).astype(jnp.uint32)
    rows = packed(pack_buckets(codes, _bits(most)))
    return Sent(rows, lost=partial.lost, scale=partial.scale)

  def value(
    self, rows: Array, agreed: Array | None, scale: float, share: int, workers: int
  ) -> RowDecoder:
    most, buckets = self._most(workers), share * self.codec.tile_size // rows.shape[-1]
    unpack = lambda words: unpack_buckets(words, _bits(most), buckets)
    codes = jax.vmap(unpack)(rows).astype(jnp.int32)
    codes = codes.reshape(workers * share, -1, rows.shape[-1])
    cut = cutter(codes)

    def decode(start: int, stop: int) -> Array:
      part = cut(start, stop)
      counts = (part - (most + 1)).astype(jnp.float32)
      counts = jnp.where(part == 0, np.float32(np.nan), counts)
      return self._value(counts, scale, workers)

    return decode

  def _most(self, workers: int) -> int:
    """Returns the largest number that an owner sends."""
    return 1 if self._decides else workers

  def _value(self, counts: Array, scale: float, workers: int) -> Array:
    """Returns the mean of N workers' signs, or of their votes, from counts."""
    if self._decides:
      return scaled(jnp.sign(counts), scale * workers)
    return scaled(counts, scale)


def _bits(most: int) -> int:
  """Returns the number of bits that hold the sums ``[-m, m]``, and NaN."""
  return (2 * most + 1).bit_length()
