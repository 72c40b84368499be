"""Encodes the leaves of a message, each by its codec."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from gradcomp.codecs._codec import (
  AddingCodec,
  Codec,
  Context,
  RemainderCodec,
  SharedCodec,
  is_adding,
  is_shared,
)
from gradcomp.codecs._sparse import SelectingCodec


class Encoded(NamedTuple):
  """Holds the result of encoding one leaf.

  Attributes:
    rows: ``uint32[rows, row_words]``.
    unsent: what is not sent, where encoding says so; else None.
    own: what the worker remembers for itself; else ().
  """

  rows: jax.Array
  unsent: jax.Array | None
  own: Any = ()


def to_agree(codec: Codec, leaf: jax.Array) -> jax.Array | None:
  """Returns what workers take the largest of before they encode a leaf, or None.

  Example:
    >>> to_agree(gradcomp.codecs.Ternary(clip_sigmas=None), jnp.array([1.0, -3.0]))
    Array([[3.]], dtype=float32)
  """
  if not codec.agrees:
    return None
  assert is_shared(codec) or is_adding(codec)
  return _agree(codec, leaf)


def encode_leaves(
  codecs: Sequence[Codec],
  leaves: Sequence[jax.Array],
  keys: Sequence[jax.Array | None],
  contexts: Sequence[Context],
  *,
  keep: bool,
) -> list[Encoded]:
  """Encodes every leaf by itself, or with others of its size where one program can.

  Args:
    codecs: the codec of each leaf.
    leaves: arrays of any shape.
    keys: for each leaf ``uint32[2]``, or None if its codec needs none.
    contexts: for each leaf what its codec encodes with besides.
    keep: whether to return what is not sent.
  """
  encoded: dict[int, Encoded] = {}
  alike: dict[tuple[SelectingCodec, int], list[int]] = {}
  for i, (codec, leaf) in enumerate(zip(codecs, leaves, strict=True)):
    if isinstance(codec, SelectingCodec):
      alike.setdefault((codec, leaf.size), []).append(i)
    else:
      encoded[i] = Encoded(*_encode(codec, keep, leaf, keys[i], contexts[i]))
  for (selecting, _), numbers in alike.items():
    given = [leaves[i] for i in numbers], [contexts[i] for i in numbers]
    for i, found in zip(numbers, selecting.encode_leaves(*given), strict=True):
      encoded[i] = Encoded(*found)
  return [encoded[i] for i in range(len(leaves))]


@functools.partial(jax.jit, static_argnums=0)
def _agree(codec: SharedCodec | AddingCodec, leaf: jax.Array) -> jax.Array:
  """Jitted by itself, so that leaves of one shape are traced once."""
  return codec.agree(leaf)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode(
  codec: Codec,
  keep: bool,
  leaf: jax.Array,
  key: jax.Array | None,
  context: Context,
) -> tuple[jax.Array, jax.Array | None]:
  """Jitted like :func:`_agree`."""
  if keep and isinstance(codec, RemainderCodec):
    payload, rest = codec.encode_with_residual(leaf, key=key, context=context)
    return payload.rows, rest
  return codec.encode(leaf, key=key, context=context).rows, None
