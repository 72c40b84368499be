"""Sums in a codec's own number format, rounded to it at each addition (Han et al.)."""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.codecs.sums.records import Context
from gradcomp._src.codecs.sums.sum import (
  Coder,
  Partial,
  RowDecoder,
  Sent,
  Sum,
  SumFacts,
)
from gradcomp._src.codecs.sums.tiles import UNROLLED, in_order
from gradcomp._src.floats.arithmetic import rounded_sum
from gradcomp._src.floats.sums import kahan_step
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.kernels.common.float_formats import FloatFormat
from gradcomp._src.kernels.materialize import materialized, packed, slice_at, starts

_FACTS = SumFacts(
  in_format=True,
  refusals={
    "reduced": "a codec that adds in its own format, as no backend does, got {codec}; "
    'use exchange="auto", "two_shot" or "ring".'
  },
)


class NumberCoder(Coder, Protocol):
  @property
  def accumulate(self) -> str: ...
  @property
  def scale(self) -> float | str: ...
  @property
  def format(self) -> FloatFormat: ...
  def encode_sums(self, sums: Array) -> Array: ...
  def unscaled(self, tiles: Array, agreed: Array | None) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Numbers(Sum):
  """Adds scaled numbers, ``float32[rows, P, B]``, and rounds sums to their format."""

  codec: NumberCoder

  @property
  def facts(self) -> SumFacts:
    return dataclasses.replace(_FACTS, rounds=self.codec.accumulate == "format")

  @property
  def _rounds(self) -> bool:
    return self.codec.accumulate != "float32"

  @property
  def rider_words(self) -> int:
    return self.codec.row_words if self.codec.accumulate == "kahan" else 0

  def unpacked(self, rows: Array) -> Array:
    return self.codec.decode_rows(rows)

  def gathered(self, rows: Array, agreed: Array | None, scale: float) -> RowDecoder:
    return self._decoder(rows, agreed, scale)

  def gathered_loss(self, rows: Array, agreed: Array | None, own: Array) -> RowDecoder:
    # Every worker does all additions, and keeps the loss of adding its own numbers.
    return self._decoder(rows, agreed, 1.0, own)

  def start(self, own: Array, context: Context, *, keep: bool) -> Sent:
    return Sent(own, (jnp.zeros_like(own),) if self.codec.accumulate == "kahan" else ())

  def add(self, received: Sent, own: Array, *, keep: bool) -> Partial:
    partial = self._first(self.codec.decode_rows(received.rows), keep=keep)
    for rider in received.riders:
      partial = partial._replace(compensation=self.codec.decode_rows(rider))
    return self._plus(partial, self.codec.decode_rows(own))

  def add_all(self, own: Array, *, keep: bool) -> Partial:
    return self._fold(own, keep)._replace(scale=1.0)  # which jit made an array

  def fold(self, rows: Array, scale: float, *, keep: bool) -> Partial:
    added = materialized(lambda rows: self._fold(rows, keep)[:3], rows)
    return Partial(*added)._replace(scale=scale)

  def send(self, partial: Partial, context: Context, *, keep: bool) -> Sent:
    rows = packed(self.codec.encode_sums(partial.total))
    lost = partial.lost
    if lost is not None and not self._rounds:  # a rounded sum encodes exactly
      lost = lost + (partial.total - self.codec.decode_rows(rows))
    compensation = () if partial.compensation is None else (partial.compensation,)
    riders = tuple(map(self.codec.encode_sums, compensation))
    return Sent(rows, riders, lost, scale=partial.scale)

  def read(self, own: Array) -> Array:
    return self.codec.decode_rows(own)

  def loss(self, lost: Array, agreed: Array | None) -> RowDecoder:
    return self._decoder(lost, agreed, 1.0)

  def _first(self, number: Array, *, keep: bool) -> Partial:
    # The zeros have the type of the number: they vary over the axes over which it does.
    zero = jax.lax.full_like(number, 0)
    zeros = jax.lax.select(jax.lax.eq(number, number), zero, zero)
    compensates = self.codec.accumulate == "kahan"
    return Partial(number, zeros if compensates else None, zeros if keep else None)

  def _plus(self, partial: Partial, x: Array, counts: Array | bool = True) -> Partial:
    """Adds one worker's numbers; with ``counts`` this worker keeps the loss."""
    exact = partial.total + x
    if not self._rounds:
      return partial._replace(total=exact)
    total, compensation, lost = partial[:3]
    fmt, saturate = self.codec.format, self.codec.scale == "auto"
    if compensation is None:
      total = rounded_sum(total, x, fmt, saturate=saturate)
    else:
      given = total, compensation, x, fmt
      total, compensation = kahan_step(*given, saturate=saturate)
    if lost is not None:
      lost = lost + jnp.where(counts, exact - total, 0.0)
    return partial._replace(total=total, compensation=compensation, lost=lost)

  @functools.partial(jax.jit, static_argnums=(0, 2))  # leaves of a shape: traced once
  def _fold(self, rows: Array, keep: bool, own: Array | None = None) -> Partial:
    """Adds K payloads in order; with ``own`` keeps only the loss of adding that one."""

    def step(k: Array | int, arrays: tuple) -> tuple:
      kept = True if own is None else k == own
      return self._plus(Partial(*arrays), self.codec.decode_rows(rows[k]), kept)[:3]

    first = self._first(self.codec.decode_rows(rows[0]), keep=keep)
    lost = first.lost
    if lost is not None and own is not None:
      # Workers keep different losses, and a loop needs that in their type at the start.
      lost = jnp.where(own == 0, lost, lost)
    arrays = (first.total, first.compensation, lost)
    # An addition that rounds takes 60 operations. So fewer of them are written out,
    # which bounds the compile time.
    unrolled = 4 if self._rounds else UNROLLED
    return Partial(*in_order(step, rows.shape[0], arrays, unrolled))

  def _decoder(
    self, given: Array, agreed: Array | None, scale: float, own: Array | None = None
  ) -> RowDecoder:
    """Returns the decoder of payloads or losses, which divides them by their scale."""
    rows = given.shape[given.dtype == jnp.uint32]
    at = starts(rows, given if agreed is None else agreed, fused=True)
    return lambda a, b: self._decoded(given, agreed, own, at(a, b), b - a, scale)

  @functools.partial(jax.jit, static_argnums=(0, 5, 6))  # leaves of a shape: once
  def _decoded(
    self,
    given: Array,  # uint32[K, rows, words], or float32[rows, P, B]
    agreed: Array | None,
    own: Array | None,  # the payload to return the loss of adding, alone
    start: Array | int,
    count: int,
    scale: float,
  ) -> Array:
    if given.dtype == jnp.uint32:
      part = slice_at(given, start, count, 1)
      total, _, lost = self._fold(part, own is not None, own)[:3]
      numbers = total if own is None else lost
    else:
      numbers = slice_at(given, start, count)
    assert numbers is not None
    planes = self.codec.tile_size // self.codec.row_words
    tiles = scaled(numbers, scale).reshape(count, planes, self.codec.row_words)
    lines = None if agreed is None else slice_at(agreed, start, count)
    return self.codec.unscaled(tiles, lines)
