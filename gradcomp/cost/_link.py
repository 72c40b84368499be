"""Describes a link by its latency and rate, and times collectives on it."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Literal, get_args

from gradcomp.cost._rules import above_0, at_least_0, count

Algorithm = Literal["ring", "recursive"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """The link that each worker sends and receives on, both at once.

  Attributes:
    latency: the seconds that a message takes beside those of its bytes.
    bytes_per_second: the rate of each direction.
    factor: for (collective, workers), the measured seconds of a byte as a multiple of
      the ideal ones, which the functions below give; 1 for all that are not in it.
      Collectives are called like these functions, without ``_seconds``.

  Raises:
    ValueError: the latency is below 0, the rate or a factor is not above 0, one of them
      is not finite, or a key is no pair of a name and a number of workers.

  Example:
    >>> link = Link(latency=50e-6, bytes_per_second=125e6)
    >>> round(all_gather_seconds(1e6, 4, link), 6)
    0.02415
    >>> slow = dataclasses.replace(link, factor={("all_gather", 4): 1.5})
    >>> round(all_gather_seconds(1e6, 4, slow), 6)
    0.03615
  """

  latency: float
  bytes_per_second: float
  factor: Mapping[tuple[str, int], float] = dataclasses.field(
    default_factory=dict, hash=False
  )

  def __post_init__(self) -> None:
    rate = above_0("bytes_per_second", self.bytes_per_second)
    object.__setattr__(self, "latency", at_least_0("latency", self.latency))
    object.__setattr__(self, "bytes_per_second", rate)
    factor = {}
    for key, value in self.factor.items():
      if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], str):
        raise ValueError(
          f"`factor` must have pairs of a collective and workers as keys, got {key!r}."
        )
      pair = (key[0], count(f"factor[{key!r}]'s workers", key[1]))
      factor[pair] = above_0(f"factor[{key!r}]", value)
    object.__setattr__(self, "factor", factor)

  def byte_seconds(self, collective: str, workers: int) -> float:
    """Returns the seconds of a byte in a collective of so many workers."""
    return self.factor.get((collective, workers), 1.0) / self.bytes_per_second

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the link to a file, as JSON."""
    factor = [[*key, value] for key, value in sorted(self.factor.items())]
    content = dataclasses.asdict(self) | {"factor": factor}
    pathlib.Path(path).write_text(json.dumps(content, indent=1) + "\n")

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "Link":
    """Reads a link that :meth:`save` wrote.

    Raises:
      ValueError: the file holds something else.
    """
    try:
      content = json.loads(pathlib.Path(path).read_text())
      factor = {(name, workers): value for name, workers, value in content["factor"]}
      return cls(**content | {"factor": factor})
    except (TypeError, KeyError) as error:
      raise ValueError(f"`path` must be a file of Link.save, got {path}.") from error


def all_gather_seconds(
  nbytes: float, workers: int, link: Link, *, algorithm: Algorithm = "ring"
) -> float:
  """Returns the seconds in which p workers get the ``nbytes`` of each.

  A ring takes ``(p-1) (latency + x)``, where x are the seconds of ``nbytes``. Recursive
  doubling takes ``lg(p) latency + (p-1) x``.

  Args:
    nbytes: the bytes that each worker puts in.
    workers: p.
    link: the link of each worker.
    algorithm: ``"recursive"`` needs a power of two workers.

  Raises:
    ValueError: ``nbytes`` is below 0, p below 1, or the algorithm does not fit p.
  """
  rounds, seconds = _start("all_gather", nbytes, workers, link, algorithm)
  return rounds * link.latency + (workers - 1) * seconds


def all_to_all_seconds(
  nbytes: float, workers: int, link: Link, *, algorithm: Algorithm = "ring"
) -> float:
  """Returns the seconds in which each of p workers sends a p-th of its bytes to each.

  Pairs take ``(p-1) latency + (p-1)/p x``, where x are the seconds of ``nbytes``. The
  arguments are those of :func:`all_gather_seconds`. A recursive one has ``lg(p)``
  latencies.
  """
  rounds, seconds = _start("all_to_all", nbytes, workers, link, algorithm)
  return rounds * link.latency + (workers - 1) / workers * seconds


def reduce_scatter_seconds(
  nbytes: float,
  workers: int,
  link: Link,
  *,
  add: float = 0.0,
  algorithm: Algorithm = "ring",
) -> float:
  """Returns the seconds in which each of p workers gets the sum of a p-th of the bytes.

  These are those of :func:`all_to_all_seconds`, and ``(p-1)/p add``.

  Args:
    nbytes: the bytes that each worker puts in.
    workers: p.
    link: the link of each worker.
    add: the seconds in which a worker adds two arrays of ``nbytes``.
    algorithm: as in :func:`all_gather_seconds`.
  """
  rounds, seconds = _start("reduce_scatter", nbytes, workers, link, algorithm)
  share = (workers - 1) / workers
  return rounds * link.latency + share * (seconds + at_least_0("add", add))


def all_reduce_seconds(
  nbytes: float,
  workers: int,
  link: Link,
  *,
  add: float = 0.0,
  algorithm: Algorithm = "ring",
) -> float:
  """Returns the seconds in which p workers get the sum of all their bytes.

  A reduce-scatter and an all-gather of p-ths: ``2 (p-1) latency + 2 (p-1)/p x +
  (p-1)/p add``, or ``2 lg(p)`` latencies. The arguments are those of
  :func:`reduce_scatter_seconds`.
  """
  rounds, seconds = _start("all_reduce", nbytes, workers, link, algorithm)
  share = (workers - 1) / workers
  return 2 * rounds * link.latency + share * (2 * seconds + at_least_0("add", add))


def ppermute_seconds(
  nbytes: float, workers: int, link: Link, *, messages: float = 1
) -> float:
  """Returns the seconds in which a worker sends so many messages, one after the other.

  These are ``messages (latency + x)``, or 0 for a worker that is alone. Through a
  switch, a worker that sends to p-1 others has p-1 messages (Dettmers 2016).
  """
  _, seconds = _start("ppermute", nbytes, workers, link, "ring")
  times = at_least_0("messages", messages) if workers > 1 else 0
  return times * (link.latency + seconds)


def tree_seconds(nbytes: float, workers: float, link: Link) -> float:
  """Returns the seconds in which a binary tree of p workers adds up, or broadcasts.

  These are ``lg(p) (latency + x)`` (Wen et al. 2017, appendix B). The logarithm is a
  real number, so that p need not be a power of two.
  """
  if not at_least_0("workers", workers) >= 1:
    raise ValueError(f"`workers` must be at least 1, got {workers!r}.")
  byte = link.byte_seconds("tree", int(workers))
  return math.log2(workers) * (link.latency + at_least_0("nbytes", nbytes) * byte)


def _start(
  collective: str, nbytes: float, workers: int, link: Link, algorithm: Algorithm
) -> tuple[int, float]:
  """Returns the number of messages one after the other, and the seconds of the bytes.

  An all-reduce sends twice as many messages.
  """
  workers = count("workers", workers)
  if algorithm not in get_args(Algorithm):
    raise ValueError(
      f"`algorithm` must be one of {get_args(Algorithm)}, got {algorithm!r}."
    )
  rounds = workers - 1
  if algorithm == "recursive":
    rounds = workers.bit_length() - 1
    if workers != 1 << rounds:
      raise ValueError(
        f'`workers` must be a power of two for algorithm="recursive", got {workers}.'
      )
  seconds = at_least_0("nbytes", nbytes) * link.byte_seconds(collective, workers)
  return rounds, seconds
