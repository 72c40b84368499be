"""Encodes the leaves of a message, each by its codec."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import Array

from gradcomp._src.codecs.joint import encode_leaf
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Context, Encoded


def encode_leaves(
  codecs: Sequence[Codec],
  leaves: Sequence[Array],
  contexts: Sequence[Context],
  *,
  keep: bool,
) -> list[Encoded]:
  """Encodes each leaf by its codec, with the residual if asked and computed."""
  encoded: dict[int, Encoded] = {}
  last = None
  for numbers in _groups(codecs, leaves, contexts):
    codec = codecs[numbers[0]]
    if len(numbers) == 1:
      (i,) = numbers
      encoded[i] = encode_leaf(codec, keep, leaves[i], contexts[i])
      continue
    own = [leaves[i] for i in numbers], [contexts[i] for i in numbers]
    encoded |= zip(numbers, codec.encode_several(*own, last), strict=True)
    if leaves[numbers[0]].size:
      last = encoded[numbers[0]].rows
  return [encoded[i] for i in range(len(leaves))]


def _groups(
  codecs: Sequence[Codec], leaves: Sequence[Array], contexts: Sequence[Context]
) -> Iterator[list[int]]:
  """Yields the leaf numbers of each group that one program encodes."""
  alike: dict[Any, list[int]] = {}
  most: dict[Any, int] = {}
  for i, (codec, leaf) in enumerate(zip(codecs, leaves, strict=True)):
    shared, count = codec.joins(leaf.shape)
    key = codec, shared, leaf.dtype, jax.tree.structure(contexts[i])
    alike.setdefault(key, []).append(i)
    most[key] = count
  for key, own in alike.items():
    yield from (own[at : at + most[key]] for at in range(0, len(own), most[key]))
