"""``LeafCodec``, the protocol of codecs that users give, and ``Codec``, their base."""

import abc
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, Protocol, Self, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from gradcomp._src import checks
from gradcomp._src.codecs.sums.records import (
  ArrayLike,
  ArrayT,
  Context,
  Encoded,
  Fit,
  Leaf,
  Memory,
  Payload,
)
from gradcomp._src.codecs.sums.sum import Sum, SumFacts
from gradcomp._src.codecs.sums.tiles import Ranged, Tiles, sum_in_order
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.kernels.common.dithers import key_words
from gradcomp._src.kernels.common.planes import joined
from gradcomp._src.kernels.materialize import LARGE, materialized


@runtime_checkable
class LeafCodec(Protocol):
  """A codec as users choose it, before ``bind`` fits it to a leaf."""

  @property
  def unbiased(self) -> bool:
    """True if ``E[decode(encode(x))] == x``."""
    return False

  @property
  def needs_key(self) -> bool:
    """True if ``encode`` needs a key."""
    return False

  @property
  def contraction(self) -> float:
    """c of ``E |x - decode(encode(x))|^2 <= (1 - c) |x|^2``."""
    return 2.0**-20  # of codecs that say nothing

  @property
  def facts(self) -> SumFacts:
    """The facts about sums of payloads that are known before the leaves are."""

  def check_leaves(self, leaves: Sequence[Leaf]) -> None:
    """Raises ValueError if the codec does not suit these leaves of a tree."""
    return None

  def rule(self, leaf: Leaf) -> str:
    """Returns the reason for a leaf's codec, in a few characters; "" for none."""
    return ""

  def bind(self, leaf: Leaf) -> "Codec":
    """Returns the codec for a leaf of this shape and path."""


