"""The seconds of collectives of workers with equal links."""

import math
from typing import Literal

from gradcomp._src.cost.link import Link
from gradcomp._src.cost.rules import at_least_0, count, instance_of, one_of

Way = Literal["ring", "recursive"]


def all_gather_seconds(
  nbytes: float, workers: int, link: Link, *, algorithm: Way = "ring"
) -> float:
  """Returns the seconds in which p workers get the ``nbytes`` of each.

  A ring takes ``(p-1) (latency + x)``, where x are the seconds of ``nbytes``. Recursive
  doubling takes ``lg(p) latency + (p-1) x``.

  Args:
    nbytes: the bytes that each worker puts in.
    workers: p.
    link: the link of each worker.
    algorithm: ``"ring"``, or ``"recursive"``, which needs a power of two workers.

  Raises:
    ValueError: ``nbytes`` is below 0, p below 1, or the algorithm does not fit p.
  """
  rounds, seconds = _start("all_gather", nbytes, workers, link, algorithm)
  return rounds * link.latency + (workers - 1) * seconds


def all_to_all_seconds(
  nbytes: float, workers: int, link: Link, *, algorithm: Way = "ring"
) -> float:
  """Returns the seconds in which each of p workers sends a p-th of its bytes to each.

  Pairs take ``(p-1) latency + (p-1)/p x``, where x are the seconds of ``nbytes``. A
  recursive one has ``lg(p)`` latencies.

  Args:
    nbytes, workers, link, algorithm: as for :func:`all_gather_seconds`.

  Raises:
    ValueError: as for :func:`all_gather_seconds`.
  """
  rounds, seconds = _start("all_to_all", nbytes, workers, link, algorithm)
  return rounds * link.latency + (workers - 1) / workers * seconds


def reduce_scatter_seconds(
  nbytes: float, workers: int, link: Link, *, add: float = 0.0, algorithm: Way = "ring"
) -> float:
  """Returns the seconds in which each of p workers gets the sum of a p-th of the bytes.

  These are those of :func:`all_to_all_seconds`, and ``(p-1)/p add``.

  Args:
    nbytes, workers, link: as for :func:`all_gather_seconds`.
    add: the seconds in which a worker adds two arrays of ``nbytes``.
    algorithm: as for :func:`all_gather_seconds`.

  Raises:
    ValueError: ``add`` is below 0, or as for :func:`all_gather_seconds`.
  """
  rounds, seconds = _start("reduce_scatter", nbytes, workers, link, algorithm)
  share = (workers - 1) / workers
  return rounds * link.latency + share * (seconds + at_least_0("add", add))


def all_reduce_seconds(
  nbytes: float, workers: int, link: Link, *, add: float = 0.0, algorithm: Way = "ring"
) -> float:
  """Returns the seconds in which p workers get the sum of all their bytes.

  A reduce-scatter and an all-gather of p-ths: ``2 (p-1) latency + 2 (p-1)/p x +
  (p-1)/p add``, or ``2 lg(p)`` latencies.

  Args:
    nbytes, workers, link, add, algorithm: as for :func:`reduce_scatter_seconds`.

  Raises:
    ValueError: as for :func:`reduce_scatter_seconds`.
  """
  rounds, seconds = _start("all_reduce", nbytes, workers, link, algorithm)
  share = (workers - 1) / workers
  return 2 * rounds * link.latency + share * (2 * seconds + at_least_0("add", add))


def ppermute_seconds(
  nbytes: float, workers: int, link: Link, *, messages: float = 1
) -> float:
  """Returns the seconds in which a worker sends ``messages`` messages in a row.

  These are ``messages (latency + x)``, or 0 for a single worker. Through a switch, a
  worker that sends to p-1 others has p-1 messages (Dettmers 2016).

  Args:
    nbytes: the bytes of a message.
    workers, link: as for :func:`all_gather_seconds`.
    messages: the number of messages.

  Raises:
    ValueError: ``nbytes`` or ``messages`` is below 0, or p below 1.
  """
  _, seconds = _start("ppermute", nbytes, workers, link, "ring")
  times = at_least_0("messages", messages) if workers > 1 else 0
  return times * (link.latency + seconds)


def tree_seconds(nbytes: float, workers: float, link: Link) -> float:
  """Returns the seconds in which a binary tree of p workers adds up, or broadcasts.

  These are ``lg(p) (latency + x)`` (Wen et al. 2017, appendix B). The logarithm is a
  real number, so that p need not be a power of two.

  Args:
    nbytes: the bytes that a worker sends to another one.
    workers, link: as for :func:`all_gather_seconds`.

  Raises:
    ValueError: ``nbytes`` is below 0, or p below 1.
  """
  if not at_least_0("workers", workers) >= 1:
    raise ValueError(f"`workers` must be at least 1, got {workers!r}.")
  instance_of("link", Link, link)
  byte = link.byte_seconds("tree", int(workers))
  return math.log2(workers) * (link.latency + at_least_0("nbytes", nbytes) * byte)


def _start(
  collective: str, nbytes: float, workers: int, link: Link, algorithm: Way
) -> tuple[int, float]:
  """Returns the number of messages in a row, and the seconds of the bytes."""
  workers = count("workers", workers)
  instance_of("link", Link, link)
  one_of("algorithm", Way, algorithm)
  rounds = workers - 1
  if algorithm == "recursive":
    rounds = workers.bit_length() - 1
    if workers != 1 << rounds:
      raise ValueError(
        f'`workers` must be a power of two for algorithm="recursive", got {workers}.'
      )
  seconds = at_least_0("nbytes", nbytes) * link.byte_seconds(collective, workers)
  return rounds, seconds
