"""Grubic's measured speeds, a line fitted to them, and the dollars of a training.

The paper has tables and no formula. The seconds of an image, ``a + c w``, fit most of
its tables within some percent. Here ``w`` is the share of the bytes that are sent,
``a`` is the part that does not depend on the bits, computation and codec, and ``c`` is
the communication in ``float32``. An argument that is out of its range, or in no table
of the paper, raises ValueError.

Grubic et al., Synchronous Multi-GPU Deep Learning with Low-Precision Communication,
EDBT 2018, figures 2, 3, 10, 11 and 16.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.models.papers.number import Number, Paper
from gradcomp._src.cost.rules import above_0, at_least_0

# Figures 10 and 11, as far as the text has them: images a second, by the bits of an
# element on the wire, for each number of GPUs; None where the text lost a number. In
# figure 10 most of AlexNet's rows are lost, ResNet110's rows of 32 and 16 bits, VGG19's
# row of 32 bits, and ResNet50's of 16. "1bit" is CNTK's 1-bit SGD, whose buckets are
# columns; "1bit*" has buckets of 64 elements.
Speeds = dict[int | str, tuple[float | None, ...]]

MPI_GPUS = (2, 4, 8, 16)
MPI: dict[str, Speeds] = {
  "AlexNet": {
    2: (None, None, 1076.50, 889.80),
    "1bit": (None, None, None, 849.40),
    "1bit*": (370.80, 476.50, 761.20, 712.70),
  },
  "ResNet50": {
    32: (80.80, 142.40, 247.90, 272.30),
    8: (92.60, 162.70, 313.70, 416.80),
    4: (93.90, 165.70, 326.10, 461.20),
    2: (93.30, 178.35, 330.45, 472.25),
    "1bit*": (88.10, 156.50, 296.70, 442.40),
  },
  "ResNet110": {
    8: (550.20, 960.10, 1193.10, 789.70),
    4: (571.10, 957.40, 1257.10, 784.30),
    2: (557.20, 973.10, None, 780.40),
    "1bit": (465.60, 643.30, 610.90, 406.90),
    "1bit*": (550.40, 884.80, 1156.70, 757.70),
  },
  "ResNet152": {
    32: (26.10, 45.00, 73.90, 113.50),
    16: (31.20, 54.50, 95.50, 151.00),
    8: (32.80, 62.70, 109.20, 182.50),
    4: (33.60, 60.20, 121.90, 203.20),
    2: (33.50, 64.35, 123.55, 208.50),
    "1bit": (10.55, 22.10, 41.40, 63.15),
    "1bit*": (30.40, 55.50, 108.10, 193.50),
  },
  "VGG19": {
    16: (24.80, 46.40, 35.80, 67.80),
    8: (24.20, 47.50, 119.50, 106.60),
    4: (27.00, 52.30, 151.65, 143.80),
    2: (24.60, 49.35, 160.35, 170.50),
    "1bit": (22.20, 43.15, 117.35, 120.60),
    "1bit*": (22.90, 44.80, 99.15, 134.30),
  },
  "BN-Inception": {
    32: (164.80, 316.75, 473.75, 500.40),
    16: (171.80, 337.10, 482.70, 592.30),
    8: (173.60, 342.50, 552.90, 696.30),
    4: (174.80, 346.90, 593.40, 743.30),
    2: (173.40, 343.70, 591.80, 747.50),
    "1bit": (127.60, 236.25, 336.15, 321.30),
    "1bit*": (170.30, 335.10, 480.50, 700.40),
  },
}

NCCL_GPUS = (2, 4, 8)
NCCL: dict[str, Speeds] = {
  "AlexNet": {
    32: (458.20, 625.00, 1138.30),
    16: (462.80, 632.10, 1157.60),
    8: (458.40, 641.80, 1214.80),
    4: (471.90, 659.40, 1247.70),
    2: (471.00, 661.60, 1229.70),
  },
  "ResNet50": {
    32: (93.80, 164.80, 291.10),
    16: (93.70, 164.50, 324.20),
    8: (94.00, 165.80, 297.40),
    4: (95.60, 167.90, 298.40),
    2: (95.50, 168.20, 304.10),
  },
  "ResNet152": {
    32: (33.60, 60.10, 112.10),
    16: (33.40, 59.80, 112.20),
    8: (33.70, 60.80, 115.10),
    4: (34.20, 62.10, 118.70),
    2: (34.30, 62.20, 119.90),
  },
  "VGG19": {
    32: (24.90, 48.70, 163.10),
    16: (24.90, 49.10, 168.00),
    8: (25.50, 50.50, 175.20),
    4: (25.60, 51.00, 179.50),
    2: (25.60, 51.10, 177.80),
  },
  "BN-Inception": {
    32: (175.30, 342.00, 486.70),
    16: (174.30, 342.70, 497.10),
    8: (174.50, 345.30, 510.10),
    4: (178.60, 349.00, 598.90),
    2: (177.20, 349.00, 608.20),
  },
}

# In 32 bits, on one GPU.
ONE_GPU = {
  "AlexNet": 240.80,
  "BN-Inception": 88.30,
  "ResNet50": 47.20,
  "ResNet110": 343.70,
  "ResNet152": 16.90,
  "VGG19": 12.40,
}

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

  Args:
    table: a network of ``MPI`` or ``NCCL``.
    counts: ``MPI_GPUS`` or ``NCCL_GPUS``.
    gpus: one of ``counts``.

  Returns:
    The images per second, by bits, but for numbers that the text lost.
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

  >>> alexnet = fit(column(NCCL["AlexNet"], NCCL_GPUS, 8))
  >>> [round(size_gain(alexnet, m), 2) for m in (1, 8, 64)]
  [1.07, 1.51, 2.85]
  """
  sent = found.communication * at_least_0("size", size)
  return (found.computation + sent) / (found.computation + sent * wire_share(bits))


