"""Encodes the leaves of a message, each by its codec."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from gradcomp.codecs._codec import (
  AddingCodec,
  Codec,
  RemainderCodec,
  SharedCodec,
  is_adding,
  is_shared,
)
from gradcomp.codecs._sparse import SelectingCodec


class Encoded(NamedTuple):
  """What encoding makes of one leaf.

  Attributes:
    rows: ``uint32[rows, row_words]``.
    unsent: what is not sent, where encoding says so; else None.
    own: what the worker remembers for itself; else ().
  """

  rows: jax.Array
  unsent: jax.Array | None
  own: Any = ()


def shared_stats(codec: Codec, leaf: jax.Array) -> jax.Array | None:
  """Returns the statistics of a leaf that workers have to agree on; None for nothing.

  Example:
    >>> shared_stats(gradcomp.codecs.Ternary(clip_sigmas=None), jnp.array([1.0, -3.0]))
    Array([[3.]], dtype=float32)
  """
  if not codec.shares_stats:
    return None
  assert is_shared(codec) or is_adding(codec)
  return _stats(codec, leaf)


def encode_leaves(
  codecs: Sequence[Codec],
  leaves: Sequence[jax.Array],
  keys: Sequence[jax.Array | None],
  stats: Sequence[jax.Array | None],
  *,
  keep: bool,
) -> list[Encoded]:
  """Encodes every leaf by itself, or with others of its size where one program can.

  Args:
    codecs: the codec of each leaf.
    leaves: arrays of any shape.
    keys: for each leaf ``uint32[2]``, or None if its codec needs none.
    stats: for each leaf what its codec encodes with: what workers share, or what is
      remembered; None for nothing.
    keep: whether to return what is not sent.
  """
  encoded: dict[int, Encoded] = {}
  alike: dict[tuple[SelectingCodec, int], list[int]] = {}
  for i, (codec, leaf) in enumerate(zip(codecs, leaves, strict=True)):
    if isinstance(codec, SelectingCodec):
      alike.setdefault((codec, leaf.size), []).append(i)
    else:
      encoded[i] = Encoded(*_encode(codec, keep, leaf, keys[i], stats[i]))
  for (selecting, _), numbers in alike.items():
    given = [leaves[i] for i in numbers], [stats[i] for i in numbers]
    for i, found in zip(numbers, selecting.encode_leaves(*given), strict=True):
      encoded[i] = Encoded(*found)
  return [encoded[i] for i in range(len(leaves))]


@functools.partial(jax.jit, static_argnums=0)
def _stats(codec: SharedCodec | AddingCodec, leaf: jax.Array) -> jax.Array:
  """Jitted by itself, so that leaves of one shape are traced once."""
  return codec.stats(leaf)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode(
  codec: Codec,
  keep: bool,
  leaf: jax.Array,
  key: jax.Array | None,
  stats: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
  """Jitted like :func:`_stats`."""
  if keep and isinstance(codec, RemainderCodec):
    payload, rest = codec.encode_with_residual(leaf, key=key, stats=stats)
    return payload.rows, rest
  return codec.encode(leaf, key=key, stats=stats).rows, None
