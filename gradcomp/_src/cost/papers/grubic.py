"""Grubic's measured speeds, a line fitted to them, and the dollars of a training.

The paper has tables and no formula. The seconds of an image, ``a + c w``, fit most of
its tables within some percent. Here ``w`` is the share of the bytes that are sent,
``a`` is the part that does not depend on the bits, computation and codec, and ``c`` is
the communication in ``float32``.

Grubic et al., Synchronous Multi-GPU Deep Learning with Low-Precision Communication,
EDBT 2018, figures 2, 3, 10, 11 and 16.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gradcomp._src.cost.papers.grubic_tables import MPI as MPI
from gradcomp._src.cost.papers.grubic_tables import MPI_GPUS as MPI_GPUS
from gradcomp._src.cost.papers.grubic_tables import NCCL as NCCL
from gradcomp._src.cost.papers.grubic_tables import NCCL_GPUS as NCCL_GPUS
from gradcomp._src.cost.papers.grubic_tables import ONE_GPU as ONE_GPU
from gradcomp._src.cost.papers.grubic_tables import Speeds as Speeds
from gradcomp._src.cost.rules import above_0, at_least_0

__all__ = [
  "Fit",
  "cheapest",
  "column",
  "dollars",
  "fit",
  "sixteen_over_eight",
  "size_gain",
  "wire_share",
]

BUCKETS = {16: 8192, 8: 512, 4: 512, 2: 128}  # elements with one scale of 32 bits
EPOCHS = {  # figure 3
  "AlexNet": 112,
  "BN-Inception": 300,
  "ResNet50": 120,
  "ResNet152": 120,
  "VGG19": 80,
}
IMAGES = 1.3e6  # of an epoch of ImageNet
HOUR = {1: 0.9, 8: 7.2, 16: 14.4}  # dollars, of the EC2 instances of figure 2, by GPUs
DGX_1_HOUR = 50.0  # dollars, of 8 GPUs
TERAFLOPS = {"K80": 8.73, "P100": 10.6}  # of a GPU, figure 2
VALIDATION_IMAGES = 50_000  # of ImageNet, figure 1


class Fit(NamedTuple):
  """A line through the seconds an image."""

  computation: float  # a, the seconds that do not depend on the bits
  communication: float  # c, the seconds in float32
  error: float  # the largest relative error of a row's seconds

  @property
  def share(self) -> float:
    """The share of communication in a step in ``float32``."""
    return self.communication / (self.computation + self.communication)

  def seconds(self, bits: int) -> float:
    """Returns the seconds an image, with ``bits`` bits an element."""
    return self.computation + self.communication * wire_share(bits)


def wire_share(bits: int) -> float:
  """Returns the ratio of a gradient's bytes in the paper's setting to ``float32``.

  A bucket's scale has 32 bits: ``(bits + 32 / bucket) / 32``.

  Args:
    bits: of an element.

  Returns:
    The ratio, at most 1.

  Raises:
    ValueError: the paper has no setting with these bits.

  >>> [round(wire_share(bits), 4) for bits in (32, 16, 8, 4, 2)]
  [1.0, 0.5001, 0.252, 0.127, 0.0703]
  """
  if bits == 32:
    return 1.0
  if bits not in tuple(BUCKETS):
    raise ValueError(f"`bits` must be 32 or one of {tuple(BUCKETS)}, got {bits!r}.")
  return (bits + 32 / BUCKETS[bits]) / 32


def fit(images_per_second: Mapping[int, float]) -> Fit:
  """Fits ``a + c w`` to the seconds an image, with the least squares.

  Args:
    images_per_second: by the bits of an element, at least two of them.

  Returns:
    The line, with its largest error.

  Raises:
    ValueError: there are fewer than two, or a speed is not above 0.

  >>> found = fit(column(MPI["ResNet152"], MPI_GPUS, 16))
  >>> round(1e3 * found.computation, 2), round(1e3 * found.communication, 2)
  (4.41, 4.39)
  >>> round(found.error, 3), round(found.share, 2)
  (0.015, 0.5)
  """
  if len(images_per_second) < 2:
    raise ValueError(
      "`images_per_second` must have two rows or more for a line, got "
      f"{len(images_per_second)}."
    )
  shares = np.array([wire_share(bits) for bits in images_per_second])
  speeds = [above_0("images_per_second", x) for x in images_per_second.values()]
  seconds = 1 / np.array(speeds)
  terms = np.stack([np.ones_like(shares), shares], axis=1)
  (a, c), *_ = np.linalg.lstsq(terms, seconds, rcond=None)
  error = np.abs((terms @ (a, c) - seconds) / seconds).max()
  return Fit(float(a), float(c), float(error))


def column(table: Speeds, counts: tuple[int, ...], gpus: int) -> dict[int, float]:
  """Returns a table's speeds with ``gpus`` GPUs, by bits and without 1-bit SGD.

  Numbers that the text lost are left out.

  Args:
    table: a network of ``MPI`` or ``NCCL``.
    counts: ``MPI_GPUS`` or ``NCCL_GPUS``.
    gpus: one of ``counts``.

  Returns:
    The images per second, by bits.

  Raises:
    ValueError: it is none of them.
  """
  if gpus not in counts:
    raise ValueError(f"`gpus` must be one of {counts}, got {gpus!r}.")
  at = counts.index(gpus)
  return {
    bits: speed
    for bits, row in table.items()
    if isinstance(bits, int) and (speed := row[at]) is not None
  }


def size_gain(found: Fit, size: float, bits: int = 8) -> float:
  """Returns the speed-up over ``float32`` of a model with ``size`` times the bytes.

  ``(a + c m) / (a + c m w)``: figure 16, right, in which communication grows with the
  model and computation does not.

  Args:
    found: the line of the model.
    size: m, the factor of its bytes.
    bits: of an element.

  Returns:
    The speed-up.

  Raises:
    ValueError: ``size`` is below 0, or the paper has no setting with these bits.

  >>> alexnet = fit(column(NCCL["AlexNet"], NCCL_GPUS, 8))
  >>> [round(size_gain(alexnet, m), 2) for m in (1, 8, 64)]
  [1.07, 1.51, 2.85]
  """
  sent = found.communication * at_least_0("size", size)
  return (found.computation + sent) / (found.computation + sent * wire_share(bits))


def dollars(
  epochs: float, images_per_second: float, hour: float, images: float = IMAGES
) -> float:
  """Returns the price of a training run: figure 16, left.

  Args:
    epochs: the number of them.
    images_per_second: the speed of all GPUs together.
    hour: the dollars of all GPUs together for an hour.
    images: those of an epoch.

  Returns:
    The dollars.

  Raises:
    ValueError: a number is below 0, or no image a second.

  >>> round(dollars(EPOCHS["AlexNet"], ONE_GPU["AlexNet"], HOUR[1]))
  151
  """
  speed = above_0("images_per_second", images_per_second)
  seconds = at_least_0("epochs", epochs) * at_least_0("images", images) / speed
  return seconds / 3600 * at_least_0("hour", hour)


def cheapest(network: str) -> tuple[int, float]:
  """Returns the GPUs of the cheapest machine with NCCL and 8 bits, and its dollars.

  There are machines of 1 and of 8 GPUs: NCCL had no more. One exchanges nothing, and
  its speed is that in ``float32``.

  Args:
    network: a name in ``NCCL``.

  Returns:
    The number of GPUs, and the dollars.

  Raises:
    ValueError: figure 11 has no such network.

  >>> gpus, price = cheapest("VGG19")
  >>> gpus, round(price)
  (8, 1187)
  """
  if network not in NCCL:
    raise ValueError(f"`network` must be one of {tuple(NCCL)}, got {network!r}.")
  speeds = {1: ONE_GPU[network], 8: column(NCCL[network], NCCL_GPUS, 8)[8]}
  prices = {
    gpus: dollars(EPOCHS[network], speed, HOUR[gpus]) for gpus, speed in speeds.items()
  }
  return min(prices.items(), key=lambda item: item[1])


def sixteen_over_eight(network: str, bits: int | str) -> float:
  """Returns the speed-up of 16 GPUs over 8, with MPI, at twice the price.

  Below 2, an image costs more on 16.

  Args:
    network: a name in ``MPI``.
    bits: the bits of an element, or the name of 1-bit SGD there.

  Returns:
    The speed-up.

  Raises:
    ValueError: figure 10 has no such row, or the text lost one of its two numbers.

  >>> round(sixteen_over_eight("ResNet50", 32), 2)
  1.1
  """
  *_, eight, sixteen = MPI.get(network, {}).get(bits, (None, None))
  if eight is None or sixteen is None:
    raise ValueError(
      "`network` and `bits` must be in MPI, with 8 and 16 GPUs, got "
      f"{network!r}, {bits!r}."
    )
  return sixteen / eight