def dollars(
  epochs: float, images_per_second: float, hour: float, images: float = IMAGES
) -> float:
  """Returns the dollars of a training run: figure 16, left.

  Args:
    epochs: the number of them.
    images_per_second: the speed of all GPUs together.
    hour: the dollars of all GPUs together for an hour.
    images: those of an epoch.

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

  >>> gpus, price = cheapest("VGG19")
  >>> gpus, round(price)
  (8, 1187)
  """
  if network not in NCCL:
    raise ValueError(f"`network` must be one of {tuple(NCCL)}, got {network!r}.")
  speeds = {1: ONE_GPU[network], 8: column(NCCL[network], NCCL_GPUS, 8)[8]}
  price = lambda gpus: dollars(EPOCHS[network], speeds[gpus], HOUR[gpus])
  return min(((gpus, price(gpus)) for gpus in speeds), key=lambda pair: pair[1])


def sixteen_over_eight(network: str, bits: int | str) -> float:
  """Returns the speed-up of 16 GPUs over 8, with MPI, at twice the price.

  Below 2, an image costs more on 16.

  Args:
    network: a name in ``MPI``.
    bits: the bits of an element, or the name of 1-bit SGD there.

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


# Printed numbers beside what the model gives.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_OUTLIER = ("VGG19", 8)  # a row of 16 bits that no line fits: 35.8 images a second
_ROWS = 4  # of a column, from which on a line through them says anything


def numbers() -> list[Number]:
  """Recomputes figure 16, and what sections 1 and 5 say of figures 10 and 11."""
  paper = Paper("Grubic")
  _fits(paper)
  _gains(paper)
  _scaling(paper)
  _setup(paper)
  _dollars(paper)
  return paper.numbers


def speeds_of(primitive: str, name: str, gpus: int) -> dict[int, float]:
  """Returns a network's speeds by bits, of figure 10 ("MPI") or 11 ("NCCL")."""
  if primitive == "MPI":
    return column(MPI[name], MPI_GPUS, gpus)
  return column(NCCL[name], NCCL_GPUS, gpus)


def fits() -> dict[tuple[str, str, int], Fit]:
  """Fits the columns of four rows or more, by primitive, network and GPUs."""
  columns = [
    *(("MPI", name, gpus) for name in MPI for gpus in MPI_GPUS),
    *(("NCCL", name, 8) for name in NCCL),
  ]
  found = {}
  for place in columns:
    if len(speeds := speeds_of(*place)) >= _ROWS:
      found[place] = fit(speeds)
  return found


def _fits(paper: Paper) -> None:
  for (primitive, name, gpus), found in fits().items():
    inputs = f"{primitive}, {name}, {gpus} GPUs"
    why = f"largest error {found.error:.1%}"
    if (name, gpus) == _OUTLIER:
      why += ": the row of 16 bits is an outlier"
    paper.ours("a (ms an image)", inputs, 1e3 * found.computation, why)
    paper.ours("c (ms an image)", inputs, 1e3 * found.communication, why)
    paper.ours("communication in f32 (%)", inputs, 100 * found.share, why)


def _gains(paper: Paper) -> None:
  """Adds speed-ups of low precision, and of reshaping."""
  vgg = fits()["MPI", "VGG19", 16]
  ours = speeds_of("MPI", "VGG19", 16)[2] * vgg.seconds(32)
  why = "the row of 32 bits is lost: this is the fit's. The paper has more than 5"
  inputs = "MPI, VGG19, 16 GPUs, 2 bits"
  paper.unknown("speed-up over f32 (5.2)", inputs, ours, 5, why)
  speeds = speeds_of("NCCL", "VGG19", 8)
  ours = speeds[4] / speeds[32]
  why = "figure 11 has 179.5 and 163.1 images a second"
  paper.wrong("speed-up over f32 (5.2)", "NCCL, VGG19, 8 GPUs, 4 bits", ours, 1.5, why)
  paper.wrong("speed-up over f32 (1)", "NCCL, VGG19, 8 GPUs, 4 bits", ours, 1.4, why)
  most = max(
    new / old
    for rows in MPI.values()
    if "1bit" in rows
    for old, new in zip(rows["1bit"], rows["1bit*"], strict=True)
    if old and new
  )
  why = '"up to": of AlexNet one pair is left'
  paper.unknown("gain of reshaping", "MPI, the largest", most, 4, why)
  inputs = "MPI, ResNet152, 16 GPUs"
  ours = 63.15 / 113.5
  paper.ours("speed of 1bit over f32", inputs, ours, "slower, as the paper says")
  alexnet = fits()["NCCL", "AlexNet", 8]
  speeds = speeds_of("NCCL", "AlexNet", 8)
  ours, printed = size_gain(alexnet, 1), speeds[8] / speeds[32]
  inputs = "NCCL, AlexNet, 8 GPUs, 8 bits"
  why = "the fit's error, 2.2 %"
  paper.agrees("figure 16, right: gain at its size", inputs, ours, printed, 0.022, why)
  for size in SIZES[1:]:
    inputs = f"AlexNet, {size} times its size"
    paper.ours("figure 16, right: gain", inputs, size_gain(alexnet, size))
  ours = 1 / wire_share(8)
  why = "a bucket's scale is 0.8 % of its bytes"
  paper.agrees("figure 16, right: limit", "8 bits, 512", ours, 4, 0.01, why)


