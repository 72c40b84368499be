"""Wen's model of strong and weak scaling, with TernGrad's gradients or without.

A gradient of ``g`` bytes is added up in a tree: over the ``i`` GPUs of a machine, once
to its CPU, and over ``j`` machines. A step's computation is profiled on one GPU of one
machine, whose time contains one transfer to the CPU. Times are seconds. A number that
is out of its range raises ValueError.

The paper prints neither the profiled times nor the bandwidths, and figure 5 is a curve:
the presets here are assumptions, and only trends can be compared.

Wen et al., TernGrad, NeurIPS 2017, section 5 and appendix B.
"""

import math
from typing import NamedTuple

from benchmarks.models.papers.number import Number, Paper
from gradcomp._src.cost.rules import above_0, at_least_0, count
from gradcomp.cost import Link, collective_seconds


class Cluster(NamedTuple):
  """The links of machines with several GPUs."""

  between_gpus: Link  # of two GPUs in a machine
  to_cpu: Link  # of a GPU and its machine's CPU
  between_machines: Link  # the network


class Model(NamedTuple):
  """A network of section 5."""

  parameters: float
  products: float  # multiplications and additions of a forward pass of one image
  batch: int  # the images of a step on one GPU


ALEXNET = Model(61e6, 0.72e9, 128)
GOOGLENET = Model(7e6, 1.5e9, 64)
VGG_A = Model(133e6, 7.6e9, 32)
ALEXNET_LAST = 4096 * 1000 + 1000  # parameters of its last layer

GTX_1080, P100 = 8.9e12, 10.6e12  # floating-point operations a second, at most

_INSIDE = Link(latency=0.0, bytes_per_second=10e9)
_NVLINK = Link(latency=0.0, bytes_per_second=40e9)
ETHERNET = Cluster(_INSIDE, _INSIDE, Link(latency=50e-6, bytes_per_second=125e6))
INFINIBAND = Cluster(_NVLINK, _INSIDE, Link(latency=0.0, bytes_per_second=12.5e9))

PUSH_RATIO = 16.0  # 32 bits to 2; see base_3_ratio


def exchange_seconds(nbytes: float, gpus: int, machines: int, links: Cluster) -> float:
  """Returns the seconds of a gradient's exchange, with one transfer to the CPU.

  ``g/C_gwd lg i + g/C_cwd + (C_ncost + g/C_nwd) lg j``; logarithms are to base 2.

  Args:
    nbytes: g, the bytes of the gradient as it is sent.
    gpus, machines: i, the GPUs of a machine, and j.
    links: the links' latencies and rates.
  """
  to_cpu = collective_seconds("tree", nbytes, 2, links.to_cpu)
  return _added_seconds(nbytes, gpus, machines, links) + to_cpu


def strong_scaling_seconds(
  profiled: float,
  nbytes: float,
  gpus: int,
  machines: int,
  links: Cluster,
  *,
  profiled_bytes: float | None = None,
) -> float:
  """Returns the seconds of a step with its batch divided over all GPUs (equation 15).

  ``(T - g/C_cwd) / (i j) + T_comm(i, j)``.

  Args:
    profiled: T, the seconds of the step on one GPU, with a transfer to the CPU.
    nbytes, gpus, machines, links: as for :func:`exchange_seconds`.
    profiled_bytes: of the gradient in that transfer, in ``float32`` if only the
      exchange is compressed; ``nbytes`` by default.

  Raises:
    ValueError: ``profiled`` is not above the transfer that is part of it.

  >>> round(strong_scaling_seconds(0.5, 244e6, 4, 1, ETHERNET), 9)
  0.1921
  """
  sent = nbytes if profiled_bytes is None else profiled_bytes
  transfer = collective_seconds("tree", sent, 2, links.to_cpu)
  computation = above_0("profiled", profiled) - transfer
  if computation <= 0:
    raise ValueError(
      "`profiled` must be above the seconds of the gradient's transfer to the CPU, "
      f"{transfer}, got {profiled!r}."
    )
  workers = count("gpus", gpus) * count("machines", machines)
  return computation / workers + exchange_seconds(nbytes, gpus, machines, links)


