"""Computes what the laws of one codec compare, by programs that they share."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gradcomp._src.codecs import sums
from gradcomp._src.codecs.leaf import Context, Leaf, Payload
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.testing.leaves import KEY, first_context, key_of


class Trial(NamedTuple):
  """Holds what a codec makes of one leaf.

  Attributes:
    payload: of the leaf.
    value: what the payload decodes to.
    together: the tiles of its rows, decoded at once.
    alone: the same, each row by itself.
  """

  payload: Payload
  value: Any
  together: Any
  alone: Any


class Batch(NamedTuple):
  """Holds what a codec makes of several leaves of one shape, in one call.

  Attributes:
    rows: of each payload, ``uint32[leaves, rows, words]``.
    unsent: for each leaf the part that is not sent, if encoding says so; else None.
  """

  rows: Any
  unsent: Any


def encode(
  codec: LeafCodec, x: jax.Array, key: ArrayLike, context: Context | None = None
) -> Payload:
  """Encodes a leaf as a worker does in its first step.

  Args:
    codec: the codec, which is bound to the leaf here.
    x: the leaf.
    key: ``uint32[2]``, for codecs that need one.
    context: what else to encode with, by default that of the first step.
  """
  leaf = Leaf(x.shape)
  bound = codec.bind(leaf)
  if context is None:
    context = first_context(bound, leaf)
  return bound.encode(x, key=key_of(bound, key), context=context)  # type: ignore[attr-defined]


def decode(codec: LeafCodec, payload: Payload, like: jax.Array) -> jax.Array:
  """Decodes a payload by the codec that is bound to the leaf."""
  return codec.bind(Leaf(like.shape)).decode(payload, like=like)  # type: ignore[attr-defined]


def round_trip(codec: LeafCodec, x: jax.Array, key: ArrayLike = KEY) -> jax.Array:
  """Encodes a leaf and decodes it."""
  return decode(codec, encode(codec, x, key), x)


def trial(codec: LeafCodec, x: ArrayLike, key: ArrayLike = KEY) -> Trial:
  """Returns what a codec makes of a leaf, from a program that is compiled once."""
  return jax.tree.map(np.asarray, _trial(codec, jnp.asarray(x), jnp.asarray(key)))


def batch(codec: LeafCodec, x: ArrayLike, keys: ArrayLike) -> Batch:
  """Returns what a codec makes of leaves ``[leaves, ...]`` by ``jax.vmap``."""
  return jax.tree.map(np.asarray, _batch(codec, jnp.asarray(x), jnp.asarray(keys)))


@functools.partial(jax.jit, static_argnums=0)
def returned(codec: LeafCodec, x: ArrayLike) -> jax.Array:
  """Returns what a leaf becomes, from a smaller program than that of a trial."""
  return round_trip(codec, jnp.asarray(x))


@functools.partial(jax.jit, static_argnums=0)
def _encoded(codec: LeafCodec, x: jax.Array, key: jax.Array) -> Payload:
  """Jitted by itself, so that a trial and a batch trace it once."""
  return encode(codec, x, key)


@functools.partial(jax.jit, static_argnums=0)
def _trial(codec: LeafCodec, x: jax.Array, key: jax.Array) -> Trial:
  payload = _encoded(codec, x, key)
  rows, stats = payload
  lines = None
  if stats is not None:
    lines = jnp.broadcast_to(stats, (rows.shape[0], stats.shape[1]))
  total = sums.of(codec.bind(Leaf(x.shape)))

  def tiles(row: jax.Array, line: jax.Array | None) -> jax.Array:
    return total.gathered(row[None], line, 1.0)(0, row.shape[0])

  def alone(row: tuple[jax.Array, jax.Array | None]) -> jax.Array:
    return tiles(*jax.tree.map(lambda part: part[None], row))[0]

  value = decode(codec, payload, x)
  return Trial(payload, value, tiles(rows, lines), jax.lax.map(alone, (rows, lines)))


@functools.partial(jax.jit, static_argnums=0)
def _batch(codec: LeafCodec, x: jax.Array, keys: jax.Array) -> Batch:
  leaf = Leaf(x.shape[1:])
  bound = codec.bind(leaf)
  both = getattr(bound, "encode_with_residual", None)

  def one(x: jax.Array, key: jax.Array) -> Batch:
    if both is None:
      return Batch(_encoded(codec, x, key).rows, None)
    payload, unsent = both(
      x, key=key_of(bound, key), context=first_context(bound, leaf)
    )
    return Batch(payload.rows, unsent)

  return jax.vmap(one)(x, keys)