def _scaling(paper: Paper) -> None:
  """Adds speeds over that of one GPU, of 16 over 8, and of NCCL over MPI."""
  one, what = ONE_GPU, "scaling"
  why = "the two numbers are exchanged, and neither is figure 10's"
  inputs = "MPI, ResNet152, 16 GPUs"
  table = speeds_of("MPI", "ResNet152", 16)
  ours = table[2] / one["ResNet152"]
  paper.wrong(f"{what}, quantised (5.3)", f"{inputs}, 2 bits", ours, 2, why)
  ours = table[32] / one["ResNet152"]
  paper.wrong(f"{what}, f32 (5.3)", f"{inputs}, 32 bits", ours, 5, why)
  why = "figure 10 has 849.4 images a second, and 240.8 on one GPU"
  ours = 849.4 / one["AlexNet"]
  paper.wrong(f"{what}, 1bit (5.3)", "MPI, AlexNet, 16 GPUs", ours, 8, why)
  ours = max(x for row in MPI["AlexNet"].values() for x in row if x)
  why = "with 2 bits and 8 GPUs"
  paper.ours(f"{what}, most", "MPI, AlexNet", ours / one["AlexNet"], why)
  usual = [name for name in NCCL if name != "VGG19"]  # its batch makes it faster
  ours = max(speeds_of("NCCL", name, 8)[32] / one[name] for name in usual)
  why = "figure 11 has 112.1 of ResNet152, and 16.9 on one GPU"
  paper.wrong(f"{what}, f32, most (5.3)", "NCCL, 8 GPUs, but VGG19", ours, 7, why)
  why = 'the paper has f32 "faster"; figure 11 has it slower with 2, 4 and 8 GPUs'
  for gpus in NCCL_GPUS:
    table = speeds_of("NCCL", "AlexNet", gpus)
    inputs = f"NCCL, AlexNet, {gpus} GPUs"
    paper.ours("speed of f32 over 4 bits (5.3)", inputs, table[32] / table[4], why)
  pairs = [
    speeds_of("NCCL", name, gpus)[32] > max(speeds_of("MPI", name, gpus).values())
    for name in NCCL
    for gpus in NCCL_GPUS
    if len(speeds_of("MPI", name, gpus)) >= _ROWS
  ]
  why = f'"can be faster": of {len(pairs)} columns in both figures'
  what = "columns where f32 by NCCL beats every one by MPI (5.2)"
  paper.ours(what, "figures 10 and 11", sum(pairs), why)
  for name, rows in MPI.items():
    for bits, row in rows.items():
      if row[2] and row[3]:
        ours = sixteen_over_eight(name, bits)
        label = f"{bits} bits" if isinstance(bits, int) else bits
        why = "16 are slower than 8" if ours < 1 else ""
        inputs = f"MPI, {name}, {label}"
        paper.ours("16 over 8 GPUs, at twice the price", inputs, ours, why)


def _setup(paper: Paper) -> None:
  """Adds what the text says of figures 1 and 2."""
  ours = TERAFLOPS["P100"] / TERAFLOPS["K80"]
  why = "figure 2 has 10.6 and 8.73 TFLOPS, and the paper about 40 % more"
  paper.wrong("speed of a P100 over a K80 (5.2)", "figure 2", ours, 1.4, why)
  why = "figure 1 has 50k"
  ours = VALIDATION_IMAGES
  paper.wrong("images of ImageNet to validate on (4.1)", "figure 1", ours, 1e5, why)


def _dollars(paper: Paper) -> None:
  """Adds figure 16, left."""
  price = {}
  for name in NCCL:
    gpus, price[name] = cheapest(name)
    inputs = f"{name}, {gpus} GPU" + "s" * (gpus > 1)
    paper.ours("dollars of a training", inputs, price[name])
  why = "two networks' prices, read off a plot"
  steps = (("AlexNet", "ResNet50", 600), ("ResNet50", "ResNet152", 1500))
  for first, second, printed in steps:
    ours = price[second] - price[first]
    what, inputs = "difference in dollars", f"{second} less {first}"
    paper.agrees(what, inputs, ours, printed, 0.15, why)
