"""Dettmers's model of AlexNet on 4 and on 96 GPUs: how much faster than on one.

Convolutions are data-parallel. Fully connected layers are model-parallel on 4 GPUs: a
sub-batch's activations travel while the one before is computed. On 96 GPUs in 32 nodes
the activations of the last convolution travel, and hide under a matrix product.

Times are seconds, and sizes bytes. A number that is out of its range, or in no table of
the paper, raises ValueError.

Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, section 5.
"""

import math
from typing import Literal, NamedTuple

from gradcomp._src.checks import one_of
from gradcomp._src.cost.rules import above_0, at_least_0, count

# Tables 3, 4 and 5. Where they contradict each other, the rows hold what reproduces
# the paper's results; benchmarks/models/errata.md lists every repair.
KIB = 1024


# Tables 3 and 4, the seconds of transfers of activations, by bits, and of the work that
# hides each. In the order of section 5.1.2: forward, then backward, then the update.
TRANSFERS = {
  32: (0.9e-3, 1.1e-3, 1.1e-3, 0.4e-3, 1.1e-3, 1.1e-3),
  8: (0.4e-3, 0.5e-3, 0.5e-3, 0.25e-3, 0.5e-3, 0.5e-3),
}
HIDES = (0.9e-3, 0.3e-3, 0.15e-3, 0.3e-3, 0.9e-3, 0.43e-3 + 0.13e-3 + 0.08e-3)


class Row(NamedTuple):
  """A row of table 5, with repaired latencies."""

  sub_batch: int  # the images of a pass
  # Of a message between two nodes, by bits. Those of 8 bits are an eighth of those of
  # 32 bits, as printed; a quarter would be right.
  nbytes: dict[int, float]
  latency: dict[int, float]  # the seconds of a message without bytes, by bits


ROWS = (
  Row(128, {32: 144 * KIB, 8: 18 * KIB}, {32: 0.035e-3, 8: 0.007e-3}),
  Row(256, {32: 288 * KIB, 8: 36 * KIB}, {32: 0.07e-3, 8: 0.01e-3}),
  Row(512, {32: 576 * KIB, 8: 72 * KIB}, {32: 0.1e-3, 8: 0.02e-3}),
  Row(1024, {32: 1152 * KIB, 8: 144 * KIB}, {32: 0.3e-3, 8: 0.04e-3}),
  # Printed as 2048, with 0.7 and 0.07 ms: table 6 was made with the row above.
  Row(2056, {32: 2312 * KIB, 8: 289 * KIB}, {32: 0.3e-3, 8: 0.04e-3}),
  # Printed with 0.06 ms at 8 bits.
  Row(12288, {32: 13872 * KIB, 8: 1734 * KIB}, {32: 5e-3, 8: 0.6e-3}),
)

Bits = Literal[8, 32]
Sizes = Literal["table", "derived"]
Penalty = Literal["nodes", "passes"]

NODES, GPUS = 32, 96
FORWARD_BACKWARD = 104.1e-3  # of AlexNet on one GPU, NervanaGPU's estimate
CONVNET2 = 177e-3  # the same with Krizhevsky's kernels
DENSE = 6.5e-3  # of the above, the fully connected layers
DENSE_PARALLEL = 3.34e-3  # the same, sharded over 4 GPUs
LAST_CONVOLUTION = 0.05e-3  # table 3: the one gradient that hides under nothing
PRINTED_PENALTY = {8: 2.55e-3, 32: 6.81e-3}  # whose terms add up to 7.01 for 32 bits
BYTES_PER_SECOND = 6e9  # InfiniBand
PCIE = 1 / 3  # of InfiniBand's time; not printed, but table 6 needs it
HIDDEN = 1.3e-3  # of a pass that a matrix product hides
# Table 5, of a dense layer's message. Those of 32 nodes are more than the 0.1 ms of the
# layer's matrix product, so that the model keeps these layers on one GPU (5.2.2).
DENSE_LATENCY = {128: 0.008e-3, 256: 0.015e-3}
ACTIVATIONS = 9216  # of an image after the last convolution
_BATCH = 12288


class Pass(NamedTuple):
  """The seconds of a step on the cluster."""

  single: float  # one transfer of a sub-batch's activations to all other nodes
  exposed: float  # all transfers of a step, as far as no computation hides them
  total: float  # with the fully connected layers of all passes


def dense_penalty_seconds(bits: Bits) -> float:
  """Returns the seconds of a step on 4 GPUs in which no computation hides a transfer.

  Of each transfer it is what its work does not hide, and five times the first one.
  """
  one_of("bits", Bits, bits)
  sync = TRANSFERS[bits]
  left = (max(0.0, x - hides) for x, hides in zip(sync, HIDES, strict=True))
  return sum(left) + 5 * sync[0]


