"""Fang's model of RedSync: when a sparse all-gather beats a dense all-reduce.

Each of ``p`` workers sends ``D M`` of ``M`` elements, as entries of ``e`` bytes, to all
others by recursive doubling. A dense all-reduce halves and doubles recursively. Times
are seconds. A number that is out of its range raises ValueError.

The equations are images in our copy of the paper. They are rebuilt from the derivation
in its text.

Fang et al., RedSync, 2018, section 2.3.
"""

from typing import NamedTuple

from gradcomp._src.checks import instance_of
from gradcomp._src.cost.rules import above_0, at_least_0, count
from gradcomp.cost import Link, collective_seconds

# Bytes of an entry.
INDEX_AND_VALUE = 8  # the paper's RGC
INDEX_ALONE = 4  # the paper's ASQ, whose values are all equal
PACKED = 6  # gradcomp's TopK: 16 bits of position
PACKED_ALONE = 2  # gradcomp's TopK with quantize="asq"


class Speeds(NamedTuple):
  """The seconds an element of the work other than transfers."""

  select: float = 0.0  # to choose the entries, an element of the gradient
  scatter: float = 0.0  # to add a received entry to the gradient
  add: float = 0.0  # to add an element in a dense reduction


FREE = Speeds()
LINK = Link(latency=50e-6, bytes_per_second=125e6)  # 1 Gbit/s
SPEEDS = Speeds(select=0.6e-9, scatter=1e-9, add=0.2e-9)  # of a GPU, assumed


def sparse_seconds(
  elements: float,
  density: float,
  workers: int,
  link: Link,
  speeds: Speeds = FREE,
  *,
  entry_bytes: float = INDEX_AND_VALUE,
) -> float:
  """Returns the seconds of the sparse exchange of a power of two (equation 1).

  ``M select + lg(p) alpha + (p-1) M D e beta + p M D scatter``.
  """
  entries = at_least_0("elements", elements) * _density(density)
  nbytes = entries * above_0("entry_bytes", entry_bytes)
  sent = collective_seconds("all_gather", nbytes, workers, link, algorithm="recursive")
  instance_of("speeds", Speeds, speeds)
  select = at_least_0("speeds.select", speeds.select)
  scatter = at_least_0("speeds.scatter", speeds.scatter)
  return elements * select + sent + workers * entries * scatter


def dense_seconds(
  elements: float, workers: int, link: Link, speeds: Speeds = FREE
) -> float:
  """Returns the seconds of a dense all-reduce in ``float32`` (equation 2).

  ``2 lg(p) alpha + 2 (p-1)/p 4 M beta + (p-1)/p M add``.
  """
  instance_of("speeds", Speeds, speeds)
  add = at_least_0("elements", elements) * at_least_0("speeds.add", speeds.add)
  return collective_seconds(
    "all_reduce", 4 * elements, workers, link, add=add, algorithm="recursive"
  )


def gain(workers: int, entry_bytes: float) -> float:
  """Returns the dense seconds over the sparse ones of ResNet-50, at 1 Gbit/s."""
  elements, case = 25.557e6, (workers, LINK, SPEEDS)
  sparse = sparse_seconds(elements, 0.001, *case, entry_bytes=entry_bytes)
  return dense_seconds(elements, *case) / sparse


def bandwidth_ratio(
  density: float, workers: int, *, entry_bytes: float = INDEX_AND_VALUE
) -> float:
  """Returns the ratio of sparse to dense bytes: ``p D e / 8``."""
  entry_bytes = above_0("entry_bytes", entry_bytes)
  return count("workers", workers) * _density(density) * entry_bytes / 8


def crossover_workers(density: float, *, entry_bytes: float = INDEX_AND_VALUE) -> float:
  """Returns the workers at which sparse and dense bytes are equal: ``8 / (e D)``."""
  return 8 / (above_0("entry_bytes", entry_bytes) * _density(density))


def _density(value: float) -> float:
  if not above_0("density", value) <= 1:
    raise ValueError(f"`density` must be above 0 and at most 1, got {value!r}.")
  return float(value)
