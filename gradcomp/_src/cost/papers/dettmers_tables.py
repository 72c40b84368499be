"""The times of Dettmers's tables 3, 4 and 5, in seconds.

Where these tables contradict each other, the rows here hold what reproduces the paper's
results; docs/results/papers.md lists every repair.
"""

from typing import NamedTuple

KIB = 1024


class Activation(NamedTuple):
  """A row of tables 3 and 4: seconds of a transfer, and of the work that hides it."""

  sync: dict[int, float]  # the transfer, by bits
  hides: float  # the computation


# In the order of the terms of section 5.1.2: forward, then backward, then the update.
TRANSFERS = (
  Activation({32: 0.9e-3, 8: 0.4e-3}, 0.9e-3),
  Activation({32: 1.1e-3, 8: 0.5e-3}, 0.3e-3),
  Activation({32: 1.1e-3, 8: 0.5e-3}, 0.15e-3),
  Activation({32: 0.4e-3, 8: 0.25e-3}, 0.3e-3),
  Activation({32: 1.1e-3, 8: 0.5e-3}, 0.9e-3),
  Activation({32: 1.1e-3, 8: 0.5e-3}, 0.43e-3 + 0.13e-3 + 0.08e-3),
)


class Row(NamedTuple):
  """A row of table 5, with repaired latencies.

  Attributes:
    sub_batch: the images of a pass.
    nbytes: of a message between two nodes, by bits. Those of 8 bits are an eighth of
      those of 32 bits, as printed; a quarter would be right.
    latency: the seconds of a message without bytes, by bits.
  """

  sub_batch: int
  nbytes: dict[int, float]
  latency: dict[int, float]


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