class Codec(LeafCodec, checks.Checked, abc.ABC):
  r"""The base class of codecs; a codec of your own adds four members.

  The four are ``tile_size``, ``row_words``, ``encode_rows`` and ``decode_rows``. The
  class is a frozen dataclass, so that it is hashable, and not callable:
  ``optax.inject_hyperparams`` takes callables for schedules. By default it is biased,
  needs no key, shares no statistics and remembers nothing.

  These facts hold for every codec that states no others:

  - A payload has whole tiles; zeros fill the last one. Zero buckets decode to zeros.
  - A bucket that holds a NaN or an infinity decodes to NaN. Where one scale serves a
    whole leaf, the leaf does.
  - Stochastic rounding is unbiased up to its grid: probabilities are multiples of
    2**-16, rounded down.
  - A biased codec needs error feedback, which :func:`gradcomp.compress` adds by
    default.
  - A hyperparameter out of its bounds raises a ValueError.
  - ``implementation`` selects the encoder: ``"xla"``, ``"pallas"``,
    ``"pallas_interpret"``, or None for the fastest; see docs/inside/kernels.md.

  ``contraction`` bounds the loss. It is the number c in

  .. math:: E \lVert x - Q(x) \rVert^2 \le (1 - c) \lVert x \rVert^2

  The mean is over the dithers of the codec, and x has independent normal elements plus
  the residual of earlier steps. Then the energy of a residual stays below (1 - c) / c
  times the energy of a gradient. (The worst input decides nothing: 4 bits in buckets of
  512 lose 1.2 times its energy, and 0.04 times the energy of normal numbers.) Random
  rounding adds noise, which is sent in every step, so a codec that rounds at random
  states 0 where c is below 1/32. Error feedback refuses a codec with 0. The default is
  ``2**-20``: it loses less than everything.

  Example:
    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class UpperHalf(gradcomp.codecs.Codec):
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

  def init(self, leaf: Leaf, key: Array) -> Memory:
    """Returns a leaf's first codec state; workers share its ``key``, ``uint32[2]``."""
    return Memory()

  @property
  def fallback(self) -> "Codec | None":
    """The exact, stateless codec of equal tiles that repeats NaN steps; or None."""
    return None

  @property
  def largest(self) -> float | None:
    """The largest number of a row without a scale; None for float32's range."""
    return None

  @property
  def of_whole(self) -> bool:
    """True if a leaf has one scale, in place of one for each bucket."""
    return getattr(self, "bucket_size", 1) is None

  @property
  def sums(self) -> Sum:
    """The sum of payloads, by default of decoded tiles in float32."""
    return Tiles(self) if self.largest is None else Ranged(self, self.largest)

  @property
  def facts(self) -> SumFacts:
    return self.sums.facts

  def bind(self, leaf: Leaf) -> "Codec":
    """Returns the codec of a leaf, by default itself."""
    return self

  def operand(self, payload: Payload, *, like: ArrayLike) -> tuple[Array, Array, Array]:
    """Returns elements, scales and a factor, for the matrix units that take them."""
    raise TypeError(
      f"The codec must have numbers for matrix units, got {self}; use "
      "gradcomp.codecs.BlockFloat, or decode the payload instead."
    )

  def to_nearest(self) -> Self:
    """Returns the codec that rounds to nearest, with rows of the same format."""
    return self

  @property
  def without_key(self) -> str:
    """The cure of errors about a missing key; "" if the codec needs one anyway."""
    return "" if self.to_nearest().needs_key else ', or choose rounding="nearest"'

  def agree(self, x: Array) -> Array | None:
    """Returns a leaf's statistics, to be maximized over all workers; or None."""
    return None

  def statistics(self, x: Array) -> tuple[Array | None, Any]:
    """Returns a leaf's statistics, and the rest of its ``context.measured``."""
    return self.agree(x), None

  def parts(self, like: jax.ShapeDtypeStruct) -> "list[Part]":
    """Returns an array for each average, in place of a leaf: by default the leaf."""
    return [(like, self, None)]

  @property
  def fits(self) -> Fit | None:
    """The fits of the codec state to the counts of all workers; None without any."""
    return None

  def used_entries(self, memory: Memory) -> Array | None:
    """Returns the number of entries of each row, if the codec state counts them."""
    return None

  def split(self, x: ArrayT) -> ArrayT:
    """Cuts a leaf into rows, ``[rows, tile_size]``; zeros fill the last one."""
    flat = x.reshape(-1)
    pad: Any = np.pad if isinstance(flat, np.ndarray) else jnp.pad
    if missing := -flat.size % self.tile_size:
      flat = pad(flat, (0, missing))
    return flat.reshape(-1, self.tile_size)

  def join(self, rows: ArrayT, like: ArrayLike) -> ArrayT:
    """Undoes :meth:`split`: rows of elements to the shape of ``like``."""
    whole = rows if rows.size == like.size else rows.reshape(-1)[: like.size]
    return whole.reshape(like.shape)

  def view_shape(self, rows: int, like: ArrayLike) -> tuple[int, ...]:
    """Returns the shape in which a CPU traverses a leaf: of tiles, if it fills them."""
    shape = (rows, *tile_shape(self))
    return shape if math.prod(shape) == like.size else like.shape

  def filled(self, x: Array) -> Array:
    """Fills the last bucket of a leaf, where the zeros of padding would count."""
    return x

  def rotated(self, tiles: Array) -> Array:
    """Rotates tiles, ``float32[rows, tile_size]``, before encoding; it is linear."""
    return tiles

  def unrotated(self, tiles: Array) -> Array:
    """Undoes :meth:`rotated` for tiles, or sums of tiles, of one or two axes each."""
    return tiles

  def sum_rows(self, rows: Array) -> Array:
    """Decodes ``uint32[K, rows, words]``, and adds K payloads in their order."""
    return sum_in_order(self.decode_rows, rows)

  @property
  @abc.abstractmethod
  def tile_size(self) -> int:
    """The number of elements in a row."""

  @property
  @abc.abstractmethod
  def row_words(self) -> int:
    """The number of words in a row, scales included."""

  @abc.abstractmethod
  def encode_rows(self, tiles: Array, context: Context) -> Array:
    """Encodes ``float32[rows, ...]`` to ``uint32[rows, row_words]``.

    Args:
      tiles: ``tile_size`` elements a row, in one axis or several.
      context: for random numbers ``key``, the worker's ``uint32[2]``, or ``dither``,
        ``uint32[3]``: the key that all workers share, and the worker's mask, by which
        errors cancel. ``drawn`` is a dither in both cases. ``agreed`` has a leaf's
        statistics.
    """

  @abc.abstractmethod
  def decode_rows(self, rows: Array) -> Array:
    """Decodes ``uint32[rows, row_words]`` to ``float32[rows, ...]``.

    Each row decodes alone, to ``tile_size`` elements in one axis or several. An element
    that was not finite comes back as NaN or an infinity. Every ``uint32`` has a
    decoding.
    """

  def encode_leaf(self, x: Array, context: Context, *, keep: bool = False) -> Encoded:
    """Encodes a ``float32`` leaf of any shape; ``keep`` asks for its residual."""
    return Encoded(self.encode_rows(to_tiles(as_float32(x), self), context))

  def joins(self, shape: tuple[int, ...]) -> tuple[Hashable, int] | None:
    """Returns the key of leaves for one program, and their largest number; or None."""
    return None

  def encode_several(
    self, leaves: Sequence[Array], contexts: Sequence[Context], after: Array | None
  ) -> list[Encoded] | None:
    """Encodes leaves that :meth:`joins` puts together; None to map :meth:`encode_leaf`.

    A program that copies its leaves reads them only after ``after``, rows of other
    leaves.
    """
    return None

  def encode(self, x: Array, *, key: Array | None = None) -> Payload:
    """Encodes an array of any shape and float dtype, as a single worker does.

    Args:
      x: the array.
      key: one threefry key, for codecs that draw random numbers.

    Returns:
      A payload of rows, with the statistics that workers agree on, if any.

    Raises:
      ValueError: ``key`` is missing, and the codec needs one.
      TypeError: ``x`` has no real float dtype.
    """
    codec = self.bind(Leaf(x.shape))
    if codec.needs_key and key is None:
      raise ValueError(
        f"`key` must be given to {codec}.encode, which draws random numbers; pass "
        f"jax.random.key(seed){codec.without_key}."
      )
    context = Context(key_words(key) if key is not None and codec.needs_key else None)
    return payload_of(codec, as_float32(x).reshape(x.shape), context)

  def decode(self, payload: Payload, *, like: Array) -> Array:
    """Decodes a payload to an array with the shape and dtype of ``like``."""
    codec, rows = self.bind(Leaf(like.shape)), payload.rows
    tiles = lambda rows: decoded(codec, payload._replace(rows=rows))
    # XLA for CPU is several times as fast in the shape of tiles, if words are unpacked
    # to several planes: see tile_shape.
    large = (
      like.size >= LARGE
      and not any(axis is not None for axis in jax.typeof(rows).sharding.spec)
      and codec.view_shape(len(rows), like) != like.shape
      and tile_shape(codec)[0] > 1
    )
    found = materialized(tiles, rows) if large else tiles(rows)
    return fitted(from_tiles(found, like, codec), like.dtype)

  def roundtrip(self, x: Array, *, key: Array | None = None) -> Array:
    """Returns the array that arrives: ``decode(encode(x, key=key), like=x)``."""
    return self.decode(self.encode(x, key=key), like=x)


