"""What every codec is: the facts and the functions that the exchange relies on."""

import math
from typing import Literal, NamedTuple, Protocol, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp

from gradcomp.kernels import key_words

Rounding = Literal["stochastic", "nearest"]
Accumulate = Literal["format", "kahan", "float32"]


class Payload(NamedTuple):
  """The arrays that cross the wire for one leaf; their bytes are all that is sent."""

  rows: jax.Array  # uint32[tiles, words and scales of a tile]
  stats: jax.Array | None = None  # of a codec that shares them; else None


@runtime_checkable
class Codec(Protocol):
  """A pair of pure functions between an array and a :class:`Payload`.

  Codecs are frozen dataclasses: hashable, printable, without state. They are not
  callable, because ``optax.inject_hyperparams`` takes callables for schedules.

  ``encode`` and ``decode`` are the public pair. The exchange works on rows: each row
  of a payload can be decoded alone, so that workers can own ranges of rows, and
  ``encode_rows`` encodes a mean that was made of decoded rows.
  """

  @property
  def unbiased(self) -> bool:
    """Whether ``E[decode(encode(x))] == x``."""

  @property
  def needs_key(self) -> bool:
    """Whether ``encode`` needs a key."""

  @property
  def shares_stats(self) -> bool:
    """Whether workers agree on statistics before encoding."""

  @property
  def summable(self) -> bool:
    """Whether codes of several workers can be added as integers."""

  @property
  def by_column(self) -> bool:
    """Whether a row is a column of a leaf's matrix: see :class:`ColumnCodec`."""

  @property
  def fitted(self) -> bool:
    """Whether the codec has a memory: see :class:`FittedCodec`."""

  @property
  def adds(self) -> bool:
    """Whether sums are numbers of the codec's format: see :class:`AddingCodec`."""

  @property
  def tile_size(self) -> int:
    """Elements in a row."""

  @property
  def row_words(self) -> int:
    """Words in a row, scales included."""

  def encode(
    self,
    x: jax.Array,
    *,
    key: jax.Array | None = None,
    stats: jax.Array | None = None,
  ) -> Payload:
    """The payload of an array of any shape and float dtype.

    Args:
      x: the array.
      key: of stochastic rounding.
      stats: what workers agree on: shared statistics, or a memory. By default they are
        those of ``x`` alone.
    """

  def decode(self, payload: Payload, *, like: jax.Array) -> jax.Array:
    """The array of a payload, with the shape and dtype of ``like``."""

  def encode_rows(
    self,
    tiles: jax.Array,
    *,
    key: jax.Array | None = None,
    stats: jax.Array | None = None,
  ) -> jax.Array:
    """Rows of ``float32[rows, ...]`` tiles: ``uint32[rows, row_words]``."""

  def decode_rows(self, rows: jax.Array) -> jax.Array:
    """Tiles of rows: ``uint32[..., rows, words]`` to ``float32[..., rows, P, B]``."""


@runtime_checkable
class SharedCodec(Codec, Protocol):
  """A ``summable`` codec with ``shares_stats``: all workers encode with the same.

  The exchange takes the largest of all workers' ``stats`` before anyone encodes. Rows
  then hold codes alone, and the codes of several workers add up as integers.
  """

  @property
  def max_code(self) -> int:
    """The largest magnitude of a code."""

  def stats(self, x: jax.Array) -> jax.Array:
    """``float32[rows, k]``, or ``[1, 1]`` for all rows: zero or more, or NaN."""

  def codes(self, rows: jax.Array) -> jax.Array:
    """Codes of rows: ``uint32[..., rows, words]`` to ``int32[..., rows, P, B]``."""

  def from_codes(self, codes: jax.Array, stats: jax.Array) -> jax.Array:
    """Values of codes, or of sums of them: ``float32[rows, P, B]``."""


@runtime_checkable
class ColumnCodec(Codec, Protocol):
  """A codec with ``by_column``: tiles are the columns of a leaf's matrix.

  The first dimension of a leaf is the row, all others are flattened to columns.
  """

  def with_rows(self, count: int) -> "ColumnCodec":
    """The codec of leaves whose first dimension is ``count``."""


@runtime_checkable
class FittedCodec(Codec, Protocol):
  """A codec that is fitted to the gradients of all workers every few steps.

  Its memory is one array, which the transformation's state carries, and which
  ``encode`` and ``encode_rows`` take as ``stats``. Rows can be decoded without it.
  """

  @property
  def refit_every(self) -> int:
    """Steps from one fit to the next."""

  @property
  def most_counted(self) -> int:
    """The largest sum of one leaf's counts."""

  def init(self) -> jax.Array:
    """The memory before the first fit."""

  def measure(self, x: jax.Array) -> jax.Array:
    """Counts of a leaf, ``int32[k]``, which are added over leaves and workers."""

  def fit(self, counts: jax.Array, memory: jax.Array) -> jax.Array:
    """The memory that fits the counts; the old one where nothing was counted."""


