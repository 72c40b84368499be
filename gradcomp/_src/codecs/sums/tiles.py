"""Sums of tiles in float32: decoded, and encoded again; plain, or of a few elements."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self

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
)
from gradcomp._src.kernels import materialize, selection
from gradcomp._src.kernels.common import sparse
from gradcomp._src.kernels.common.fixed_point import scaled

# More payloads than this are added in a loop, which bounds the compile time.
UNROLLED = 16


def in_order(
  step: Callable[[Any, Any], Any], count: int, first: Any, unrolled: int = UNROLLED
) -> Any:
  """Returns ``step(count - 1, ... step(2, step(1, first)))``; a loop if it is long."""
  if count > unrolled:
    return jax.lax.fori_loop(1, count, step, first)
  for k in range(1, count):
    first = step(k, first)
  return first


def sum_in_order(decode: Callable[[Any], Any], rows: Array) -> Array:
  """Returns ``decode(rows[0]) + decode(rows[1]) + ...``."""
  count, total = rows.shape[0], decode(rows[0])  # not by in_order: two frames less
  if count > UNROLLED:
    return jax.lax.fori_loop(1, count, lambda k, x: x + decode(rows[k]), total)
  # A short sum is written out, so that XLA fuses decoding and adding into one pass.
  for k in range(1, count):
    total = total + decode(rows[k])
  return total


def cutter(rows: Array, axis: int = 0) -> Callable[[int, int], Array]:
  """Returns a function that slices an axis; of tiles, it is their decoder."""
  return lambda start, stop: jax.lax.slice_in_dim(rows, start, stop, axis=axis)


OF_TILES = SumFacts(
  exact=False,
  of_rows=False,
  refusals={
    "reduced": "a codec whose codes cannot be added, got {codec}; use "
    'exchange="auto", a codec that shares its scale (share_scale=True), or '
    "gradcomp.dense() for the plain mean."
  },
)


class Coder(Protocol):
  """The part of a codec that a sum of tiles needs; the class lies above it."""

  @property
  def tile_size(self) -> int: ...
  def to_nearest(self) -> Self: ...
  def encode_rows(self, tiles: Array, context: Context) -> Array: ...
  def decode_rows(self, rows: Array) -> Array: ...
  def sum_rows(self, rows: Array) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Tiles(Sum):
  """Adds float32 tiles, decoded and encoded by ``codec``."""

  codec: Coder
  facts: SumFacts = dataclasses.field(default=OF_TILES, kw_only=True)

  @functools.partial(jax.jit, static_argnums=(0, 2))  # leaves of a shape: traced once
  def mean(self, rows: Array, scale: float) -> Array:
    """Decodes K payloads, ``uint32[K, rows, words]``, and returns their scaled sum."""
    return scaled(self.codec.sum_rows(rows), scale)

  def unpacked(self, rows: Array) -> Array:
    return self.codec.decode_rows(rows)

  def gathered(self, rows: Array, agreed: Array | None, scale: float) -> RowDecoder:
    del agreed
    # Materialized, the payloads of all workers would be held twice.
    cut = materialize.word_cutter(rows, 1) if len(rows) == 1 else cutter(rows, 1)
    return lambda start, stop: self.mean(cut(start, stop), scale)

  def start(self, own: Array, context: Context, *, keep: bool) -> Sent:
    return self.hop(Partial(own), context, keep=keep)

  def add(self, received: Sent, own: Array, *, keep: bool) -> Partial:
    with jax.named_scope("gradcomp_decode"):
      return Partial(self.codec.decode_rows(received.rows).reshape(own.shape) + own)

  def add_all(self, own: Array, *, keep: bool) -> Partial:
    add = lambda k, total: total + own[k]
    return Partial(in_order(add, own.shape[0], own[0], own.shape[0]))

  def fold(self, rows: Array, scale: float, *, keep: bool) -> Partial:
    with jax.named_scope("gradcomp_decode"):
      return Partial(self.mean(rows, scale))

  def send(self, partial: Partial, context: Context, *, keep: bool) -> Sent:
    tiles = partial.total
    with jax.named_scope("gradcomp_encode"):
      rows = materialize.packed(self.codec.encode_rows(tiles, context))
      if not keep:
        return Sent(rows, scale=partial.scale)
      lost = tiles - self.codec.decode_rows(rows).reshape(tiles.shape)
      return Sent(rows, lost=scaled(lost, partial.scale), scale=partial.scale)

  def finish(
    self, partial: Partial, context: Context, workers: int, *, keep: bool
  ) -> Sent:
    """Encodes ``mean + residual``, and returns the loss as the new owner residual."""
    if (residual := partial.residual) is None:
      return self.send(partial, context, keep=False)
    mean = partial.total.reshape(residual.shape) + residual
    # The loss is not lost for good, so the codec rounds to nearest, if it can.
    nearest = self.codec.to_nearest()
    with jax.named_scope("gradcomp_encode"):
      rows = materialize.packed(nearest.encode_rows(mean, context))
      lost = mean - nearest.decode_rows(rows).reshape(mean.shape)
    return Sent(rows, residual=jnp.where(jnp.isfinite(lost), lost, residual))


@dataclasses.dataclass(frozen=True)
class Floats(Tiles):
  """Adds dense leaves; their elements travel as they are."""

  facts: SumFacts = SumFacts(plain=True, keeps_float64=True, of_rows=False)

  def terms(self, rows: Array, workers: int) -> Array:
    return jax.lax.bitcast_convert_type(rows, jnp.float32)

  def reduced(
    self, total: Array, leaves: Sequence[LeafRows], agreed: Array | None, scale: float
  ) -> RowDecoder:
    words = jax.lax.bitcast_convert_type(total, jnp.uint32)
    return self.gathered(words[None], agreed, scale)


@dataclasses.dataclass(frozen=True)
class Ranged(Tiles):
  """Adds float32 tiles, and divides the rows of partial sums that rows cannot hold.

  A partial sum may be N times as large as the mean, and dividing all by N would lose
  the smallest numbers. So a row is divided only if it must be; its power of two rides
  along.
  """

  largest: float  # number that a row holds
  rider_words: ClassVar[int] = 1

  def like_one(self, partial: Partial, count: int) -> Partial:
    power = 2.0 ** (count - 1).bit_length()
    return Partial(scaled(partial.total, 1 / power), scale=partial.scale * power)

  def hop(self, partial: Partial, context: Context, *, keep: bool) -> Sent:
    tiles = partial.total
    finite = jnp.where(jnp.isfinite(tiles), jnp.abs(tiles), 0.0)
    largest = jnp.max(finite.reshape(tiles.shape[0], -1), axis=1)
    found = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23
    # Less than the power of two below what rows hold needs no rounding to be seen.
    most = int(np.float32(self.largest).view(np.int32)) >> 23
    exponents = jnp.maximum(found - (most - 1), 0)  # powers by which rows are divided
    small = Partial(tiles * _power(-exponents, tiles.ndim))
    sent = self.send(small, context, keep=keep)
    if sent.lost is not None:
      sent = sent._replace(lost=sent.lost * _power(exponents, tiles.ndim))
    return sent._replace(riders=(exponents.astype(jnp.uint32)[:, None],))

  def add(self, received: Sent, own: Array, *, keep: bool) -> Partial:
    (exponents,) = received.riders
    power = _power(exponents[:, 0].astype(jnp.int32), own.ndim)
    with jax.named_scope("gradcomp_decode"):
      tiles = self.codec.decode_rows(received.rows).reshape(own.shape)
      return Partial(tiles * power + own)


def _power(exponents: Array, ndim: int) -> Array:
  """Returns ``2**exponents`` of rows, in ``ndim`` axes."""
  powers = jax.lax.bitcast_convert_type((exponents + 127) << 23, jnp.float32)
  return powers.reshape(-1, *[1] * (ndim - 1))


OF_BLOCKS = dataclasses.replace(OF_TILES, drops=True).refusing(
  {
    "passed": "a sparse codec, which would choose anew in every partial sum, got "
    '{codec}; use "two_shot", whose owners choose once.'
  }
)
_AGAIN = (
  "a codec that sends the same elements from all workers, got {codec}: their sums need "
  'no second encoding; use "psum".'
)
_OF_CHOSEN = dataclasses.replace(
  OF_BLOCKS,
  same_draws=True,
  refusals={"passed": OF_BLOCKS.refusals["passed"], "owned": _AGAIN, "grouped": _AGAIN},
)


@dataclasses.dataclass(frozen=True)
class Blocks(Tiles):
  """Adds float32 tiles of a codec that sends some of their elements."""

  codec: Any  # one with ``slots`` and ``entries``
  facts: SumFacts = dataclasses.field(default=OF_BLOCKS, kw_only=True)

  def senders(self, rows: Array) -> RowDecoder:
    def sent(rows: Array) -> Array:
      return jnp.where(self.codec.decode_rows(rows) == 0, 0.0, 1.0)

    return lambda start, stop: sum_in_order(sent, rows[:, start:stop])

  def slots(self, rows: int) -> int:
    return rows * self.codec.slots

  @functools.partial(jax.jit, static_argnums=(0, 2))  # leaves of a shape: traced once
  def sent_at(self, rows: Array, size: int) -> Array:
    positions, values = self.codec.entries(rows)
    tile = self.codec.tile_size
    used = (positions < tile) & (values != 0)
    if size >= sparse.COUNTED:  # positions do not fit in 32 bits
      parts = positions[None], used[None].astype(jnp.float32)
      return sparse.add_entries(tile, *parts).reshape(-1)[:size] > 0
    start = tile * jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(used, start + positions, size).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Entries(Blocks):
  """Adds entries at their positions. Each value is scaled before it is added."""

  @functools.partial(jax.jit, static_argnums=(0, 2))
  def mean(self, rows: Array, scale: float) -> Array:
    positions, values = self.codec.entries(rows)
    return sparse.add_entries(self.codec.tile_size, positions, values * scale)

  def gathered(self, rows: Array, agreed: Array | None, scale: float) -> RowDecoder:
    # The entries of all rows are unpacked at once. There may be many small leaves, so
    # the entries of these are added at once, too. A CPU does not know where the rows of
    # a large leaf begin, so leaves of one shape have equal programs, compiled once.
    positions, values = self.codec.entries(rows)
    values = values * scale
    size = self.codec.tile_size
    together = rows.shape[1] * size < sparse.COUNTED
    every = functools.cache(lambda: sparse.add_entries(size, positions, values))
    at = materialize.starts(rows.shape[1], positions)

    def decode(start: int, stop: int) -> Array:
      count = stop - start
      if count == rows.shape[1] or (together and count * size <= selection.COPIED):
        return every()[start:stop]
      return sparse.add_entries(size, positions, values, at(start, stop), count)

    return decode

  def senders(self, rows: Array) -> RowDecoder:
    positions, values = self.codec.entries(rows)
    used = jnp.where(values == 0, 0.0, 1.0)
    add = functools.partial(sparse.add_entries, self.codec.tile_size)
    return lambda start, stop: add(positions, used, start, stop - start)


@dataclasses.dataclass(frozen=True)
class Chosen(Entries):
  """Adds the values of elements that all workers choose by one key."""

  codec: Any  # one with ``header`` and ``header_words``, too
  facts: SumFacts = _OF_CHOSEN

  def terms(self, rows: Array, workers: int) -> Array:
    values = rows[:, self.codec.header_words :]
    return jax.lax.bitcast_convert_type(values, jnp.float32)

  def reduced(
    self, total: Array, leaves: Sequence[LeafRows], agreed: Array | None, scale: float
  ) -> RowDecoder:
    headers = [self.codec.header(*leaf) for leaf in leaves]  # of keys that choose
    words = jax.lax.bitcast_convert_type(total, jnp.uint32)
    rows = jnp.concatenate([jnp.concatenate(headers), words], axis=1)
    return self.gathered(rows[None], agreed, scale)