# An array that all workers average, its codec, and the number of elements of the leaf's
# mean that it completes; None for the leaf itself.
Part = tuple[jax.ShapeDtypeStruct, Codec, int | None]


def as_float32(x: Array) -> Array:
  """Flattens a real float array to ``float32``; raises TypeError for others."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"`x` must have a real float dtype, got {x.dtype}.")
  return x.astype(jnp.float32).reshape(-1)


def to_tiles(x: Array, codec: Codec) -> Array:
  """Cuts a leaf into tiles, filled and rotated: ``float32[rows, tile_size]``."""
  return codec.rotated(codec.split(codec.filled(x)))


@functools.cache  # an equal codec has the same rows, and tracing them takes long
def tile_shape(codec: Codec) -> tuple[int, ...]:
  """Returns the shape to which a codec decodes a row."""
  # Arithmetic on decoded rows should keep it. XLA for CPU turns a loop over another
  # shape into one that divides to find each element, and takes three times as long.
  row = jax.ShapeDtypeStruct((1, codec.row_words), jnp.uint32)
  return jax.eval_shape(codec.sums.unpacked, row).shape[1:]


def from_tiles(tiles: Array, like: ArrayLike, codec: Codec) -> Array:
  """Undoes :func:`to_tiles`: ``float32[rows, P, B]`` to the shape of ``like``."""
  return codec.join(codec.unrotated(joined(tiles)), like)


def payload_of(codec: Codec, x: Array, context: Context) -> Payload:
  """Encodes a leaf by its bound codec, with statistics of its own."""
  agreed = codec.agree(x) if context.agreed is None else context.agreed
  encoded = codec.encode_leaf(x, context._replace(agreed=agreed), keep=False)
  return Payload(encoded.rows, agreed)


def decoded(codec: Codec, payload: Payload) -> Array:
  """Decodes a payload to tiles, as a sum of one."""
  rows, agreed = payload
  if agreed is not None:  # a sum has a line for each row
    agreed = jnp.broadcast_to(agreed, (len(rows), *agreed.shape[1:]))
  return codec.sums.gathered(rows[None], agreed, 1.0)(0, len(rows))


def working_dtype(facts: SumFacts, dtype: DTypeLike) -> np.dtype:
  """Returns the dtype in which an exchange adds gradients of ``dtype``."""
  wide = facts.keeps_float64 and dtype == jnp.float64
  return np.dtype(np.float64 if wide else np.float32)


def require_contraction(name: str, codec: LeafCodec, without: str) -> None:
  """Raises ValueError for a codec that loses as much as error feedback gives it."""
  if codec.contraction <= 0:
    raise ValueError(
      f"`{name}` must have a contraction above 0 with error feedback, or its residual "
      f"grows, got {codec}, which may lose the whole input; take smaller buckets, "
      'rounding="nearest" or more bits, where the codec has them, or keep no residual: '
      f"{without}."
    )


def is_codec(value: Any) -> TypeGuard[LeafCodec]:
  """Returns True for an instance of a codec, and False for a codec's class."""
  return not isinstance(value, type) and isinstance(value, LeafCodec)
