"""Fang's model of RedSync: when a sparse all-gather beats a dense all-reduce.

Each of ``p`` workers sends ``D M`` of ``M`` elements, as entries of ``e`` bytes, to all
others by recursive doubling. A dense all-reduce halves and doubles recursively. Times
are seconds. A number that is out of its range raises ValueError.

The equations are images in our copy of the paper. They are rebuilt from the derivation
in its text.

Fang et al., RedSync, 2018, section 2.3.
"""

import math
from typing import NamedTuple

from benchmarks.models.papers.number import Number, Paper
from gradcomp._src.checks import instance_of
from gradcomp._src.cost.rules import above_0, at_least_0, count
from gradcomp.cost import Link, collective_seconds

# Bytes of an entry.
INDEX_AND_VALUE = 8  # the paper's RGC
INDEX_ALONE = 4  # the paper's ASQ, whose values are all equal
PACKED = 6  # gradcomp's TopK: 16 bits of position
PACKED_ALONE = 2  # gradcomp's TopK with quantize="asq"

WARM_UP = (0.25, 0.0625, 0.015625, 0.004, 0.001)  # the densities of section 2.5


class Speeds(NamedTuple):
  """The seconds an element of the work other than transfers."""

  select: float = 0.0  # to choose the entries, an element of the gradient
  scatter: float = 0.0  # to add a received entry to the gradient
  add: float = 0.0  # to add an element in a dense reduction


FREE = Speeds()


class Model(NamedTuple):
  """A row of table 1.

  Attributes:
    megabytes: of the parameters.
    gigaflops: of a forward pass of one sample. Those of AlexNet and VGG16 count a
      multiply-add once, and those of ResNet50 twice.
  """

  megabytes: float
  gigaflops: float


MODELS = {
  "ResNet44": Model(2.65, 0.20),
  "VGG16 on CIFAR-10": Model(59, 0.31),
  "AlexNet": Model(233, 0.72),
  "ResNet50": Model(103, 8.22),
  "VGG16": Model(528, 15.5),
  "LSTM on PTB": Model(204, 2.52),
  "LSTM on Wiki2": Model(344, 2.52),
}


def sparse_seconds(
  elements: float,
  density: float,
  workers: int,
  link: Link,
  speeds: Speeds = FREE,
  *,
  entry_bytes: float = INDEX_AND_VALUE,
) -> float:
  """Returns the seconds of the sparse exchange (equation 1).

  ``M select + lg(p) alpha + (p-1) M D e beta + p M D scatter``.

  Args:
    elements: M.
    density: D, the share of the elements that a worker sends.
    workers: p, a power of two.
    link: alpha, its latency, and beta, the seconds of a byte.
    speeds: the seconds of selecting and adding.
    entry_bytes: e.

  Raises:
    ValueError: a density outside of (0, 1], p no power of two, or a number below 0.

  >>> link = Link(latency=50e-6, bytes_per_second=125e6)
  >>> speeds = Speeds(select=0.6e-9, scatter=1e-9, add=0.2e-9)
  >>> dense = dense_seconds(25.557e6, 8, link, speeds)
  >>> round(dense / sparse_seconds(25.557e6, 0.001, 8, link, speeds), 2)
  52.91
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

  Args:
    elements, workers, link, speeds: as for :func:`sparse_seconds`.

  Raises:
    ValueError: a number is below 0, or p no power of two.
  """
  instance_of("speeds", Speeds, speeds)
  add = at_least_0("elements", elements) * at_least_0("speeds.add", speeds.add)
  return collective_seconds(
    "all_reduce", 4 * elements, workers, link, add=add, algorithm="recursive"
  )


def bandwidth_ratio(
  density: float, workers: int, *, entry_bytes: float = INDEX_AND_VALUE
) -> float:
  """Returns the ratio of sparse to dense bytes: ``p D e / 8``.

  Args:
    density, workers, entry_bytes: as for :func:`sparse_seconds`, but for any p.

  >>> bandwidth_ratio(0.001, 128), bandwidth_ratio(0.001, 128, entry_bytes=4)
  (0.128, 0.064)
  """
  entry_bytes = above_0("entry_bytes", entry_bytes)
  return count("workers", workers) * _density(density) * entry_bytes / 8


def crossover_density(
  elements: float,
  workers: int,
  link: Link,
  speeds: Speeds = FREE,
  *,
  entry_bytes: float = INDEX_AND_VALUE,
) -> float:
  """Returns the density at which sparse and dense take equal time; below, sparse wins.

  Args:
    elements, workers, link, speeds, entry_bytes: as for :func:`sparse_seconds`.

  Returns:
    The density. It is above 1 where sparse always wins, and negative where selecting by
    itself takes longer than dense.

  Raises:
    ValueError: no elements, or a single worker, who sends nothing.

  >>> fast = Link(latency=0.0, bytes_per_second=1e9)
  >>> round(crossover_density(1e6, 64, fast, entry_bytes=6), 4)
  0.0208
  """
  if count("workers", workers) == 1:
    raise ValueError("`workers` must be at least 2: one worker sends nothing.")
  elements = above_0("elements", elements)
  dense = dense_seconds(elements, workers, link, speeds)
  # The sparse seconds are linear in the density.
  whole = sparse_seconds(elements, 1.0, workers, link, speeds, entry_bytes=entry_bytes)
  fixed = elements * speeds.select + math.log2(workers) * link.latency
  return (dense - fixed) / (whole - fixed)


