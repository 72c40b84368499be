"""Exact sums of codes and of signs, packed into as few bits as hold ``[-N m, N m]``."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
from gradcomp._src.codecs.sums.tiles import Tiles, cutter, sum_in_order
from gradcomp._src.kernels.common import fixed_point, planes
from gradcomp._src.kernels.materialize import SOME, packed, slice_at, starts

_AGAIN = (
  "a codec that shares its scale, because partial sums are encoded again with scales "
  'of their own, got {codec}; use "psum", whose sums are exact, or share_scale=False.'
)
_FACTS = SumFacts(refusals={"passed": _AGAIN, "grouped": _AGAIN})


@dataclasses.dataclass(frozen=True)
class Codes(Sum):
  """Adds codes, ``int32[rows, P, B]``. Owners pack the sums into as few bits as fit."""

  codec: Any  # one of SharedScales, which encodes rows with statistics of all workers

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
    return Partial(
      sum_in_order(self.codec.codes, packed(rows, least=SOME)), scale=scale
    )

  def finish(
    self, partial: Partial, context: Context, workers: int, *, keep: bool
  ) -> Sent:
    rows = packed(self._integers(workers).pack(partial.total))
    return Sent(rows, scale=partial.scale)

  def value(
    self, rows: Array, agreed: Array | None, scale: float, share: int, workers: int
  ) -> RowDecoder:
    shape = share, self.codec.tile_size // self.codec.row_words
    return self._decoder(self._integers(workers).unpack(rows, shape), agreed, scale)

  def reduces_shorter(self, rows: int, workers: int) -> bool:
    # Both ways send (N-1)/N of the bytes that are counted here.
    size, words = self.codec.tile_size, self.codec.row_words
    integers = 2 * rows * size * self.sum_dtype(workers).itemsize
    share = -(-rows // workers)
    per_word = planes.planes_per_word(self._integers(workers).bits)
    sums = -(-(share * size // words) // per_word)
    return workers == 1 or integers <= 4 * workers * words * (share + sums)

  def terms(self, rows: Array, workers: int) -> Array:
    return self.codec.codes(packed(rows, least=SOME)).astype(self.sum_dtype(workers))

  def reduced(
    self, total: Array, leaves: Sequence[LeafRows], agreed: Array | None, scale: float
  ) -> RowDecoder:
    return self._decoder(total.astype(jnp.int32), agreed, scale)

  def _decoder(self, sums: Array, agreed: Array | None, scale: float) -> RowDecoder:
    assert agreed is not None
    at = starts(len(sums), agreed, fused=True)
    return lambda a, b: self._values(sums, agreed, at(a, b), b - a, scale)

  def _integers(self, workers: int) -> "Integers":
    return Integers(sum_limit(self.codec.max_code, workers, self.codec))

  def sum_dtype(self, workers: int) -> np.dtype:
    """Returns the narrowest integer type that no sum of N workers can overflow."""
    most, kinds = self._integers(workers).most, (np.int8, np.int16, np.int32)
    return next(np.dtype(x) for x in kinds if most <= np.iinfo(x).max)

  @functools.partial(jax.jit, static_argnums=(0, 4, 5))  # leaves of a shape: once
  def _values(
    self, sums: Array, agreed: Array, start: Array | int, count: int, scale: float
  ) -> Array:
    part, lines = (slice_at(x, start, count) for x in (sums, agreed))
    return fixed_point.scaled(self.codec.from_codes(part, lines), scale)


class Integers(NamedTuple):
  """The integers ``[-most, most]`` as codes of as few bits as hold all of them.

  Code ``k`` of word ``w`` of row ``t`` is element ``w`` of bucket ``t P' + k``, less
  ``least``; codes beyond the last bucket are zeros.
  """

  most: int
  nan: bool = False  # whether the code 0 stands for NaN, which takes no bit more

  @property
  def least(self) -> int:
    """The integer of the code 0."""
    return -self.most - self.nan

  @property
  def bits(self) -> int:
    """The bits of a code, ``ceil(log2(2 m + 1))``."""
    return (self.most - self.least).bit_length()

  def pack(self, numbers: Array) -> Array:
    """Packs buckets of integers, ``int32[..., B]``, into words."""
    buckets = (numbers - self.least).astype(jnp.uint32).reshape(-1, numbers.shape[-1])
    per_word = planes.planes_per_word(self.bits)
    padded = jnp.pad(buckets, ((0, -len(buckets) % per_word), (0, 0)))
    return planes.pack_planes([padded[k::per_word] for k in range(per_word)], self.bits)

  def unpack(self, words: Array, shape: tuple[int, ...]) -> Array:
    """Unpacks ``[N, rows, B]`` to ``int32[N * shape[0], shape[1], B]``."""
    count, _, width = words.shape
    codes = planes.unpack_planes(words, self.bits).astype(jnp.int32)
    buckets = codes.reshape(count, -1, width)[:, : math.prod(shape)]
    return buckets.reshape(count * shape[0], shape[1], width) + self.least


_PARTIAL = 'signs, because partial sums take more bits, got {codec}; use "two_shot".'
_OF_SIGNS = SumFacts(
  own_units=True, refusals=dict.fromkeys(("passed", "grouped", "reduced"), _PARTIAL)
)


@dataclasses.dataclass(frozen=True)
class Votes(Tiles):
  """Counts signs as exact float32 integers; owners send counts, or signs of counts."""

  decides: bool  # whether the most votes win
  facts: SumFacts = dataclasses.field(default=_OF_SIGNS, kw_only=True)

  @functools.partial(jax.jit, static_argnums=(0, 2))  # leaves of a shape: traced once
  def mean(self, rows: Array, scale: float) -> Array:
    return self._value(self.codec.sum_rows(rows), scale, len(rows))

  def gathered_loss(
    self, rows: Array, agreed: Array | None, own: Array
  ) -> RowDecoder | None:
    if not self.decides:
      return None
    # A worker keeps its difference to the vote; in `fold` the owner does, for all.
    vote = self.gathered(rows, agreed, 1 / len(rows))
    return lambda start, stop: (
      self.codec.decode_rows(rows[own, start:stop]) - vote(start, stop)
    )

  def fold(self, rows: Array, scale: float, *, keep: bool) -> Partial:
    with jax.named_scope("gradcomp_decode"):
      count = self.codec.sum_rows(rows)
    if not self.decides:
      return Partial(count, scale=scale)
    winner = jnp.sign(count)
    lost = count - len(rows) * winner if keep else None
    return Partial(winner, lost=lost, scale=scale)

  def finish(
    self, partial: Partial, context: Context, workers: int, *, keep: bool
  ) -> Sent:
    counts, total = self._integers(workers), partial.total
    sums = jnp.where(jnp.isnan(total), counts.least, total).astype(jnp.int32)
    return Sent(packed(counts.pack(sums)), lost=partial.lost, scale=partial.scale)

  def value(
    self, rows: Array, agreed: Array | None, scale: float, share: int, workers: int
  ) -> RowDecoder:
    counts = self._integers(workers)
    shape = share, self.codec.tile_size // rows.shape[-1]
    cut = cutter(counts.unpack(rows, shape))

    def decode(start: int, stop: int) -> Array:
      part = cut(start, stop)
      known = jnp.where(part == counts.least, np.float32(np.nan), part)
      return self._value(known, scale, workers)

    return decode

  def _integers(self, workers: int) -> Integers:
    """Returns the numbers that an owner sends."""
    return Integers(1 if self.decides else workers, nan=True)

  def _value(self, counts: Array, scale: float, workers: int) -> Array:
    """Returns the mean of N workers' signs, or of their votes, from counts."""
    if self.decides:
      return fixed_point.scaled(jnp.sign(counts), scale * workers)
    return fixed_point.scaled(counts, scale)
