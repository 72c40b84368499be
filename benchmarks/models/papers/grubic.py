"""Grubic's measured speeds, a line fitted to them, and the dollars of a training.

The paper has tables and no formula. The seconds of an image, ``a + c w``, fit most of
its tables within some percent. Here ``w`` is the share of the bytes that are sent,
``a`` is the part that does not depend on the bits, computation and codec, and ``c`` is
the communication in ``float32``. An argument that is out of its range, or in no table
of the paper, raises ValueError.

Grubic et al., Synchronous Multi-GPU Deep Learning with Low-Precision Communication,
EDBT 2018, figures 2, 3, 10, 11 and 16.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gradcomp._src.cost.rules import above_0, at_least_0

# Images a second, by the bits of an element on the wire, for each number of GPUs; None
# where the text lost a number.
Speeds = dict[int | str, tuple[float | None, ...]]


def _figures() -> dict[str, dict[str, Speeds]]:
  """Reads figures 10 ("MPI") and 11 ("NCCL"), as far as the text has them, by network.

  In figure 10 most of AlexNet's rows are lost, ResNet110's rows of 32 and 16 bits,
  VGG19's row of 32 bits, and ResNet50's of 16. "1bit" is CNTK's 1-bit SGD, whose
  buckets are columns; "1bit*" has buckets of 64 elements. "alone" is one GPU.
  """
  found: dict[str, dict[str, Speeds]] = {}
  _, *rows = csv.reader(Path(__file__).with_suffix(".csv").read_text().splitlines())
  for primitive, network, bits, *speeds in rows:
    of = found.setdefault(primitive, {}).setdefault(network, {})
    key = int(bits) if bits.isdecimal() else bits
    of[key] = tuple(float(x) if x else None for x in speeds)
  return found


_FIGURES = _figures()
MPI, NCCL, _ALONE = _FIGURES.values()
GPUS = {"MPI": (2, 4, 8, 16), "NCCL": (2, 4, 8)}
ONE_GPU = {network: of[32][0] for network, of in _ALONE.items()}
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


class Fit(NamedTuple):
  """A line through the seconds an image."""

  computation: float  # a, the seconds that do not depend on the bits
  communication: float  # c, the seconds in float32
  error: float  # the largest relative error of a row's seconds

  @property
  def share(self) -> float:
    """The share of communication in a step in ``float32``."""
    return self.communication / (self.computation + self.communication)


def wire_share(bits: int) -> float:
  """Returns a gradient's bytes over ``float32``'s: ``(bits + 32 / bucket) / 32``."""
  if bits == 32:
    return 1.0
  if bits not in tuple(BUCKETS):
    raise ValueError(f"`bits` must be 32 or one of {tuple(BUCKETS)}, got {bits!r}.")
  return (bits + 32 / BUCKETS[bits]) / 32


def fit(images_per_second: Mapping[int, float]) -> Fit:
  """Fits ``a + c w`` to the seconds an image by bits, with the least squares."""
  if len(images_per_second) < 2:
    raise ValueError(
      "`images_per_second` must have two rows or more for a line, got "
      f"{len(images_per_second)}."
    )
  shares = np.array([wire_share(bits) for bits in images_per_second])
  speeds = [above_0("images_per_second", x) for x in images_per_second.values()]
  seconds = 1 / np.array(speeds)
  c, a = np.polyfit(shares, seconds, 1)
  error = np.abs((a + c * shares) / seconds - 1).max()
  return Fit(float(a), float(c), float(error))


def speeds_of(primitive: str, network: str, gpus: int) -> dict[int, float]:
  """Returns speeds by bits, of figure 10 ("MPI") or 11 ("NCCL"), but 1-bit SGD's."""
  counts = GPUS[primitive]
  if gpus not in counts:
    raise ValueError(f"`gpus` must be one of {counts}, got {gpus!r}.")
  at = counts.index(gpus)
  return {
    bits: speed
    for bits, row in _FIGURES[primitive][network].items()
    if isinstance(bits, int) and (speed := row[at]) is not None
  }


def size_gain(found: Fit, size: float, bits: int = 8) -> float:
  """Returns the speed-up over ``float32`` of a model with ``size`` times the bytes.

  ``(a + c m) / (a + c m w)``: figure 16, right, in which communication grows with the
  model and computation does not.
  """
  sent = found.communication * at_least_0("size", size)
  return (found.computation + sent) / (found.computation + sent * wire_share(bits))


def cheapest(network: str) -> tuple[int, float]:
  """Returns the GPUs of the cheapest machine with NCCL and 8 bits, and its dollars.

  There are machines of 1 and of 8 GPUs: NCCL had no more. One exchanges nothing, and
  its speed is that in ``float32``.

  >>> gpus, price = cheapest("VGG19")
  >>> gpus, round(price)
  (8, 1187)
  """
  if network not in NCCL:
    raise ValueError(f"`network` must be one of {tuple(NCCL)}, got {network!r}.")
  speeds = {1: ONE_GPU[network], 8: speeds_of("NCCL", network, 8)[8]}
  images = EPOCHS[network] * IMAGES
  dollars = {gpus: images / x / 3600 * HOUR[gpus] for gpus, x in speeds.items()}
  return min(dollars.items(), key=lambda pair: pair[1])


def sixteen_over_eight(network: str, bits: int | str) -> float:
  """Returns the speed-up of 16 GPUs over 8, with MPI, at twice the price."""
  *_, eight, sixteen = MPI.get(network, {}).get(bits, (None, None))
  if eight is None or sixteen is None:
    raise ValueError(
      "`network` and `bits` must be in MPI, with 8 and 16 GPUs, got "
      f"{network!r}, {bits!r}."
    )
  return sixteen / eight