def weak_scaling_seconds(
  profiled: float, nbytes: float, gpus: int, machines: int, links: Cluster
) -> float:
  """Returns the seconds of a step in which each GPU has a batch of its own (17).

  ``T + g/C_gwd lg i + (C_ncost + g/C_nwd) lg j``, with the transfer to the CPU in T.

  Args:
    profiled, nbytes, gpus, machines, links: as for :func:`strong_scaling_seconds`.

  >>> round(weak_scaling_seconds(0.5, 244e6, 4, 2, ETHERNET), 9)
  2.50085
  >>> round(weak_scaling_seconds(0.5, 244e6 / 16, 4, 2, ETHERNET), 9)
  0.6251
  """
  added = _added_seconds(nbytes, gpus, machines, links)
  return above_0("profiled", profiled) + added


def gain(
  profiled: float,
  nbytes: float,
  gpus: int,
  machines: int,
  links: Cluster,
  *,
  ratio: float = PUSH_RATIO,
) -> float:
  """Returns the speed-up of weak scaling with gradients ``ratio`` times smaller.

  Args:
    profiled, nbytes, gpus, machines, links: as for :func:`strong_scaling_seconds`.
    ratio: the factor of the bytes.

  >>> round(gain(0.5, 244e6, 4, 128, ETHERNET), 4)
  10.4709
  """
  dense = weak_scaling_seconds(profiled, nbytes, gpus, machines, links)
  small = nbytes / above_0("ratio", ratio)
  return dense / weak_scaling_seconds(profiled, small, gpus, machines, links)


def implied_profile(
  speedup: float,
  nbytes: float,
  gpus: int,
  machines: int,
  links: Cluster,
  *,
  ratio: float = PUSH_RATIO,
) -> float:
  """Returns the profiled seconds T at which :func:`gain` is the given speed-up.

  Args:
    speedup: the one to explain.
    nbytes, gpus, machines, links, ratio: as for :func:`gain`.

  Raises:
    ValueError: the speed-up is not above 1, or no T above 0 has it.

  >>> round(implied_profile(3.04, 244e6, 4, 2, ETHERNET), 3)  # AlexNet: see the docs
  0.794
  """
  if above_0("speedup", speedup) <= 1:
    raise ValueError(f"`speedup` must be above 1, got {speedup!r}.")
  dense = _added_seconds(nbytes, gpus, machines, links)
  sent = nbytes / above_0("ratio", ratio)
  small = _added_seconds(sent, gpus, machines, links)
  profiled = (dense - speedup * small) / (speedup - 1)
  if profiled <= 0:
    raise ValueError(
      f"`speedup` must be below {dense / small if small else 1.0}, that of a step "
      f"without computation, got {speedup!r}."
    )
  return profiled


def estimated_profile(model: Model, peak: float, *, share: float = 0.5) -> float:
  """Returns an estimate of T: six operations a product, at a share of the peak rate.

  A forward pass has two operations a product, and a backward pass four.

  Args:
    model: the network.
    peak: the operations a second of the GPU, at most.
    share: the part of these that a step reaches.

  >>> round(estimated_profile(ALEXNET, GTX_1080), 3)
  0.124
  """
  rate = above_0("peak", peak) * above_0("share", share)
  return 6 * model.batch * model.products / rate


def pull_bits(workers: int) -> int:
  """Returns the bits of an exact sum of ``workers`` ternary gradients with one scale.

  A sum is one of ``2 N + 1`` integers.

  Args:
    workers: N.

  >>> [pull_bits(n) for n in (2, 4, 8, 16, 64, 512)]
  [3, 4, 5, 6, 8, 11]
  """
  return (2 * count("workers", workers)).bit_length()


def pull_ratio(workers: int) -> float:
  """Returns the ratio of 32 bits to such a sum's bits, which may be fractions (3.2).

  Args:
    workers: N.

  >>> [round(pull_ratio(n), 2) for n in (2, 64)]
  [13.78, 4.56]
  """
  return 32 / math.log2(1 + 2 * count("workers", workers))


def base_3_ratio() -> float:
  """Returns the ratio of 32 bits to a ternary digit, log2(3) bits: 20.19, the least."""
  return 32 / math.log2(3)


