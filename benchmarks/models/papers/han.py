"""Han's counts of steps, and APS's two all-reduces against one in half precision.

A ring of ``p`` nodes has ``2 (p-1)`` steps. The three-step all-reduce sends to a master
in groups of ``k``, adds up in a ring of the masters, and sends back. APS finds the
largest exponents first, a byte a leaf, and then adds up 8-bit numbers. Times are
seconds. A number that is out of its range, or an empty gradient, raises ValueError.

The paper gives the steps and one measured speed-up, and no latency or bandwidth.

Han et al., Auto-Precision Scaling for Distributed Deep Learning, 2021, sections 4.2 and
4.3.
"""

from collections.abc import Sequence

from gradcomp._src.cost.rules import above_0, at_least_0, count
from gradcomp.cost import Link, collective_seconds

RES5C = (2048 * 512, 512 * 512 * 3 * 3, 512 * 2048)  # figure 11's leaves, in elements
RES5C_WORKERS = 32
RES5C_SPEEDUP = 1.33  # of merged 8 bits over half precision
FREE = Link(latency=0.0, bytes_per_second=10e9)


def ring_steps(workers: int) -> int:
  """Returns the steps of a ring all-reduce: ``2 (p-1)``."""
  return 2 * (count("workers", workers) - 1)


def three_step_steps(workers: int, group_size: int) -> int:
  """Returns the steps of the three-step all-reduce: ``4 (k-1) + 2 (p/k - 1)``."""
  groups = _groups(workers, group_size)
  return 4 * (group_size - 1) + 2 * (groups - 1)


def best_group_sizes(workers: int) -> tuple[int, ...]:
  """Returns the group sizes k with the fewest steps, near ``sqrt(p/2)``, ascending."""
  sizes = [k for k in range(1, count("workers", workers) + 1) if workers % k == 0]
  fewest = min(three_step_steps(workers, size) for size in sizes)
  return tuple(k for k in sizes if three_step_steps(workers, k) == fewest)


def three_step_seconds(
  nbytes: float, workers: int, group_size: int, link: Link
) -> float:
  """Returns the seconds of the three-step all-reduce of ``nbytes``.

  A master receives ``k-1`` whole messages, and sends as many, one after the other. The
  masters' ring sends ``2 (p/k - 1)`` messages, each of which is a ``p/k``-th. So the
  fewest steps are not the least bytes, of which a plain ring sends ``2 (p-1)/p``.
  """
  groups = _groups(workers, group_size)
  messages = 2 * (group_size - 1)
  inside = collective_seconds("ppermute", nbytes, group_size, link, messages=messages)
  return inside + collective_seconds("all_reduce", nbytes, groups, link)


def half_seconds(
  elements: Sequence[int], workers: int, link: Link, *, merged: bool = False
) -> float:
  """Returns the seconds of ring all-reduces of leaves in half precision, or of one."""
  sent = [2 * size for size, _ in _messages(elements, merged)]
  return sum(collective_seconds("all_reduce", x, workers, link) for x in sent)


def aps_seconds(
  elements: Sequence[int], workers: int, link: Link, *, merged: bool = False
) -> float:
  """Returns the seconds of APS: all-reduces of a byte a leaf, and of a byte an element.

  >>> link = Link(latency=5.62e-6, bytes_per_second=10e9)
  >>> half = half_seconds(RES5C, 32, link, merged=True)
  >>> round(half / aps_seconds(RES5C, 32, link, merged=True), 2)
  1.33
  """
  return sum(
    collective_seconds("all_reduce", leaves, workers, link)
    + collective_seconds("all_reduce", size, workers, link)
    for size, leaves in _messages(elements, merged)
  )


def implied_latency_bytes(
  speedup: float, elements: Sequence[int], workers: int
) -> float:
  """Returns the bytes that a link sends in its latency, if merged APS has a speed-up s.

  With n elements in L leaves it is ``(2 n - s (n + L)) / (p (2 s - 1))``, between the
  speed-up of 1/2, where latency is all, and the one of 2, where bytes are.
  """
  ((size, leaves),) = _messages(elements, True)
  most = 2 * size / (size + leaves)
  if not 0.5 < at_least_0("speedup", speedup) <= most:
    raise ValueError(
      f"`speedup` must be above 0.5 and at most {most:.6g}, got {speedup!r}."
    )
  spare = 2 * size - speedup * (size + leaves)
  return spare / (count("workers", workers) * (2 * speedup - 1))


def one_leaf_gain(elements: int) -> float:
  """Returns the speed-up of 8 bits for a leaf, with the latency that res5c implies."""
  known = implied_latency_bytes(RES5C_SPEEDUP, RES5C, RES5C_WORKERS)
  case = [elements], RES5C_WORKERS, Link(latency=known / 10e9, bytes_per_second=10e9)
  return half_seconds(*case) / aps_seconds(*case)


def _groups(workers: int, group_size: int) -> int:
  groups, left = divmod(count("workers", workers), count("group_size", group_size))
  if left:
    raise ValueError(
      f"`group_size` must divide the {workers} workers, got {group_size!r}."
    )
  return groups


def _messages(elements: Sequence[int], merged: bool) -> list[tuple[float, int]]:
  """Returns the elements and the number of leaves of each message."""
  if not elements:
    raise ValueError("`elements` must have a leaf or more, got none.")
  sizes = [above_0("elements", size) for size in elements]
  return [(sum(sizes), len(sizes))] if merged else [(size, 1) for size in sizes]
