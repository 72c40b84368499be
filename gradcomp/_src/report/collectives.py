"""The collectives of a step as records, for :mod:`gradcomp.cost`."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

_KINDS = {"pmax": "all_reduce", "psum": "all_reduce"}
_JOINED = ("message", "primitive", "workers", "span", "times")

Pairs = Sequence[tuple[int, int]]  # of a permutation: from whom to whom


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """One collective of a step.

  Attributes:
    message: the number of the message of its leaves.
    primitive: JAX's name of the collective.
    workers: the workers that exchange with each other; of a permutation, those of its
      longest cycle, where two workers swap.
    span: the size of the aligned blocks of consecutive ranks that all sends stay in.
      Ranks are in the order of the axes.
    elements: the elements of a worker's operand.
    bytes_in: the bytes of a worker's operand.
    bytes_sent: the bytes that a worker sends for these.
    times: the number of its runs in a step, one after the other.
  """

  message: int
  primitive: str
  workers: int
  span: int
  elements: int
  bytes_in: int
  bytes_sent: Fraction
  times: int

  @property
  def kind(self) -> str:
    """The name of the collective in :mod:`gradcomp.cost`."""
    return _KINDS.get(self.primitive, self.primitive)


def append(stages: list[Stage], stage: Stage) -> None:
  """Adds a collective to a list; joins consecutive sums to one, as XLA does."""
  last = stages[-1] if stages and stage.primitive == "psum" else None
  if last and all(getattr(last, x) == getattr(stage, x) for x in _JOINED):
    stages[-1] = dataclasses.replace(
      last,
      elements=last.elements + stage.elements,
      bytes_in=last.bytes_in + stage.bytes_in,
      bytes_sent=last.bytes_sent + stage.bytes_sent,
    )
  else:
    stages.append(stage)


def members(axes: Sequence[str], sizes: Mapping[str, int], pairs: Pairs) -> int:
  """Returns the number of workers that exchange with each other.

  ``pairs`` are the pairs of a permutation; empty for other collectives.
  """
  return _longest_cycle(pairs) if pairs else math.prod(sizes[axis] for axis in axes)


def span(
  axes: Sequence[str], data: Sequence[str], sizes: Mapping[str, int], pairs: Pairs
) -> int:
  """Returns the size of the aligned blocks of consecutive ranks that all sends stay in.

  The arguments are those of :func:`members`, and the axes of all workers, ``data``.
  """
  first = min((data.index(axis) for axis in axes if axis in data), default=0)
  workers = math.prod(sizes[axis] for axis in data[first:])
  place = functools.partial(_place, axes=axes, data=data, sizes=sizes)
  pairs = [(place(i), place(j)) for i, j in pairs]
  for length in range(1, workers if pairs else 1):
    if workers % length == 0 and all(i // length == j // length for i, j in pairs):
      return length
  return workers


def _place(
  index: int, *, axes: Sequence[str], data: Sequence[str], sizes: Mapping[str, int]
) -> int:
  """Converts an index along some axes to a global worker rank."""
  result = 0
  for axis in reversed(axes):
    index, own = divmod(index, sizes[axis])
    if axis in data:
      behind = data[data.index(axis) + 1 :]
      result += own * math.prod(sizes[other] for other in behind)
  return result


def _longest_cycle(pairs: Pairs) -> int:
  to = dict(pairs)
  longest = 0
  while to:
    first, at = to.popitem()
    length = 1
    while at != first:
      at = to.pop(at)
      length += 1
    longest = max(longest, length)
  return longest
