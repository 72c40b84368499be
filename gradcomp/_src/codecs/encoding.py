"""Encodes the leaves of a message, each by its codec, and fits codec states."""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.joint import encode_leaf
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Context, Encoded


def encode_leaves(
  codecs: Sequence[Codec],
  leaves: Sequence[jax.Array],
  contexts: Sequence[Context],
  *,
  keep: bool,
) -> list[Encoded]:
  """Encodes each leaf by its codec; leaves that a codec joins share a program.

  With ``keep``, leaves that are encoded one by one come with the residual, if the codec
  computes it.
  """
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
  codecs: Sequence[Codec], leaves: Sequence[jax.Array], contexts: Sequence[Context]
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


class Adding(NamedTuple):
  """An all-reduce of ``int32`` counts, and its number of workers."""

  add: Callable[[jax.Array], jax.Array]
  workers: int


def refitted(
  codecs: Sequence[Codec],
  leaves: Sequence[jax.Array],
  shared: Sequence[Any],
  kinds: Sequence[Hashable],
  step: jax.Array,
  adding: Callable[[Sequence[int]], Adding],
) -> list[Any]:
  """Returns the shared codec states of a step, after refits that are due.

  A codec with ``fits`` counts all leaves that it encodes. Counts are added as integers,
  exactly, so that all workers fit the same state.

  Args:
    codecs: the codec of each leaf.
    leaves: ``float32`` arrays.
    shared: the codec state of each leaf that all workers share.
    kinds: a value for each leaf; leaves with an equal one have states of one type.
    step: ``int32[]``.
    adding: a function from the numbers of a codec's leaves to their all-reduce.
  """
  result = list(shared)
  for codec in dict.fromkeys(codecs):
    fits = codec.fits
    if fits is None:
      continue
    own = [i for i, other in enumerate(codecs) if other == codec]
    add, workers = adding(own)
    # The counts of all leaves and workers fit in 32 bits, cut to fewer digits if need
    # be.
    most = len(own) * workers * fits.most
    shift = max(0, most.bit_length() - 31)

    def fit(old: list[jax.Array]) -> list[jax.Array]:
      counts = sum(_count(codec, leaves[i]) >> shift for i in own)  # noqa: B023
      total = add(jnp.asarray(counts))  # noqa: B023
      return [fits.fit(total, state) for state in old]  # noqa: B023

    first = {kinds[i]: shared[i] for i in reversed(own)}
    due = step % fits.every == 0
    again = lax.cond(due, fit, lambda old: old, list(first.values()))
    fitted = dict(zip(first, again, strict=True))
    for i in own:
      result[i] = fitted[kinds[i]]
  return result


@functools.partial(jax.jit, static_argnums=0)
def _count(codec: Codec, leaf: jax.Array) -> jax.Array:
  """Counts a leaf's elements; jitted, so that leaves of one shape are traced once."""
  assert codec.fits is not None
  return codec.fits.count(leaf)
