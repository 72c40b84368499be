"""Conversion of leaves to the tiles that codecs encode, and back."""

import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.protocol import Codec, LeafCodec
from gradcomp._src.codecs.sums.records import Context, Payload
from gradcomp._src.kernels.common.threefry import key_words
from gradcomp._src.kernels.materialize import LARGE, materialized

ArrayT = TypeVar("ArrayT", jax.Array, np.ndarray)


def as_float32(x: jax.Array) -> jax.Array:
  """Flattens a real float array to ``float32``; raises TypeError for others."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"`x` must have a real float dtype, got {x.dtype}.")
  return x.astype(jnp.float32).reshape(-1)


def as_matrix(x: ArrayT) -> ArrayT:
  """Reshapes an array to a matrix: its first axis by all others.

  A scalar becomes 1 by 1.

  Example:
    >>> as_matrix(jnp.zeros((3, 3, 64))).shape, as_matrix(jnp.zeros(())).shape
    ((3, 192), (1, 1))
  """
  rows = x.shape[0] if x.ndim else 1
  return x.reshape(rows, x.size // rows if rows else 0)


def to_tiles(x: jax.Array, codec: Codec) -> jax.Array:
  """Cuts a leaf into tiles, ``float32[rows, tile_size]``, filled with zeros.

  A codec may first fill the last bucket, and then rotate the tiles. The tiles of a
  codec that is ``by_column`` are columns: a leaf's first dimension is the row.

  Example:
    >>> to_tiles(jnp.ones(300), gradcomp.codecs.Dense()).shape
    (3, 128)
  """
  if not codec.by_column:
    x = codec.filled(x.reshape(-1))
  return codec.rotated(split_rows(x, codec))


def split_rows(x: ArrayT, codec: Codec) -> ArrayT:
  """Cuts a leaf into rows of the elements themselves, ``[rows, tile_size]``.

  They lie where :func:`to_tiles` puts them, and zeros fill the last row. NumPy arrays
  stay NumPy arrays.

  Example:
    >>> split_rows(jnp.ones(300), gradcomp.codecs.OneBit()).sum()
    Array(300., dtype=float32)
  """
  if codec.by_column:
    return as_matrix(x).T
  flat = x.reshape(-1)
  pad: Any = np.pad if isinstance(flat, np.ndarray) else jnp.pad
  padded = pad(flat, (0, -flat.size % codec.tile_size))
  return padded.reshape(-1, codec.tile_size)


def tile_shape(codec: Codec) -> tuple[int, ...]:
  """Returns the shape to which a codec decodes a row.

  Arithmetic on decoded rows should keep it. XLA for CPU turns a loop over another shape
  into one that finds the place of each element by division, and takes three times as
  long.

  Example:
    >>> tile_shape(gradcomp.codecs.QSGD(bits=4, bucket_size=512))
    (8, 512)
  """
  kept: Any = codec  # hashable, which protocols do not say
  return _tile_shape(kept)


@functools.cache  # an equal codec has the same rows, and tracing them takes long
def _tile_shape(codec: Codec) -> tuple[int, ...]:
  row = jax.ShapeDtypeStruct((1, codec.row_words), jnp.uint32)
  return jax.eval_shape(codec.sums.unpacked, row).shape[1:]


def view_shape(
  rows: int, like: jax.Array | jax.ShapeDtypeStruct, codec: Codec
) -> tuple[int, ...]:
  """Returns the shape in which a CPU goes through a leaf fastest.

  It has the leaf's elements in their order. If the leaf fills its rows, it is the shape
  of their tiles, see :func:`tile_shape`, and else its own.

  Example:
    >>> codec = gradcomp.codecs.QSGD(bits=4, bucket_size=512)
    >>> view_shape(2, jnp.zeros((128, 64)), codec)
    (2, 8, 512)
  """
  shape = (rows, *tile_shape(codec))
  if codec.by_column or math.prod(shape) != like.size:
    return like.shape
  return shape


def from_tiles(
  tiles: jax.Array, like: jax.Array | jax.ShapeDtypeStruct, codec: Codec
) -> jax.Array:
  """Undoes :func:`to_tiles`: ``float32[rows, P, B]`` to the shape of ``like``.

  The filling of the tiles is dropped.

  Example:
    >>> from_tiles(jnp.ones((3, 1, 128)), jnp.zeros(300), gradcomp.codecs.Dense()).shape
    (300,)
  """
  return join_rows(elements(tiles, codec), like, codec)


def elements(tiles: jax.Array, codec: Codec) -> jax.Array:
  """Returns the elements that decoded tiles stand for, in the shape of the tiles.

  Example:
    >>> elements(jnp.ones((1, 4)), gradcomp.codecs.Dense())
    Array([[1., 1., 1., 1.]], dtype=float32)
  """
  return codec.unrotated(tiles).reshape(tiles.shape)


def join_rows(
  rows: ArrayT, like: jax.Array | jax.ShapeDtypeStruct, codec: Codec
) -> ArrayT:
  """Undoes :func:`split_rows`: rows of elements to the shape of ``like``.

  Example:
    >>> join_rows(jnp.ones((3, 128)), jnp.zeros(300), gradcomp.codecs.Dense()).shape
    (300,)
  """
  if codec.by_column:
    return rows.T.reshape(like.shape)
  return rows.reshape(-1)[: like.size].reshape(like.shape)


def decode_payload(
  payload: Payload, like: jax.Array | jax.ShapeDtypeStruct, codec: Codec
) -> jax.Array:
  """Decodes a payload to the shape and dtype of ``like``, materialized on a CPU."""
  rows = payload.rows
  tiles = lambda rows: codec.payload_tiles(payload._replace(rows=rows))
  # XLA for CPU is several times as fast in the shape of tiles, if words are unpacked to
  # several planes: see tile_shape.
  large = (
    like.size >= LARGE
    and not _is_cut(rows)
    and view_shape(len(rows), like, codec) != like.shape
    and tile_shape(codec)[0] > 1
  )
  decoded = materialized(tiles, rows) if large else tiles(rows)
  return from_tiles(decoded, like, codec).astype(like.dtype)


def unsent(x: jax.Array, payload: Payload, codec: Codec) -> jax.Array:
  """Returns the residual of a ``float32`` leaf: the leaf less its decoded payload.

  The decoded leaf is not materialized.

  Example:
    >>> codec = gradcomp.codecs.QSGD(bits=4, share_scale=True, rounding="nearest")
    >>> x = jnp.array([7.0, -3.25])
    >>> unsent(x, codec.encode(x), codec)
    Array([ 0.  , -0.25], dtype=float32)
  """
  return x - from_tiles(codec.payload_tiles(payload), x, codec)


def _is_cut(x: jax.Array) -> bool:
  """Returns True if an array is sharded, by its type."""
  return any(axis is not None for axis in jax.typeof(x).sharding.spec)


def codec_key(key: jax.Array | None, codec: LeafCodec) -> jax.Array | None:
  """Returns the ``uint32[2]`` that a codec's rounding needs; None if it needs none.

  Raises ValueError if the codec needs a key, and there is none.
  """
  if not codec.needs_key:
    return None
  if key is None:
    cure = ', or choose rounding="nearest"' if hasattr(codec, "rounding") else ""
    raise ValueError(
      f"`key` must be given to {codec}.encode, which draws random numbers; pass "
      f"jax.random.key(seed){cure}."
    )
  return key_words(key)


def codec_dither(codec: LeafCodec, context: Context) -> jax.Array | None:
  """Returns the ``uint32[3]`` that a codec rounds with; None if it needs none."""
  return context.drawn if codec.needs_key else None
