"""Wen's model of strong and weak scaling, with TernGrad's gradients or without.

A gradient of ``g`` bytes is added up in a tree: over the ``i`` GPUs of a machine, once
to its CPU, and over ``j`` machines. A step's computation is profiled on one GPU of one
machine, whose time T contains one transfer to the CPU. Times are seconds. A number that
is out of its range raises ValueError.

The paper prints neither the profiled times nor the bandwidths, and figure 5 is a curve:
the presets here are assumptions, and only trends can be compared.

Wen et al., TernGrad, NeurIPS 2017, section 5 and appendix B.
"""

import math
from typing import NamedTuple

from gradcomp._src.cost.rules import above_0, at_least_0, count
from gradcomp.cost import Link, collective_seconds


class Cluster(NamedTuple):
  """The links of machines with several GPUs."""

  between_gpus: Link  # of two GPUs in a machine
  to_cpu: Link  # of a GPU and its machine's CPU
  between_machines: Link  # the network


Where = tuple[int, int, Cluster]  # the GPUs of a machine, the machines, and the links


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

PUSH_RATIO = 16.0  # 32 bits to 2; 20.19 to a ternary digit, log2(3) bits: the least


def strong_scaling_seconds(
  profiled: float, nbytes: float, *where: *Where, profiled_bytes: float | None = None
) -> float:
  """Returns the seconds of a step with its batch divided over all GPUs (equation 15).

  ``(T - g/C_cwd) / (i j) + T_comm(i, j)``, where ``T_comm(i, j)`` is ``g/C_gwd lg i +
  g/C_cwd + (C_ncost + g/C_nwd) lg j``, with logarithms of 2. ``profiled_bytes`` are
  those of the transfer in T, in ``float32`` if only the exchange is compressed.

  >>> round(strong_scaling_seconds(0.5, 244e6, 4, 1, ETHERNET), 9)
  0.1921
  """
  gpus, machines, links = where
  to_cpu = lambda sent: collective_seconds("tree", sent, 2, links.to_cpu)
  transfer = to_cpu(nbytes if profiled_bytes is None else profiled_bytes)
  computation = above_0("profiled", profiled) - transfer
  if computation <= 0:
    raise ValueError(
      "`profiled` must be above the seconds of the gradient's transfer to the CPU, "
      f"{transfer}, got {profiled!r}."
    )
  workers = count("gpus", gpus) * count("machines", machines)
  return computation / workers + _added_seconds(nbytes, *where) + to_cpu(nbytes)


def weak_scaling_seconds(profiled: float, nbytes: float, *where: *Where) -> float:
  """Returns the seconds of a step in which each GPU has a batch of its own (17).

  >>> round(weak_scaling_seconds(0.5, 244e6, 4, 2, ETHERNET), 9)
  2.50085
  >>> round(weak_scaling_seconds(0.5, 244e6 / 16, 4, 2, ETHERNET), 9)
  0.6251
  """
  return above_0("profiled", profiled) + _added_seconds(nbytes, *where)


def gain(
  profiled: float, nbytes: float, *where: *Where, ratio: float = PUSH_RATIO
) -> float:
  """Returns the speed-up of weak scaling with gradients ``ratio`` times smaller."""
  dense = weak_scaling_seconds(profiled, nbytes, *where)
  small = nbytes / above_0("ratio", ratio)
  return dense / weak_scaling_seconds(profiled, small, *where)


def implied_profile(
  speedup: float, nbytes: float, *where: *Where, ratio: float = PUSH_RATIO
) -> float:
  """Returns the profiled seconds T at which :func:`gain` is the given speed-up."""
  if above_0("speedup", speedup) <= 1:
    raise ValueError(f"`speedup` must be above 1, got {speedup!r}.")
  dense = _added_seconds(nbytes, *where)
  small = _added_seconds(nbytes / above_0("ratio", ratio), *where)
  profiled = (dense - speedup * small) / (speedup - 1)
  if profiled <= 0:
    raise ValueError(
      f"`speedup` must be below {dense / small if small else 1.0}, that of a step "
      f"without computation, got {speedup!r}."
    )
  return profiled


def estimated_profile(model: Model, peak: float, *, share: float = 0.5) -> float:
  """Returns an estimate of T: six operations a product, at a share of the peak rate."""
  rate = above_0("peak", peak) * above_0("share", share)
  return 6 * model.batch * model.products / rate


def estimated_gain(
  model: Model, gpus: int, machines: int, links: Cluster, peak: float
) -> float:
  """Returns TernGrad's gain in weak scaling, with an estimate of the profiled time."""
  profiled = estimated_profile(model, peak)
  return gain(profiled, 4 * model.parameters, gpus, machines, links)


def pull_bits(workers: int) -> int:
  """Returns the bits of N ternary numbers' sum, one of ``2 N + 1``, with one scale."""
  return (2 * count("workers", workers)).bit_length()


def pull_ratio(workers: int) -> float:
  """Returns the ratio of 32 bits to such a sum's bits, which may be fractions (3.2)."""
  return 32 / math.log2(1 + 2 * count("workers", workers))


def mixed_ratio(dense: float) -> float:
  """Returns ``1 / (d + (1 - d) / 16)``, of all bytes with a share d in float32."""
  if at_least_0("dense", dense) > 1:
    raise ValueError(f"`dense` must be a share, from 0 to 1, got {dense!r}.")
  return 1 / (dense + (1 - dense) / PUSH_RATIO)


def _added_seconds(nbytes: float, gpus: int, machines: int, links: Cluster) -> float:
  """Returns the seconds of the trees by themselves, in and between machines."""
  inside = collective_seconds("tree", nbytes, count("gpus", gpus), links.between_gpus)
  machines = count("machines", machines)
  return inside + collective_seconds("tree", nbytes, machines, links.between_machines)
