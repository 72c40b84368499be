"""Codecs around codecs, as ``bind`` returns them: rotated, fitted, by column."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

from jax import Array

from gradcomp._src.codecs import contractions, quantizing
from gradcomp._src.codecs.protocol import Codec, as_float32, to_tiles
from gradcomp._src.codecs.sums import records, tiles
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.kernels import fitted, one_bit
from gradcomp._src.kernels.common import rotation, scales


def _inner(name: str) -> Any:
  """Returns the member of the codec inside; its methods stay bound to that codec."""
  return property(lambda self: getattr(self.codec, name))


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Around(Codec):
  """A base of codecs that change ``codec``, which users wrote and see in texts."""

  codec: Any

  unbiased, needs_key, contraction = map(
    _inner, ("unbiased", "needs_key", "contraction")
  )
  without_key, papers, of_whole = map(_inner, ("without_key", "papers", "of_whole"))

  def __repr__(self) -> str:
    return repr(self.codec)

  def to_nearest(self) -> Self:
    return dataclasses.replace(self, codec=self.codec.to_nearest())


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Rotated(_Around):
  """Encodes the elements of an elementwise codec after each is spread over a group."""

  tile_size, row_words, filled = map(_inner, ("tile_size", "row_words", "filled"))
  encode_rows, decode_rows = map(_inner, ("encode_rows", "decode_rows"))
  sum_rows, max_code = map(_inner, ("sum_rows", "max_code"))
  codes, from_codes = map(_inner, ("codes", "from_codes"))

  @property
  def sums(self) -> Sum:
    return dataclasses.replace(self.codec.sums, codec=self)

  def agree(self, x: Array) -> Array | None:
    return self.statistics(x)[0]

  def statistics(self, x: Array) -> tuple[Array | None, Any]:
    return self.codec.statistics(to_tiles(as_float32(x), self).reshape(-1))

  def encode_leaf(
    self, x: Array, context: records.Context, *, keep: bool = False
  ) -> records.Encoded:
    turned = to_tiles(as_float32(x), self).reshape(-1)
    return self.codec.encode_leaf(turned, context)

  def rotated(self, tiles: Array) -> Array:
    return self._turned(rotation.rotate, tiles)

  def unrotated(self, tiles: Array) -> Array:
    return self._turned(rotation.unrotate, tiles)

  def _turned(self, turn: Callable[..., Array], tiles: Array) -> Array:
    codec = self.codec
    return turn(tiles, codec.form.planes, codec.rotate, codec.implementation)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Fitted(_Around, quantizing.Levels):
  """Encodes by levels that all workers fit to their gradients every few steps."""

  rounding, bucket_size, implementation = map(
    _inner, ("rounding", "bucket_size", "implementation")
  )
  operation = fitted
  most_counted: ClassVar[int] = fitted.MOST_COUNTED

  @property
  def form(self) -> fitted.Form:
    words = self.bucket_size or quantizing.TENSOR_ROW
    return fitted.Form(bits=self.codec.bits, bucket_size=words)

  @property
  def fits(self) -> records.Fit:
    every = self.codec.refit_every
    return records.Fit(every, self.most_counted, self.measure, fitted.fit)

  def init(
    self, leaf: records.Leaf | None = None, key: Array | None = None
  ) -> records.Memory:
    """Returns equally spaced levels above zero: ``float32[2**(bits - 1)]``."""
    return records.Memory(fitted.first_levels(self.codec.bits))

  def measure(self, x: Array) -> Array:
    """Counts normalized magnitudes in a sample of buckets: ``int32[256]``."""
    flat, words = as_float32(x), self.form.bucket_size
    scale = None if self.bucket_size else scales.scales(scales.tensor_norm(flat, "max"))
    return fitted.histogram(flat, bucket_size=words, scale=scale)

  def encode_by(
    self, scale: Array | None, x: Array, context: records.Context, *_: Any, **given: Any
  ) -> records.Encoded:
    """Encodes by the levels of the codec state, or else by the elements' own."""
    if context.memory is not None and len(context.memory.shared):
      levels = context.memory.shared
    else:
      levels = fitted.fit(self.measure(x), self.init().shared)
    return super().encode_by(scale, x, context, levels, **given)


def _matrix(x: records.ArrayT) -> records.ArrayT:
  """Reshapes an array to a matrix: its first axis by all others; a scalar is 1 by 1."""
  rows = x.shape[0] if x.ndim else 1
  return x.reshape(rows, x.size // rows if rows else 0)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ByColumn(_Around):
  """Sends 1 bit an element and two means a column, in words of its own."""

  rows: int  # elements of a column

  @property
  def contraction(self) -> float:
    return contractions.of_signs(self.rows)

  @property
  def sums(self) -> Sum:
    return tiles.Tiles(self, facts=self.codec.facts)

  @property
  def tile_size(self) -> int:
    return self.rows

  @property
  def row_words(self) -> int:
    return -(-self.rows // one_bit.WORD) + 2

  def split(self, x: records.ArrayT) -> records.ArrayT:
    return _matrix(x).T

  def join(self, rows: records.ArrayT, like: records.ArrayLike) -> records.ArrayT:
    return rows.T.reshape(like.shape)

  def view_shape(self, rows: int, like: records.ArrayLike) -> tuple[int, ...]:
    return like.shape

  def encode_leaf(
    self, x: Array, context: records.Context, *, keep: bool = False
  ) -> records.Encoded:
    rows, rest = one_bit.encode_columns(_matrix(as_float32(x).reshape(x.shape)))
    return records.Encoded(rows, rest.reshape(x.shape))

  def encode_rows(self, tiles: Array, context: records.Context) -> Array:
    return one_bit.encode_columns(tiles.reshape(len(tiles), -1).T)[0]

  def decode_rows(self, rows: Array) -> Array:
    return one_bit.decode_columns(rows, self.rows)
