"""Lines of words: a line is the complete payload of one array.

Each array is encoded by itself, with its own scales. The statistics that workers would
agree on in an exchange of gradients are in the line, because arrays of different
workers have different sizes here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs import sums
from gradcomp._src.codecs.leaf import Context, Payload
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.tiles import from_tiles, payload_tiles
from gradcomp._src.exchange.collectives import join, split
from gradcomp._src.kernels.common.dithers import dither
from gradcomp._src.kernels.common.threefry import fold_key
from gradcomp._src.kernels.materialize import written


class Draws(NamedTuple):
  """Random keys and dithers of several arrays; None for a codec without random numbers.

  ``own`` is ``uint32[K, 2]``, this worker's key for each array. ``dither`` is
  ``uint32[K, 3]``, for each array a key that all workers share, and this worker's mask,
  see ``common.dithers``.
  """

  own: jax.Array | None = None
  dither: jax.Array | None = None


def draws(codec: Codec, key: jax.Array | None, count: int, worker: jax.Array) -> Draws:
  """Draws the keys and dithers of a worker's ``count`` arrays, all different.

  ``key`` is ``uint32[2]``, equal on all workers; None if the codec needs none.
  """
  if not codec.needs_key:
    return Draws()
  assert key is not None
  keys = jax.vmap(lambda i: fold_key(key, i))(jnp.arange(count))
  own = jax.vmap(lambda key: fold_key(key, worker))(keys)
  return Draws(own, jax.vmap(lambda key: dither(key, worker))(keys))


def to_lines(arrays: jax.Array, codec: Codec, drawn: Draws) -> jax.Array:
  """Encodes ``[K, ...]`` arrays to ``uint32[K, M]``."""
  with jax.named_scope("gradcomp_encode"):
    payload = jax.vmap(lambda x, own, shared: _encode(codec, x, own, shared))(
      arrays, drawn.own, drawn.dither
    )
  # Materialized, however few rows: XLA would compute them anew for every slice or
  # reshape, word by word: ten times slower where one scale serves an array.
  rows = written(lambda rows: rows, payload.rows)
  agreed = [] if payload.agreed is None else [_words(payload.agreed)]
  return join([rows, *agreed], arrays.shape[0])


def from_lines(lines: jax.Array, shape: tuple[int, ...], codec: Codec) -> jax.Array:
  """Decodes ``uint32[K, M]`` to arrays of a shape, ``float32[K, *shape]``."""
  like = jnp.zeros(shape, jnp.float32)  # only its shape and dtype count
  key = jax.ShapeDtypeStruct((2,), jnp.uint32)
  mask = jax.ShapeDtypeStruct((3,), jnp.uint32)
  form = jax.eval_shape(lambda *args: _encode(codec, *args), like, key, mask)
  with jax.named_scope("gradcomp_decode"):
    if form.agreed is None:
      (rows,) = split(lines, [form.rows.shape])
      # Materialized row by row: XLA would compute the row of every element of the
      # result, and its place there, which takes longer than decoding.
      decode = jax.vmap(codec.decode_rows)
      tiles = decode(rows) if sums.of(codec).plain else written(decode, rows)
    else:
      rows, words = split(lines, [form.rows.shape, form.agreed.shape])
      agreed = _from_words(words, form.agreed.dtype)
      each = jax.vmap(lambda rows, agreed: payload_tiles(Payload(rows, agreed), codec))
      tiles = written(lambda rows: each(rows, agreed), rows)
    return jax.vmap(lambda tiles: from_tiles(tiles, like, codec))(tiles)


def _encode(
  codec: Codec, x: jax.Array, own: jax.Array | None, shared: jax.Array | None
) -> Payload:
  wide = x.astype(jnp.float32)
  return codec.encode(wide, key=own, context=Context(dither=shared))


def _words(agreed: jax.Array) -> jax.Array:
  """Converts floats or bytes to one ``uint32`` each."""
  if agreed.dtype == jnp.float32:
    return lax.bitcast_convert_type(agreed, jnp.uint32)
  return agreed.astype(jnp.uint32)


def _from_words(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
  if dtype == jnp.float32:
    return lax.bitcast_convert_type(words, jnp.float32)
  return words.astype(dtype)
