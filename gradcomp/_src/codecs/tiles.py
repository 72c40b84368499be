"""Conversion of leaves to the tiles that codecs encode, and back."""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from gradcomp._src.codecs.sums.records import ArrayLike, ArrayT, Context, Payload
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.kernels.common.planes import joined
from gradcomp._src.kernels.common.threefry import key_words
from gradcomp._src.kernels.materialize import LARGE, materialized

if TYPE_CHECKING:
  from gradcomp._src.codecs.protocol import Codec, LeafCodec


def as_float32(x: Array) -> Array:
  """Flattens a real float array to ``float32``; raises TypeError for others."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"`x` must have a real float dtype, got {x.dtype}.")
  return x.astype(jnp.float32).reshape(-1)


def as_matrix(x: ArrayT) -> ArrayT:
  """Reshapes an array to a matrix: its first axis by all others; a scalar is 1 by 1."""
  rows = x.shape[0] if x.ndim else 1
  return x.reshape(rows, x.size // rows if rows else 0)


def to_tiles(x: Array, codec: "Codec") -> Array:
  """Cuts a leaf into tiles, filled and rotated: ``float32[rows, tile_size]``."""
  return codec.rotated(codec.split(codec.filled(x)))


@functools.cache  # an equal codec has the same rows, and tracing them takes long
def tile_shape(codec: "Codec") -> tuple[int, ...]:
  """Returns the shape to which a codec decodes a row."""
  # Arithmetic on decoded rows should keep it. XLA for CPU turns a loop over another
  # shape into one that divides to find each element, and takes three times as long.
  row = jax.ShapeDtypeStruct((1, codec.row_words), jnp.uint32)
  return jax.eval_shape(codec.sums.unpacked, row).shape[1:]


def from_tiles(tiles: Array, like: ArrayLike, codec: "Codec") -> Array:
  """Undoes :func:`to_tiles`: ``float32[rows, P, B]`` to the shape of ``like``."""
  return codec.join(codec.unrotated(joined(tiles)), like)


def elements(tiles: Array, codec: "Codec") -> Array:
  """Returns the elements that decoded tiles stand for, in the shape of the tiles."""
  return codec.unrotated(tiles).reshape(tiles.shape)


def payload_of(codec: "Codec", x: Array, context: Context) -> Payload:
  """Encodes a leaf by its bound codec, with statistics of its own."""
  agreed = codec.agree(x) if context.agreed is None else context.agreed
  encoded = codec.encode_leaf(x, context._replace(agreed=agreed), keep=False)
  return Payload(encoded.rows, agreed)


def decode_payload(payload: Payload, like: ArrayLike, codec: "Codec") -> Array:
  """Decodes a payload to the shape and dtype of ``like``, materialized on a CPU."""
  rows = payload.rows
  tiles = lambda rows: codec.payload_tiles(payload._replace(rows=rows))
  # XLA for CPU is several times as fast in the shape of tiles, if words are unpacked to
  # several planes: see tile_shape.
  large = (
    like.size >= LARGE
    and not any(axis is not None for axis in jax.typeof(rows).sharding.spec)
    and codec.view_shape(len(rows), like) != like.shape
    and tile_shape(codec)[0] > 1
  )
  decoded = materialized(tiles, rows) if large else tiles(rows)
  return fitted(from_tiles(decoded, like, codec), like.dtype)


def codec_key(key: Array | None, codec: "Codec") -> Array | None:
  """Returns the ``uint32[2]`` that a codec needs, or None; ValueError without a key."""
  if not codec.needs_key:
    return None
  if key is None:
    raise ValueError(
      f"`key` must be given to {codec}.encode, which draws random numbers; pass "
      f"jax.random.key(seed){codec.without_key}."
    )
  return key_words(key)


def codec_dither(codec: "Codec", context: Context) -> Array | None:
  """Returns the ``uint32[3]`` that a codec rounds with; None if it needs none."""
  return context.drawn if codec.needs_key else None


def working_dtype(codec: "LeafCodec", dtype: DTypeLike) -> np.dtype:
  """Returns the dtype in which an exchange adds gradients of ``dtype``."""
  wide = dtype == jnp.float64 and codec.facts.keeps_float64
  return np.dtype(np.float64 if wide else np.float32)
