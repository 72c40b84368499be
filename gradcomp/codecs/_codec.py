"""What every codec is: the facts and the five functions that the exchange relies on."""

from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp

from gradcomp.kernels import key_words


class Payload(NamedTuple):
  """The arrays that cross the wire for one leaf; their bytes are all that is sent."""

  rows: jax.Array  # uint32[tiles, words and scales of a tile]
  stats: jax.Array | None = None  # float32, of a codec that shares them; else None


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
    """The payload of an array of any shape and float dtype."""

  def decode(self, payload: Payload, *, like: jax.Array) -> jax.Array:
    """The array of a payload, with the shape and dtype of ``like``."""

  def encode_rows(self, tiles: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
    """Rows of ``float32[rows, ...]`` tiles: ``uint32[rows, row_words]``."""

  def decode_rows(self, rows: jax.Array) -> jax.Array:
    """Tiles of rows: ``uint32[..., rows, words]`` to ``float32[..., rows, P, B]``."""


@runtime_checkable
class SharedCodec(Codec, Protocol):
  """A codec with ``shares_stats``: all workers encode with the same statistics.

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


def is_shared(codec: Codec) -> TypeGuard[SharedCodec]:
  """Whether a codec is a :class:`SharedCodec`, which its hyperparameters decide."""
  return codec.shares_stats


def as_float32(x: jax.Array) -> jax.Array:
  """A flat ``float32`` view of a float array; TypeError for anything else."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"`x` must have a real float dtype, got {x.dtype}.")
  return x.astype(jnp.float32).reshape(-1)


def from_tiles(tiles: jax.Array, like: jax.Array) -> jax.Array:
  """Cuts the padding off ``float32[rows, P, B]`` tiles and restores shape and dtype."""
  return tiles.reshape(-1)[: like.size].reshape(like.shape).astype(like.dtype)


def codec_key(key: jax.Array | None, codec: Codec) -> jax.Array | None:
  """The ``uint32[2]`` that a codec's rounding needs; None for one that needs none."""
  if not codec.needs_key:
    return None
  if key is None:
    raise ValueError(
      f"`key` must be given to {codec}.encode, whose rounding is stochastic; pass "
      'jax.random.key(seed), or choose rounding="nearest".'
    )
  return key_words(key)
