"""Encodings and decodings for the laws of one codec, by shared programs."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.records import Context, Encoded, Leaf, Payload
from gradcomp._src.codecs.tiles import payload_of
from gradcomp._src.testing.leaves import KEY, first_context


class Trial(NamedTuple):
  """The encoding and the decodings of one leaf.

  Attributes:
    payload: the payload of the leaf.
    value: the decoded payload.
    together, alone: the tiles of its rows, decoded at once, and each by itself.
  """

  payload: Payload
  value: Any
  together: Any
  alone: Any


def encode(
  codec: LeafCodec, x: jax.Array, key: ArrayLike, context: Context | None = None
) -> Payload:
  """Encodes a leaf, by default with the context of a worker's first step."""
  leaf = Leaf(x.shape)
  bound = codec.bind(leaf)
  given = (context or first_context(bound, leaf))._replace(key=jnp.asarray(key))
  return payload_of(bound, x.astype(jnp.float32), given)


def decode(codec: LeafCodec, payload: Payload, like: jax.Array) -> jax.Array:
  return codec.bind(Leaf(like.shape)).decode(payload, like=like)


def round_trip(codec: LeafCodec, x: jax.Array, key: ArrayLike = KEY) -> jax.Array:
  return decode(codec, encode(codec, x, key), x)


def trial(codec: LeafCodec, x: ArrayLike, key: ArrayLike = KEY) -> Trial:
  """Encodes and decodes a leaf by a program that is compiled once.

  Args:
    codec, x: the codec, and the leaf.
    key: the key of a codec that draws random numbers, two words.

  Returns:
    A :class:`Trial`, in NumPy's arrays.
  """
  return jax.tree.map(np.asarray, _trial(codec, jnp.asarray(x), jnp.asarray(key)))


def batch(codec: LeafCodec, x: ArrayLike, keys: ArrayLike) -> Encoded:
  """Encodes leaves ``[leaves, ...]`` by ``jax.vmap``."""
  return jax.tree.map(np.asarray, _batch(codec, jnp.asarray(x), jnp.asarray(keys)))


@functools.partial(jax.jit, static_argnums=0)
def returned(codec: LeafCodec, x: ArrayLike) -> jax.Array:
  """Encodes and decodes a leaf, by a smaller program than a trial's."""
  return round_trip(codec, jnp.asarray(x))


# By itself, so that a trial and a batch trace it once.
_encoded = jax.jit(encode, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _trial(codec: LeafCodec, x: jax.Array, key: jax.Array) -> Trial:
  payload = _encoded(codec, x, key)
  rows, stats = payload
  spread = lambda x: jnp.broadcast_to(x, (rows.shape[0], x.shape[1]))
  lines = None if stats is None else spread(stats)
  total = codec.bind(Leaf(x.shape)).sums
  tiles = lambda row, line: total.gathered(row[None], line, 1.0)(0, row.shape[0])
  alone = lambda row: tiles(*jax.tree.map(lambda part: part[None], row))[0]
  value = decode(codec, payload, x)
  return Trial(payload, value, tiles(rows, lines), jax.lax.map(alone, (rows, lines)))


@functools.partial(jax.jit, static_argnums=0)
def _batch(codec: LeafCodec, x: jax.Array, keys: jax.Array) -> Encoded:
  leaf = Leaf(x.shape[1:])
  bound = codec.bind(leaf)

  def one(x: jax.Array, key: jax.Array) -> Encoded:
    given = first_context(bound, leaf, key)._replace(agreed=bound.agree(x))
    encoded = bound.encode_leaf(x.astype(jnp.float32), given, keep=True)
    return encoded._replace(own=())

  return jax.vmap(one)(x, keys)
