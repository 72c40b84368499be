"""Exact counts of signs: their mean, or the sign of most workers."""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.codecs.sums.codes import pack_buckets, unpack_buckets
from gradcomp._src.codecs.sums.records import Context
from gradcomp._src.codecs.sums.sum import Partial, RowDecoder, Sent, SumFacts
from gradcomp._src.codecs.sums.tiles import Tiles, cutter
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.kernels.materialize import packed

if TYPE_CHECKING:
  from gradcomp._src.codecs.sign import Sign

_PARTIAL = 'signs, of which no partial sum has one bit, got {codec}; use "two_shot".'
_FACTS = SumFacts(
  own_units=True,
  refusals=dict.fromkeys(("passed", "grouped", "reduced"), _PARTIAL),
)


@dataclasses.dataclass(frozen=True)
class Votes(Tiles):
  """Counts signs as float32 integers, which are exact. An owner sends counts.

  With ``vote="majority"`` it sends the sign of the count, and a worker keeps what it is
  outvoted by, or the owner does for all.
  """

  codec: "Sign"
  facts: SumFacts = dataclasses.field(default=_FACTS, kw_only=True)

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
