"""Encodes the leaves of a message, each by its codec."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.leaf import Context
from gradcomp._src.codecs.protocol import (
  AddingCodec,
  Codec,
  RemainderCodec,
  SharedCodec,
  is_adding,
  is_shared,
)
from gradcomp._src.codecs.sparse import SelectingCodec

# Leaves of one shape with at most so many elements are encoded together, in groups of
# at most so many elements. A compiler takes a quarter of the time then. Larger leaves
# would be copied to no avail.
_SMALL, TOGETHER = 2**17, 2**19

# A leaf, its key, and what its codec encodes it with besides.
_Given = tuple[jax.Array, jax.Array | None, Context]


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
  """Encodes every leaf as if by itself, but small ones of a shape by one program.

  Args:
    codecs: the codec of each leaf.
    leaves: arrays of any shape.
    keys: for each leaf ``uint32[2]``, or None if its codec needs none.
    contexts: for each leaf what its codec encodes with besides.
    keep: whether to return what is not sent, where encoding a leaf alone says so.
  """
  encoded: dict[int, Encoded] = {}
  alike: dict[tuple[SelectingCodec, int], list[int]] = {}
  others: list[int] = []
  for i, (codec, leaf) in enumerate(zip(codecs, leaves, strict=True)):
    if isinstance(codec, SelectingCodec):
      alike.setdefault((codec, leaf.size), []).append(i)
    else:
      others.append(i)
  last = None
  for numbers in _groups(codecs, leaves, contexts, others):
    codec = codecs[numbers[0]]
    if len(numbers) == 1:
      (i,) = numbers
      encoded[i] = Encoded(*_encode(codec, keep, leaves[i], keys[i], contexts[i]))
      continue
    given = [(_after(last, leaves[i]), keys[i], contexts[i]) for i in numbers]
    last = _encode_several(codec, given)
    encoded |= {i: Encoded(rows, None) for i, rows in zip(numbers, last, strict=True)}
  for (selecting, _), numbers in alike.items():
    own = [leaves[i] for i in numbers], [contexts[i] for i in numbers]
    for i, found in zip(numbers, selecting.encode_leaves(*own), strict=True):
      encoded[i] = Encoded(*found)
  return [encoded[i] for i in range(len(leaves))]


def _groups(
  codecs: Sequence[Codec],
  leaves: Sequence[jax.Array],
  contexts: Sequence[Context],
  numbers: Sequence[int],
) -> Iterator[list[int]]:
  """Yields the numbers of leaves that are encoded together, or of one."""
  alike: dict[Any, list[int]] = {}
  for i in numbers:
    leaf, context = leaves[i], jax.tree.structure(contexts[i])
    alike.setdefault((codecs[i], leaf.shape, leaf.dtype, context), []).append(i)
  for own in alike.values():
    size = leaves[own[0]].size
    count = TOGETHER // size if 0 < size <= _SMALL else 1
    yield from (own[at : at + count] for at in range(0, len(own), count))


def _after(last: Sequence[jax.Array] | None, leaf: jax.Array) -> jax.Array:
  """Returns a leaf as it is, which cannot be read before other rows are encoded.

  XLA would otherwise stack the leaves of all groups first, and hold a second gradient.
  It drops an optimization barrier before it orders what it runs. So the bits of the
  leaf are joined with zeros, of which XLA does not know that they are zeros: no word
  has 64 bits.
  """
  if last is None:
    return leaf
  zero = jax.lax.population_count(last[0][0, 0]) >> 6
  bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
  return jax.lax.bitcast_convert_type(bits | zero.astype(bits.dtype), leaf.dtype)


@functools.partial(jax.jit, static_argnums=0)
def _encode_several(codec: Codec, given: Sequence[_Given]) -> list[jax.Array]:
  """Returns the rows of leaves of one shape.

  What is not sent is not found here. It would be one array, and XLA would hold those of
  all groups before it cuts them into leaves.
  """
  stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *given)
  rows, _ = jax.vmap(functools.partial(_encode, codec, False))(*stacked)
  # Cut along the first axis, they are put together again without a copy.
  return jnp.split(rows.reshape(-1, codec.row_words), len(given))


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
