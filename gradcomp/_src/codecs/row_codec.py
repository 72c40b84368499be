"""``RowCodec``, the base of all codecs of rows, and rounding at random."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax

from gradcomp._src.codecs.protocol import Codec, Round, Talk
from gradcomp._src.codecs.rounds import decoded_alone, encoded_alone
from gradcomp._src.codecs.sums.records import (
  Context,
  Encoded,
  Leaf,
  Memory,
  Payload,
  Rounding,
)
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.codecs.sums.tiles import Ranged, Tiles, sum_in_order
from gradcomp._src.codecs.tiles import as_float32, codec_key, to_tiles


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


class RowCodec(abc.ABC):
  """The base class of codecs, which then need four members.

  These are ``tile_size``, ``row_words``, ``encode_rows`` and ``decode_rows``. A codec
  that is unbiased, or that needs a key, says so as well. Workers share no statistics,
  and nothing is remembered from step to step. A class that derives from this one is a
  frozen dataclass, so that it is hashable.

  Example:
    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class UpperHalf(gradcomp.codecs.RowCodec):
    ...   tile_size, row_words = 64, 32
    ...   def encode_rows(self, tiles, context):
    ...     words = jax.lax.bitcast_convert_type(tiles, jnp.uint32).reshape(-1, 2, 32)
    ...     return words[:, 0] >> 16 | words[:, 1] >> 16 << 16
    ...   def decode_rows(self, rows):
    ...     words = jnp.stack([rows << 16, rows >> 16 << 16], axis=-2)
    ...     return jax.lax.bitcast_convert_type(words, jnp.float32)
    >>> x = jnp.array([1.0, -2.5, 3.0])
    >>> UpperHalf().roundtrip(x)
    Array([ 1. , -2.5,  3. ], dtype=float32)
  """

  @property
  def unbiased(self) -> bool:
    return False

  @property
  def needs_key(self) -> bool:
    return False

  def check_leaves(self, leaves: Sequence[Leaf]) -> None:
    """Accepts any leaves."""
    del leaves

  def rule(self, leaf: Leaf) -> str:
    """Returns the reason for a leaf's codec: none."""
    del leaf
    return ""

  def init(self, leaf: Leaf, key: jax.Array) -> Memory:
    """Returns the codec state of a leaf before the first step: none."""
    del leaf, key
    return Memory()

  @property
  def by_column(self) -> bool:
    return False

  @property
  def fitted(self) -> bool:
    return False

  @property
  def largest(self) -> float | None:
    """The largest number that a row without a scale holds; None for float32's range."""
    return None

  @property
  def sums(self) -> Sum:
    """How payloads are added: as decoded tiles, in float32."""
    return Tiles(self) if self.largest is None else Ranged(self, self.largest)

  def bind(self, leaf: Leaf) -> Codec:
    """Returns the codec of a leaf: itself, for it depends on no leaf."""
    del leaf
    return self

  def rounds(self, shape: tuple[int, ...]) -> tuple[Round, ...]:
    """Returns the only round of a leaf, in which workers average the leaf itself."""
    return (Round(shape, self, of_leaf=True),)

  def in_rounds(self, leaves: Sequence[jax.Array], memory: Sequence[Any]) -> Talk:
    """Computes the means of leaves: those of their only round."""
    means = yield list(leaves)
    return means, list(memory)

  def to_nearest(self) -> Self:
    """Returns the codec that rounds to nearest, with rows of the same format.

    It encodes sums with an owner residual: it loses less, and needs no random bits. A
    codec that never rounds at random is its own.
    """
    return self

  def agree(self, x: jax.Array) -> jax.Array | None:
    """Returns a leaf's statistics, of which all workers take the largest; or None."""
    del x
    return None

  def filled(self, flat: jax.Array) -> jax.Array:
    """Fills the last bucket of a flat leaf, where the zeros of padding would count."""
    return flat

  def rotated(self, tiles: jax.Array) -> jax.Array:
    """Rotates the tiles of a leaf, ``float32[rows, tile_size]``, before encoding.

    Rotated tiles add up as leaves do.
    """
    return tiles

  def unrotated(self, tiles: jax.Array) -> jax.Array:
    """Undoes :meth:`rotated` for tiles, or sums of tiles, of one or two axes each."""
    return tiles

  def sum_rows(self, rows: jax.Array) -> jax.Array:
    """Decodes ``uint32[K, rows, words]``, and adds K payloads in their order."""
    return sum_in_order(self.decode_rows, rows)

  def payload_tiles(self, payload: Payload) -> jax.Array:
    """Decodes a payload to tiles, by the statistics in it if workers share them."""
    return self.decode_rows(payload.rows)

  @property
  @abc.abstractmethod
  def tile_size(self) -> int:
    """The number of elements in a row."""

  @property
  @abc.abstractmethod
  def row_words(self) -> int:
    """The number of words in a row, scales included."""

  @abc.abstractmethod
  def encode_rows(self, tiles: jax.Array, context: Context) -> jax.Array:
    """Encodes ``float32[rows, ...]`` to ``uint32[rows, row_words]``.

    Args:
      tiles: ``tile_size`` elements in each row, in one axis or several. The last tile
        of a leaf is filled with zeros.
      context: if the codec needs a key, it has ``key``, ``uint32[2]``, another one for
        each worker, or ``dither``, ``uint32[3]``: a key which all workers share, and
        the worker's mask. With random numbers from it, the errors of the workers
        cancel. ``drawn`` is a dither in both cases. See docs/inside/extending.md.
    """

  @abc.abstractmethod
  def decode_rows(self, rows: jax.Array) -> jax.Array:
    """Decodes ``uint32[rows, row_words]`` to ``float32[rows, ...]``.

    A row becomes its ``tile_size`` elements, in one axis or several, and each row is
    decoded by itself. Zeros come back as zeros. Of an element that was not finite, NaN
    or an infinity comes back, and its whole bucket may become NaN. Any ``uint32`` may
    come, and decodes to something.
    """

  def encode_leaf(
    self, x: jax.Array, context: Context, *, keep: bool = False
  ) -> Encoded:
    """Encodes a ``float32`` leaf of any shape: by default its tiles.

    Args:
      x: the leaf.
      context: see :meth:`encode_rows`. ``agreed`` is what all workers agree on.
      keep: whether the residual is asked for. A codec may leave it to the caller, who
        subtracts what the rows decode to.
    """
    del keep
    return Encoded(self.encode_rows(to_tiles(as_float32(x), self), context))

  def encode(self, x: jax.Array, *, key: jax.Array | None = None) -> Payload:
    """Encodes an array of any shape and float dtype, as a single worker does.

    Args:
      x: the array.
      key: one threefry key, which a codec with random numbers needs.

    Returns:
      The payload: rows, and statistics beside them if workers agree on some.

    Raises:
      ValueError: ``key`` is missing, and the codec needs one.
      TypeError: ``x`` is not real floating point.
    """
    codec = self.bind(Leaf(x.shape))
    context = Context(codec_key(key, codec))
    return encoded_alone(codec, as_float32(x).reshape(x.shape), context)

  def decode(self, payload: Payload, *, like: jax.Array) -> jax.Array:
    """Decodes a payload to an array with the shape and dtype of ``like``."""
    return decoded_alone(self.bind(Leaf(like.shape)), payload, like)

  def roundtrip(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
    """Returns the array that arrives: ``decode(encode(x, key=key), like=x)``.

    The arguments and errors are those of :meth:`encode`.
    """
    return self.decode(self.encode(x, key=key), like=x)