def crossover_workers(density: float, *, entry_bytes: float = INDEX_AND_VALUE) -> float:
  """Returns the workers at which sparse and dense bytes are equal: ``8 / (e D)``.

  Args:
    density, entry_bytes: as for :func:`sparse_seconds`.

  >>> crossover_workers(0.001), round(crossover_workers(0.001, entry_bytes=6))
  (1000.0, 1333)
  """
  return 8 / (above_0("entry_bytes", entry_bytes) * _density(density))


def union_density(density: float, workers: int) -> float:
  """Returns the share of the elements that any worker sends, if all choose freely.

  ``1 - (1-D)^p``. The paper measured 1.55 % for 16 workers at 0.1 %.

  Args:
    density, workers: as for :func:`bandwidth_ratio`.

  >>> round(union_density(0.001, 16), 5)
  0.01588
  """
  return 1 - (1 - _density(density)) ** count("workers", workers)


def _density(value: float) -> float:
  if not above_0("density", value) <= 1:
    raise ValueError(f"`density` must be above 0 and at most 1, got {value!r}.")
  return float(value)


# Printed numbers beside what the model gives.
WORKERS = (2, 4, 8, 16, 32, 64, 128)
ELEMENTS = 25.557e6  # of ResNet-50
DENSITY = 0.001
LINK = Link(latency=50e-6, bytes_per_second=125e6)
SPEEDS = Speeds(select=0.6e-9, scatter=1e-9, add=0.2e-9)  # of a GPU, assumed
ENTRIES = {
  "index and value, 8 bytes": INDEX_AND_VALUE,
  "ASQ, 4 bytes": INDEX_ALONE,
  "gradcomp, 6 bytes": PACKED,
  "gradcomp with ASQ, 2 bytes": PACKED_ALONE,
}


def numbers() -> list[Number]:
  """Recomputes sections 2.3 and 2.5, and the order of gains in 3.3."""
  paper = Paper("Fang")
  for name, entry_bytes in ENTRIES.items():
    ours = 100 * bandwidth_ratio(DENSITY, 128, entry_bytes=entry_bytes)
    what, inputs = "bytes over dense (%)", f"p = 128, D = 0.1 %, {name}"
    if entry_bytes == 8:
      why = "the same product"
      paper.agrees(what, inputs, ours, 12.8, 1e-9, why)
    elif entry_bytes == INDEX_ALONE:
      why = (
        "the paper draws 12.8 from equation 1, which it says is of quantised entries"
      )
      paper.wrong(what, inputs, ours, 12.8, why)
    else:
      paper.ours(what, inputs, ours)
  ours = 100 * bandwidth_ratio(0.015625, 64)
  inputs = "p = 64, D = 1.5625 %"
  paper.agrees(what, f"{inputs}, 8 bytes", ours, 100, 1e-9, "the same product")
  ours = 100 * bandwidth_ratio(0.015625, 64, entry_bytes=4)
  why = 'the paper says "for quantized RedSync", whose entries have 4 bytes'
  paper.wrong(what, f"{inputs}, ASQ, 4 bytes", ours, 100, why)
  why = "the workers' choices overlap a little more than free ones"
  ours = 100 * union_density(DENSITY, 16)
  paper.agrees("union of 16 workers (%)", "D = 0.1 %", ours, 1.55, 0.03, why)
  for name, entry_bytes in ENTRIES.items():
    ours = crossover_workers(DENSITY, entry_bytes=entry_bytes)
    paper.ours("workers at which bytes are equal", f"D = 0.1 %, {name}", ours)
  for workers in WORKERS:
    for entry_bytes in (8, 4):
      inputs = f"25.557 M, {workers} workers, 1 Gbit/s, {entry_bytes} bytes"
      paper.ours("dense over sparse seconds", inputs, gain(workers, entry_bytes))
  for density in WARM_UP:
    ours = bandwidth_ratio(density, 64)
    inputs = f"D = {density:.4%}, p = 64, 8 bytes"
    why = "dense instead" if ours >= 1 else "sparse"
    paper.ours("warm-up, bytes over dense", inputs, ours, why)
  for name, model in MODELS.items():
    ours = model.megabytes / model.gigaflops
    why = "counts two operations a multiply-add" if "50" in name else ""
    paper.ours("table 1, MB a Gflop", name, ours, why)
  return paper.numbers


def gain(workers: int, entry_bytes: float) -> float:
  """Returns the dense seconds over the sparse ones, at 1 Gbit/s."""
  dense = dense_seconds(ELEMENTS, workers, LINK, SPEEDS)
  sparse = sparse_seconds(
    ELEMENTS, DENSITY, workers, LINK, SPEEDS, entry_bytes=entry_bytes
  )
  return dense / sparse