@runtime_checkable
class AddingCodec(Codec, Protocol):
  """A codec with ``adds``: sums of what it sends are numbers of its own format.

  Its rows stand for scaled numbers, which ``encode_rows`` takes and ``decode_rows``
  gives. The scale leaves room for the sum of all workers' numbers, and with
  ``shares_stats`` the workers agree on it: on the largest of their bytes.
  """

  @property
  def accumulate(self) -> Accumulate:
    """How numbers are added one by one."""

  def for_addends(self, count: int) -> "AddingCodec":
    """The codec that leaves room for so many."""

  def stats(self, x: jax.Array) -> jax.Array:
    """``uint8[1, 1]``."""

  def add(self, total: jax.Array, x: jax.Array) -> jax.Array:
    """The sum of two numbers of the format, rounded to it."""

  def add_compensated(
    self, total: jax.Array, compensation: jax.Array, x: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The next sum and compensation of Kahan's algorithm, all in the format."""

  def encode_sums(self, tiles: jax.Array) -> jax.Array:
    """Rows of scaled sums, rounded to nearest: exact for numbers of the format."""

  def unscaled(self, tiles: jax.Array, stats: jax.Array | None) -> jax.Array:
    """What scaled numbers stand for: ``float32[rows, P, B]``, stats a line a row."""


@runtime_checkable
class RemainderCodec(Codec, Protocol):
  """A codec that knows what it does not send, without decoding."""

  def encode_with_residual(
    self,
    x: jax.Array,
    *,
    key: jax.Array | None = None,
    stats: jax.Array | None = None,
  ) -> tuple[Payload, jax.Array]:
    """``encode(x)``, and ``x - decode(encode(x))``: float32 in the shape of ``x``."""


@runtime_checkable
class FilledCodec(Codec, Protocol):
  """A codec whose buckets have means, which zeros that fill the last would change."""

  def filled(self, flat: jax.Array) -> jax.Array:
    """A flat leaf with what fills its last bucket."""


def is_shared(codec: Codec) -> TypeGuard[SharedCodec]:
  """Whether a codec is a :class:`SharedCodec`, which its hyperparameters decide."""
  return codec.shares_stats and codec.summable


def is_adding(codec: Codec) -> TypeGuard[AddingCodec]:
  """Whether a codec is an :class:`AddingCodec`."""
  return codec.adds


def is_by_column(codec: Codec) -> TypeGuard[ColumnCodec]:
  """Whether a codec is a :class:`ColumnCodec`."""
  return codec.by_column


def is_fitted(codec: Codec) -> TypeGuard[FittedCodec]:
  """Whether a codec is a :class:`FittedCodec`, which its hyperparameters decide."""
  return codec.fitted


def as_float32(x: jax.Array) -> jax.Array:
  """A flat ``float32`` view of a float array; TypeError for anything else."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"`x` must have a real float dtype, got {x.dtype}.")
  return x.astype(jnp.float32).reshape(-1)


def as_matrix(x: jax.Array) -> jax.Array:
  """The first axis by all others; a scalar is 1 by 1.

  Example:
    >>> as_matrix(jnp.zeros((3, 3, 64))).shape, as_matrix(jnp.zeros(())).shape
    ((3, 192), (1, 1))
  """
  rows = x.shape[0] if x.ndim else 1
  return x.reshape(rows, x.size // rows if rows else 0)


def to_tiles(x: jax.Array, codec: Codec) -> jax.Array:
  """The elements of a leaf as ``float32[rows, tile_size]``, filled with zeros.

  Or with what a :class:`FilledCodec` puts there first.
  """
  if is_by_column(codec):
    return as_matrix(x).T
  flat = x.reshape(-1)
  if isinstance(codec, FilledCodec):
    flat = codec.filled(flat)
  padded = jnp.pad(flat, (0, -flat.size % codec.tile_size))
  return padded.reshape(-1, codec.tile_size)


def from_tiles(
  tiles: jax.Array, like: jax.Array | jax.ShapeDtypeStruct, codec: Codec
) -> jax.Array:
  """The inverse: ``float32[rows, P, B]`` to the shape of ``like``, filling cut off."""
  if is_by_column(codec):
    columns = tiles.reshape(tiles.shape[0], math.prod(tiles.shape[1:]))
    return columns.T.reshape(like.shape)
  return tiles.reshape(-1)[: like.size].reshape(like.shape)


def decode_payload(
  payload: Payload, like: jax.Array | jax.ShapeDtypeStruct, codec: Codec
) -> jax.Array:
  """The array of a payload, whose statistics are in it where workers share them."""
  if payload.stats is None:
    tiles = codec.decode_rows(payload.rows)
  else:
    assert is_shared(codec)
    tiles = codec.from_codes(codec.codes(payload.rows), payload.stats)
  return from_tiles(tiles, like, codec).astype(like.dtype)


def codec_key(key: jax.Array | None, codec: Codec) -> jax.Array | None:
  """The ``uint32[2]`` that a codec's rounding needs; None for one that needs none."""
  if not codec.needs_key:
    return None
  if key is None:
    cure = ', or choose rounding="nearest"' if hasattr(codec, "rounding") else ""
    raise ValueError(
      f"`key` must be given to {codec}.encode, which draws random numbers; pass "
      f"jax.random.key(seed){cure}."
    )
  return key_words(key)
