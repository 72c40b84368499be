"""Checks workers and links, and measures links of a mesh."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from gradcomp._src.cost.cluster import Cluster
from gradcomp._src.cost.link import Link
from gradcomp._src.cost.rules import count

_WORKERS_RULE = "an integer of 1 or more, or a pair of them, (between, inside)"


def sizes_of(workers: Any) -> tuple[int, ...]:
  """Returns the sizes of the axes; ValueError for what is no number, nor a pair."""
  sizes = workers if isinstance(workers, tuple) else (workers,)
  if len(sizes) > 2 or not sizes:
    raise ValueError(f"`workers` must be {_WORKERS_RULE}, got {workers!r}.")
  return tuple(count("workers", size) for size in sizes)


def shares_memory(link: Any) -> bool:
  """Returns whether it is a mesh of emulated devices: CPUs of this process alone."""
  return isinstance(link, Mesh) and all(
    device.platform == "cpu" and device.process_index == jax.process_index()
    for device in link.devices.flat
  )


def cluster_of(workers: int | tuple[int, int], link: Any) -> Cluster:
  """Returns the workers with their links.

  Raises:
    ValueError: it is no link, or there are not as many links as axes.
  """
  sizes = sizes_of(workers)
  number = math.prod(sizes)
  links: tuple[Any, ...] = link if isinstance(link, tuple) else (link,)
  if isinstance(link, Mesh):
    if link.size != number:
      raise ValueError(
        f"`workers` must be the {link.size} devices of the mesh, got {workers!r}."
      )
    idle = shares_memory(link) or number == 1
    measured = Link(latency=0.0, bytes_per_second=1.0) if idle else Link.measure(link)
    links = (measured,) * len(sizes)
  if len(links) != len(sizes) or not all(isinstance(x, Link) for x in links):
    raise ValueError(
      "`link` must be a Link, for two axes a pair of them, (between, inside), or a "
      f"mesh to measure, got {link!r} for workers={workers!r}."
    )
  if len(sizes) == 1:
    return Cluster(workers=number, link=links[0])
  return Cluster(workers=number, link=links[0], inside=links[1], group_size=sizes[-1])