def mixed_ratio(dense: float) -> float:
  """Returns the ratio of all bytes if a share of the elements stays in float32.

  ``1 / (d + (1 - d) / 16)``. The paper's recipe leaves the last layer in float32.

  Args:
    dense: d, the share of the elements in float32.

  >>> round(mixed_ratio(ALEXNET_LAST / ALEXNET.parameters), 2)
  7.97
  """
  if at_least_0("dense", dense) > 1:
    raise ValueError(f"`dense` must be a share, from 0 to 1, got {dense!r}.")
  return 1 / (dense + (1 - dense) / PUSH_RATIO)


def _added_seconds(nbytes: float, gpus: int, machines: int, links: Cluster) -> float:
  """Returns the seconds of the trees by themselves, in and between machines."""
  inside = collective_seconds("tree", nbytes, count("gpus", gpus), links.between_gpus)
  machines = count("machines", machines)
  return inside + collective_seconds("tree", nbytes, machines, links.between_machines)


# Printed numbers beside what the model gives.
MODELS = {"AlexNet": ALEXNET, "GoogLeNet": GOOGLENET, "VGG-A": VGG_A}
CLUSTERS = {  # figure 5: the links, and the rate of a GPU
  "1 Gbit/s Ethernet, GTX 1080": (ETHERNET, GTX_1080),
  "InfiniBand and NVLink, P100": (INFINIBAND, P100),
}
GPUS = 4  # of a machine


def numbers() -> list[Number]:
  """Recomputes the ratios of section 3, and the speed-ups of section 5."""
  paper = Paper("Wen")
  why = "the last digit was cut off, not rounded: 20.19"
  ours = base_3_ratio()
  paper.agrees("push, trits: 32 / log2(3)", "3.2", ours, 20.18, 0.001, why)
  exact = "the same quotient"
  paper.agrees("push, 2 bits", "3.2", PUSH_RATIO, 16, 0, exact)
  for workers in (2, 4, 8, 16, 64, 512):
    inputs = f"{workers} workers"
    paper.ours("pull, 32 / log2(1 + 2 N)", inputs, pull_ratio(workers))
    paper.ours("pull, bits of an integer", inputs, pull_bits(workers))
  _implied(paper)
  for name in CLUSTERS:
    for network in MODELS:
      for machines in (8, 64):
        inputs = f"{network}, {machines} x {GPUS} GPUs, {name}, estimated T"
        paper.ours("TernGrad's gain", inputs, estimated_gain(network, name, machines))
  return paper.numbers


def _implied(paper: Paper) -> None:
  """Adds the profiled times that the printed speed-ups need."""
  rows = (
    ("AlexNet", 3.04, 2, "1 Gbit/s Ethernet, GTX 1080"),
    ("VGG-A", 2.0, 128, "InfiniBand and NVLink, P100"),
  )
  for network, printed, machines, name in rows:
    model, (links, peak) = MODELS[network], CLUSTERS[name]
    inputs = f"{network}, {machines} x {GPUS} GPUs, {name}"
    why = "T and the bandwidths are not printed, and figure 5 is a curve"
    ours = estimated_gain(network, name, machines)
    paper.unknown("TernGrad's gain", f"{inputs}, estimated T", ours, printed, why)
    nbytes = 4 * model.parameters
    ours = implied_profile(printed, nbytes, GPUS, machines, links)
    paper.ours("T that the printed gain needs (s)", inputs, ours)
    if network == "AlexNet":
      ratio = mixed_ratio(ALEXNET_LAST / model.parameters)
      ours = implied_profile(printed, nbytes, GPUS, machines, links, ratio=ratio)
      why = f"bytes are {ratio:.2f} times fewer then, and not 16 times"
      what = "T that the printed gain needs, last layer in f32 (s)"
      paper.ours(what, inputs, ours, why)
    ours = estimated_profile(model, peak)
    paper.ours("T at half of the GPU's peak rate (s)", inputs, ours)


def estimated_gain(network: str, cluster: str, machines: int) -> float:
  """Returns TernGrad's gain in weak scaling, with an estimate of the profiled time."""
  model, (links, peak) = MODELS[network], CLUSTERS[cluster]
  profiled = estimated_profile(model, peak)
  return gain(profiled, 4 * model.parameters, GPUS, machines, links)
