"""Rounds: averages leaves, or other arrays in their place, one after the other."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax

from gradcomp._src.codecs.protocol import Codec, LeafCodec


class Round(NamedTuple):
  """An array that all workers average."""

  shape: tuple[int, ...]
  codec: Codec  # of its rows
  of_leaf: bool = False  # whether it is the leaf itself


@runtime_checkable
class RoundsCodec(LeafCodec, Protocol):
  """A codec that averages other arrays in a leaf's place, one after the other.

  Its codec state is shared by all workers. A worker's
  residual is its own leaf less the mean of all.
  """

  @property
  def rounds(self) -> tuple[Round, ...]:
    """The arrays, in their order."""

  @property
  def inner(self) -> Codec:
    """The codec of the arrays, before it is bound to one."""

  def in_rounds(
    self, leaves: Sequence[jax.Array], memory: Sequence[Any]
  ) -> Generator[list[jax.Array], list[jax.Array], tuple[list[jax.Array], list[Any]]]:
    """Averages leaves of one shape.

    Args:
      leaves: this worker's, ``float32``.
      memory: the shared codec state of each leaf.

    Yields:
      For each leaf the array of the next round. The means of all workers come back.

    Returns:
      The means of the leaves, and the new state of each.
    """


Arrays = dict[int, jax.Array]  # by the numbers of leaves


def rounds_of(codec: LeafCodec, shape: tuple[int, ...]) -> tuple[Round, ...]:
  """Returns the rounds of a leaf: for most codecs one, the leaf itself.

  Example:
    >>> rounds_of(gradcomp.codecs.Dense(), (3, 4))[0].shape
    (3, 4)
  """
  if isinstance(codec, RoundsCodec):
    return codec.rounds
  rows = cast(Codec, codec)  # as compress has made sure
  return (Round(shape, rows, of_leaf=True),)


def in_rounds(
  codecs: Sequence[LeafCodec], leaves: Sequence[jax.Array], shared: Sequence[Any]
) -> Generator[Arrays, Mapping[int, jax.Array], tuple[Arrays, list[Any]]]:
  """Averages all leaves, round by round, until the codec with the most rounds is done.

  Leaves with fewer rounds take part in the last ones, so that most travel together.

  Yields:
    The arrays of a round, by leaf. The means of all workers come back.

  Returns:
    The means of leaves that are averaged by other arrays, and the shared codec state of
    each leaf.
  """
  alike: dict[RoundsCodec, list[int]] = {}
  plain = dict(enumerate(leaves))
  for i, codec in enumerate(codecs):
    if isinstance(codec, RoundsCodec):
      alike.setdefault(codec, []).append(i)
      del plain[i]
  last = max((len(codec.rounds) for codec in alike), default=1)
  means: Arrays = {}
  memory = list(shared)
  talks = {
    codec: codec.in_rounds([leaves[i] for i in own], [shared[i] for i in own])
    for codec, own in alike.items()
  }
  received: Mapping[int, jax.Array] = {}
  for number in range(last + 1):
    arrays = dict(plain) if number == last - 1 else {}
    for codec, own in alike.items():
      first = last - len(codec.rounds)
      if number < first:
        continue
      try:
        talk = talks[codec]
        sent = next(talk) if number == first else talk.send([received[i] for i in own])
      except StopIteration as end:
        found, remembered = end.value
        means |= zip(own, found, strict=True)
        for i, kept in zip(own, remembered, strict=True):
          memory[i] = kept
      else:
        arrays |= zip(own, sent, strict=True)
    if number < last:
      received = yield arrays
  return means, memory