def single_node_speedup(
  penalty: float, *, forward_backward: float = FORWARD_BACKWARD
) -> float:
  """Returns the speed-up of a node of 4 GPUs over one (section 5.1.3).

  ``4 T / (T - F + conv + 4 f + penalty)``, where F and f are the seconds of the fully
  connected layers on one GPU and sharded. There are as many sub-batches as GPUs.
  """
  whole = _whole(forward_backward)
  parallel = LAST_CONVOLUTION + 4 * DENSE_PARALLEL
  return 4 * whole / (whole - DENSE + parallel + at_least_0("penalty", penalty))


def message_bytes(sub_batch: int, bits: Bits) -> float:
  """Returns the bytes that a node sends to each other: its share of the activations."""
  one_of("bits", Bits, bits)
  return count("sub_batch", sub_batch) * ACTIVATIONS * bits / 8 / NODES


def latency_seconds(nbytes: float) -> float:
  """Returns a message's latency, interpolated between table 5's for 32 bits.

  The interpolation is linear in the logarithms of both. The row of 2056 is left out:
  table 6 was made with other numbers than those printed there.
  """
  x = math.log(above_0("nbytes", nbytes))
  rows = [row for row in ROWS if row.sub_batch != 2056]
  points = [(math.log(row.nbytes[32]), math.log(row.latency[32])) for row in rows]
  inner = sum(x > left for left, _ in points[1:-1])
  (x0, y0), (x1, y1) = points[inner], points[inner + 1]
  return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def cluster_pass(
  sub_batch: int, *, bits: Bits = 32, sizes: Sizes = "table", penalty: Penalty = "nodes"
) -> Pass:
  """Returns the seconds of the model-parallel part of a step on 32 nodes (section 5.2).

  A transfer takes ``31 (latency + 4/3 bytes / 6 GB/s)``. Where a matrix product of 1.3
  ms does not hide it, the paper multiplies the rest by 31, the other nodes, for any
  number of passes. ``penalty="passes"`` is what a pipeline has: the first transfer in
  full, and the rest of every other pass. ``sizes="derived"`` has :func:`message_bytes`
  and :func:`latency_seconds` in place of the paper's, of which those of 8 bits are too
  small by half.
  """
  one_of("bits", Bits, bits)
  one_of("sizes", Sizes, sizes)
  passes = max(1, round(_BATCH / count("sub_batch", sub_batch)))
  if sizes == "derived":
    nbytes = message_bytes(sub_batch, bits)
    latency = latency_seconds(nbytes)
  else:
    rows = [row for row in ROWS if row.sub_batch == sub_batch]
    if not rows:
      known = ", ".join(str(row.sub_batch) for row in ROWS)
      raise ValueError(f"`sub_batch` must be one of {known}, got {sub_batch!r}.")
    nbytes, latency = rows[0].nbytes[bits], rows[0].latency[bits]
  single = (NODES - 1) * (latency + (1 + PCIE) * nbytes / BYTES_PER_SECOND)
  exposed = exposed_seconds(single, HIDDEN, passes, penalty=penalty)
  return Pass(single, exposed, passes * DENSE + exposed)


def exposed_seconds(
  single: float,
  hidden: float,
  passes: int,
  *,
  penalty: Penalty = "passes",
  nodes: int = NODES,
) -> float:
  """Returns the seconds of a step's transfers that no computation hides.

  The computation of a pass hides ``hidden`` of the next one's transfer. The first is in
  full, and the rest of every other pass; the paper's rule has ``nodes`` less one.

  >>> exposed_seconds(2.0, 1.5, passes=4), exposed_seconds(2.0, 2.5, passes=4)
  (3.5, 2.0)
  >>> exposed_seconds(2.0, 1.5, passes=4, penalty="nodes")
  15.5
  """
  one_of("penalty", Penalty, penalty)
  left = at_least_0("single", single) - at_least_0("hidden", hidden)
  if left <= 0:
    return single
  if penalty == "nodes":
    return (count("nodes", nodes) - 1) * left
  return single + (count("passes", passes) - 1) * left


def cluster_speedup(
  total: float, *, forward_backward: float = FORWARD_BACKWARD
) -> float:
  """Returns the speed-up of the 96 GPUs over one: ``G T / (T - F + total)``."""
  whole = _whole(forward_backward)
  return GPUS * whole / (whole - DENSE + at_least_0("total", total))


def _whole(forward_backward: float) -> float:
  whole = above_0("forward_backward", forward_backward)
  if whole <= DENSE:
    raise ValueError(
      f"`forward_backward` must be above {DENSE}, the seconds of the fully connected "
      f"layers in it, got {forward_backward!r}."
    )
  return whole
