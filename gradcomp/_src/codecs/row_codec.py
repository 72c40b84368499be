"""``RowCodec``, the base of codecs of your own, and rounding to nearest."""

import abc
import dataclasses
from typing import ClassVar, Protocol, Self, runtime_checkable

import jax

from gradcomp._src.codecs.protocol import (
  NOTHING,
  Codec,
  Context,
  Payload,
  Rounding,
  SameForAll,
)
from gradcomp._src.codecs.tiles import as_float32, codec_key, decode_payload, to_tiles


@runtime_checkable
class RoundingCodec(Codec, Protocol):
  """A codec that rounds at random, and has a form that rounds to nearest."""

  def to_nearest(self) -> Codec:
    """Returns the codec that rounds to nearest, with rows of the same format.

    It encodes sums with an owner residual: it loses less, and needs no random bits.
    """


class RoundsAtRandom:
  """A base of codecs that are unbiased unless they round to nearest."""

  rounding: Rounding

  @property
  def unbiased(self) -> bool:
    return self.rounding == "stochastic"

  @property
  def needs_key(self) -> bool:
    return self.rounding == "stochastic"

  def to_nearest(self) -> Self:
    """Returns the codec that rounds to nearest."""
    return dataclasses.replace(self, rounding="nearest")  # type: ignore[type-var]


def to_nearest(codec: Codec) -> Codec:
  """Returns the form of a codec that rounds to nearest, or the codec if it has none.

  Example:
    >>> to_nearest(gradcomp.codecs.QSGD(bits=4)).rounding
    'nearest'
    >>> to_nearest(gradcomp.codecs.OneBit()) == gradcomp.codecs.OneBit()
    True
  """
  return codec.to_nearest() if isinstance(codec, RoundingCodec) else codec


class RowCodec(SameForAll, abc.ABC):
  """A base class for codecs of one's own, which then need four members.

  These are ``tile_size``, ``row_words``, ``encode_rows`` and ``decode_rows``. A codec
  that is unbiased, or that needs a key, says so as well. Workers share no statistics,
  and nothing is remembered from step to step. A class that derives from this one is a
  frozen dataclass, so that it is hashable.

  Example:
    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class UpperHalf(gradcomp.codecs.RowCodec):
    ...   tile_size, row_words = 64, 32
    ...   def encode_rows(self, tiles, *, key=None, context=None):
    ...     words = jax.lax.bitcast_convert_type(tiles, jnp.uint32).reshape(-1, 2, 32)
    ...     return words[:, 0] >> 16 | words[:, 1] >> 16 << 16
    ...   def decode_rows(self, rows):
    ...     words = jnp.stack([rows << 16, rows >> 16 << 16], axis=-2)
    ...     return jax.lax.bitcast_convert_type(words, jnp.float32)
    >>> x = jnp.array([1.0, -2.5, 3.0])
    >>> UpperHalf().decode(UpperHalf().encode(x), like=x)
    Array([ 1. , -2.5,  3. ], dtype=float32)
  """

  agrees: ClassVar[bool] = False
  summable: ClassVar[bool] = False
  by_column: ClassVar[bool] = False
  fitted: ClassVar[bool] = False
  adds: ClassVar[bool] = False

  @property
  def unbiased(self) -> bool:
    return False

  @property
  def needs_key(self) -> bool:
    return False

  @property
  @abc.abstractmethod
  def tile_size(self) -> int:
    """The number of elements in a row."""

  @property
  @abc.abstractmethod
  def row_words(self) -> int:
    """The number of words in a row, scales included."""

  @abc.abstractmethod
  def encode_rows(
    self,
    tiles: jax.Array,
    *,
    key: jax.Array | None = None,
    context: Context = NOTHING,
  ) -> jax.Array:
    """Encodes ``float32[rows, ...]`` to ``uint32[rows, row_words]``.

    Args:
      tiles: ``tile_size`` elements in each row, in one axis or several. The last tile
        of a leaf is filled with zeros.
      key: ``uint32[2]`` if the codec needs one, another one for each worker.
      context: holds ``dither``, ``uint32[3]`` or None, if the codec needs a key. That
        is a key which all workers share, and the worker's mask: with random numbers
        from it, the errors of the workers cancel. See docs/inside/extending.md.
    """

  @abc.abstractmethod
  def decode_rows(self, rows: jax.Array) -> jax.Array:
    """Decodes ``uint32[rows, row_words]`` to ``float32[rows, ...]``.

    A row becomes its ``tile_size`` elements, in one axis or several, and each row is
    decoded by itself. Zeros come back as zeros. Of an element that was not finite, NaN
    or an infinity comes back, and its whole bucket may become NaN. Any ``uint32`` may
    come, and decodes to something.
    """

  def encode(
    self,
    x: jax.Array,
    *,
    key: jax.Array | None = None,
    context: Context = NOTHING,
  ) -> Payload:
    """Encodes an array of any shape and float dtype.

    Raises:
      ValueError: ``key`` is missing, and the codec needs one.
      TypeError: ``x`` is not real floating point.
    """
    tiles = to_tiles(as_float32(x), self)
    words = codec_key(key, self)
    return Payload(self.encode_rows(tiles, key=words, context=context))

  def decode(self, payload: Payload, *, like: jax.Array) -> jax.Array:
    """Decodes a payload to an array with the shape and dtype of ``like``."""
    return decode_payload(payload, like, self)
