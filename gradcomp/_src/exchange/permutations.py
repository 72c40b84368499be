"""The rounds of pairwise sends that replace an all-to-all."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Permutation(NamedTuple):
  """The receiver and the part of each of N workers in a round.

  Attributes:
    to: the receiver of each worker; no two have the same.
    part: the number of the part of the receiver's line that each worker sends.
  """

  to: tuple[int, ...]
  part: tuple[int, ...]


def rounds(size: int) -> tuple[int, list[Permutation]]:
  """Returns the number of parts of a line, and the rounds that send all lines.

  Two workers that send to each other share a connection, and gloo writes to it and
  reads from it in turns. It takes less time if each worker sends to one and receives
  from another. So a round is made of cycles, and no cycle has two workers, unless the
  size is 2 or a multiple of 4.

  In the round of distance d, worker i sends to ``i + d``. Only half the size is a
  distance of pairs. If it is odd, two rounds mix it with the distance that is two less:
  one worker out of two takes either. Four workers take all six cycles, and send half a
  line in each, because no three cycles have all pairs.

  Example:
    >>> rounds(3)[1]  # doctest: +NORMALIZE_WHITESPACE
    [Permutation(to=(1, 2, 0), part=(0, 0, 0)),
     Permutation(to=(2, 0, 1), part=(0, 0, 0))]
    >>> parts, found = rounds(4)
    >>> parts, len(found)
    (2, 6)
  """
  if size == 4:
    ways = [_around((0, *rest)) for rest in itertools.permutations((1, 2, 3))]
    return 2, _numbered(ways)
  half = size // 2
  distances = [(d, d) for d in range(1, size)]
  if size % 4 == 2 and size > 2:
    distances[half - 3] = (half - 2, half)
    distances[half - 1] = (half, half - 2)
  ways = [tuple((i + x[i % 2]) % size for i in range(size)) for x in distances]
  return 1, _numbered(ways)


def _around(order: Sequence[int]) -> tuple[int, ...]:
  """Returns the next worker of each worker in a cycle."""
  places = sorted(range(len(order)), key=order.__getitem__)
  return tuple(order[(place + 1) % len(order)] for place in places)


def _numbered(ways: Sequence[tuple[int, ...]]) -> list[Permutation]:
  """Numbers the parts that each worker sends to one receiver."""
  sent: dict[tuple[int, int], int] = {}
  result = []
  for to in ways:
    pairs = list(enumerate(to))
    result.append(Permutation(to, tuple(sent.get(pair, 0) for pair in pairs)))
    sent |= {pair: sent.get(pair, 0) + 1 for pair in pairs}
  return result
