"""Encodes the leaves of a message, each by its codec."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sparse import SelectingCodec
from gradcomp._src.codecs.sums.records import Context, Encoded

# Leaves of one shape with at most _SMALL_LEAF_ELEMENTS elements are encoded together,
# in groups of at most JOINT_ENCODING_ELEMENTS elements. A compiler takes a quarter of
# the time then. Larger leaves would be copied to no avail.
_SMALL_LEAF_ELEMENTS, JOINT_ENCODING_ELEMENTS = 2**17, 2**19


def to_agree(codec: Codec, leaf: jax.Array) -> jax.Array | None:
  """Returns a leaf's statistics to maximize over workers before encoding, or None.

  Example:
    >>> to_agree(gradcomp.codecs.Ternary(clip_sigmas=None), jnp.array([1.0, -3.0]))
    Array([[3.]], dtype=float32)
  """
  return _agree(codec, leaf)


def encode_leaves(
  codecs: Sequence[Codec],
  leaves: Sequence[jax.Array],
  contexts: Sequence[Context],
  *,
  keep: bool,
) -> list[Encoded]:
  """Encodes each leaf by its codec; small leaves of one shape share a program.

  With ``keep``, leaves that are encoded one by one come with the residual, if the codec
  computes it.
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
      encoded[i] = encode_leaf(codec, keep, leaves[i], contexts[i])
      continue
    given = [(_after(last, leaves[i]), contexts[i]) for i in numbers]
    last = _encode_several(codec, given)
    encoded |= {i: Encoded(rows) for i, rows in zip(numbers, last, strict=True)}
  for (selecting, _), numbers in alike.items():
    own = [leaves[i] for i in numbers], [contexts[i] for i in numbers]
    for i, found in zip(numbers, selecting.encode_leaves(*own), strict=True):
      encoded[i] = found
  return [encoded[i] for i in range(len(leaves))]


def _groups(
  codecs: Sequence[Codec],
  leaves: Sequence[jax.Array],
  contexts: Sequence[Context],
  numbers: Sequence[int],
) -> Iterator[list[int]]:
  """Yields the leaf numbers of each group that one program encodes."""
  alike: dict[Any, list[int]] = {}
  for i in numbers:
    leaf, context = leaves[i], jax.tree.structure(contexts[i])
    alike.setdefault((codecs[i], leaf.shape, leaf.dtype, context), []).append(i)
  for own in alike.values():
    size = leaves[own[0]].size
    count = JOINT_ENCODING_ELEMENTS // size if 0 < size <= _SMALL_LEAF_ELEMENTS else 1
    yield from (own[at : at + count] for at in range(0, len(own), count))


def _after(last: Sequence[jax.Array] | None, leaf: jax.Array) -> jax.Array:
  """Returns a leaf that XLA cannot read before the rows ``last`` are encoded."""
  if last is None:
    return leaf
  # XLA would otherwise stack the leaves of all groups first, and hold a second
  # gradient. It drops an optimization barrier before it schedules. So the bits of the
  # leaf are joined with zeros that XLA does not know to be zeros: no word has 64 bits.
  zero = jax.lax.population_count(last[0][0, 0]) >> 6
  bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
  return jax.lax.bitcast_convert_type(bits | zero.astype(bits.dtype), leaf.dtype)


@functools.partial(jax.jit, static_argnums=0)
def _encode_several(
  codec: Codec, given: Sequence[tuple[jax.Array, Context]]
) -> list[jax.Array]:
  """Returns the rows of leaves of one shape, encoded by one vmapped program."""
  stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *given)
  # Without residuals: they would be one array, and XLA would hold those of all groups
  # before it slices them into leaves.
  rows = jax.vmap(functools.partial(encode_leaf, codec, False))(*stacked).rows
  # Split along the first axis, they are put together again without a copy.
  return jnp.split(rows.reshape(-1, codec.row_words), len(given))


@functools.partial(jax.jit, static_argnums=0)
def _agree(codec: Codec, leaf: jax.Array) -> jax.Array | None:
  """Computes a leaf's statistics; jitted, so that each shape is traced once."""
  return codec.agree(leaf)


@functools.partial(jax.jit, static_argnums=(0, 1))
def encode_leaf(codec: Codec, keep: bool, leaf: jax.Array, context: Context) -> Encoded:
  """Encodes a leaf, with the residual if asked; jitted as :func:`_agree` is."""
  return codec.encode_leaf(leaf, context, keep=keep)
