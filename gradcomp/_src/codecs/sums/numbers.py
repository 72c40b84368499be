"""Sums in a codec's own number format, rounded to it at each addition (Han et al.)."""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.sums.records import Context
from gradcomp._src.codecs.sums.sum import Partial, RowDecoder, Sent, Sum, SumFacts
from gradcomp._src.codecs.sums.tiles import UNROLLED, cutter, in_order
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.kernels.materialize import materialized, packed

if TYPE_CHECKING:
  from gradcomp._src.codecs.float_cast import FloatCast

# An addition that rounds takes 60 operations. So fewer of them are written out, which
# bounds the compile time.
_UNROLLED = 4


_FACTS = SumFacts(
  in_format=True,
  refusals={
    "reduced": "a codec that adds in its own format, which no backend does, got "
    '{codec}; use exchange="auto", "two_shot" or "ring".'
  },
)


@dataclasses.dataclass(frozen=True)
class Numbers(Sum):
  """Adds scaled numbers, ``float32[rows, P, B]``, and rounds sums to their format.

  Codes of the format cross the wire in every stage. One worker does an addition, and
  keeps its loss in its residual. In ``all_gather`` every worker does all additions. The
  loss is then kept by the worker whose numbers were added.

  References:
    Han et al., `Auto-Precision Scaling for Distributed Deep Learning
    <https://arxiv.org/abs/1911.08907>`_, 2021, sections 4.2 and 5.1
  """

  codec: "FloatCast"

  @property
  def facts(self) -> SumFacts:
    return dataclasses.replace(_FACTS, rounds=self.codec.accumulate == "format")

  @property
  def _rounds(self) -> bool:
    return self.codec.accumulate != "float32"

  @property
  def _compensates(self) -> bool:
    return self.codec.accumulate == "kahan"

  def unpacked(self, rows: jax.Array) -> jax.Array:
    return self.codec.decode_rows(rows)

  def gathered(
    self, rows: jax.Array, agreed: jax.Array | None, scale: float
  ) -> RowDecoder:
    cut = cutter(rows, 1)
    total = lambda first, stop: self._fold(cut(first, stop), False).total
    return self._unscaled(total, agreed, scale)

  def gathered_loss(
    self, rows: jax.Array, agreed: jax.Array | None, own: jax.Array
  ) -> RowDecoder:
    cut = cutter(rows, 1)

    def lost(first: int, stop: int) -> jax.Array:
      kept = self._fold(cut(first, stop), True, own).lost
      assert kept is not None
      return kept

    return self._unscaled(lost, agreed, 1.0)

  def start(self, own: jax.Array, context: Context, *, keep: bool) -> Sent:
    return Sent(own, (jnp.zeros_like(own),) if self._compensates else ())

  def add(self, received: Sent, own: jax.Array, *, keep: bool) -> Partial:
    partial = self._first(self.codec.decode_rows(received.rows), keep=keep)
    for rider in received.riders:
      partial = partial._replace(compensation=self.codec.decode_rows(rider))
    return self._plus(partial, self.codec.decode_rows(own))

  def add_all(self, own: jax.Array, *, keep: bool) -> Partial:
    return self._fold(own, keep)._replace(scale=1.0)  # which jit made an array

  def fold(self, rows: jax.Array, scale: float, *, keep: bool) -> Partial:
    added = materialized(lambda rows: self._fold(rows, keep)[:3], rows)
    return Partial(*added)._replace(scale=scale)

  def send(self, partial: Partial, context: Context, *, keep: bool) -> Sent:
    rows = packed(self.codec.encode_sums(partial.total))
    lost = partial.lost
    if lost is not None:
      if not self._rounds:  # a rounded sum encodes exactly
        lost = lost + (partial.total - self.codec.decode_rows(rows))
    riders: tuple[jax.Array, ...] = ()
    if partial.compensation is not None:
      riders = (self.codec.encode_sums(partial.compensation),)
    return Sent(rows, riders, lost, scale=partial.scale)

  def finish(
    self,
    partial: Partial,
    context: Context,
    residual: jax.Array | None,
    workers: int,
    *,
    keep: bool,
  ) -> Sent:
    return self.send(partial, context, keep=keep)

  def value(
    self,
    rows: jax.Array,
    agreed: jax.Array | None,
    scale: float,
    share: int,
    workers: int,
  ) -> RowDecoder:
    return self.gathered(rows.reshape(1, -1, rows.shape[-1]), agreed, scale)

  def read(self, own: jax.Array) -> jax.Array:
    return self.codec.decode_rows(own)

  def loss(self, lost: jax.Array, agreed: jax.Array | None) -> RowDecoder:
    return self._unscaled(cutter(lost), agreed, 1.0)

  def _first(self, number: jax.Array, *, keep: bool) -> Partial:
    # The zeros have the type of the number: they vary over the axes over which it does.
    zeros = jnp.where(number == number, np.float32(0), np.float32(0))
    return Partial(
      number, zeros if self._compensates else None, zeros if keep else None
    )

  def _plus(
    self, partial: Partial, x: jax.Array, counts: jax.Array | bool = True
  ) -> Partial:
    """Adds one worker's numbers; with ``counts`` this worker keeps the loss."""
    exact = partial.total + x
    if not self._rounds:
      return partial._replace(total=exact)
    compensation = partial.compensation
    if compensation is None:
      total = self.codec.add(partial.total, x)
    else:
      total, compensation = self.codec.add_compensated(partial.total, compensation, x)
    lost = partial.lost
    if lost is not None:
      lost = lost + jnp.where(counts, exact - total, 0.0)
    return partial._replace(total=total, compensation=compensation, lost=lost)

  @functools.partial(jax.jit, static_argnums=(0, 2))  # leaves of a shape: traced once
  def _fold(self, rows: jax.Array, keep: bool, own: jax.Array | None = None) -> Partial:
    """Adds K payloads, ``uint32[K, rows, words]``, in their order.

    With ``own``, only the loss of adding the payload of this number is kept.
    """

    def step(k: jax.Array | int, arrays: tuple) -> tuple:
      kept = True if own is None else k == own
      added = self._plus(Partial(*arrays), self.codec.decode_rows(rows[k]), kept)
      return added[:3]

    first = self._first(self.codec.decode_rows(rows[0]), keep=keep)
    lost = first.lost
    if lost is not None and own is not None:
      # Workers keep different losses, and a loop needs that in their type at the start.
      lost = jnp.where(own == 0, lost, lost)
    arrays = (first.total, first.compensation, lost)
    unrolled = _UNROLLED if self._rounds else UNROLLED
    return Partial(*in_order(step, rows.shape[0], arrays, unrolled))

  def _unscaled(
    self, decode: RowDecoder, agreed: jax.Array | None, scale: float
  ) -> RowDecoder:
    """Returns a decoder that also divides the numbers by their scale."""
    lines = (lambda start, stop: None) if agreed is None else cutter(agreed)
    return lambda start, stop: self._values(
      decode(start, stop), lines(start, stop), scale
    )

  @functools.partial(jax.jit, static_argnums=(0, 3))
  def _values(
    self, numbers: jax.Array, agreed: jax.Array | None, scale: float
  ) -> jax.Array:
    tiles = scaled(numbers, scale)
    planes = self.codec.tile_size // self.codec.row_words
    tiles = tiles.reshape(len(tiles), planes, self.codec.row_words)
    return self.codec.unscaled(tiles, agreed)
