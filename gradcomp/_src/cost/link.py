"""A link: its latency, its rate, and the factors of collectives on it."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gradcomp._src.cost.rules import above_0, at_least_0, count, made_from

if TYPE_CHECKING:  # at run time this would import JAX
  from jax.sharding import Mesh

_SIZES = (1 << 16, 1 << 20, 1 << 23, 1 << 26)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """The link that each worker sends and receives on, both at once.

  Attributes:
    latency: the seconds of a message without bytes.
    bytes_per_second: the rate of each direction.
    factor: for (collective, workers), the measured seconds of a byte as a multiple of
      the ideal ones; 1 for all that are not in it. Collectives are named as in
      :mod:`gradcomp.cost`, without ``_seconds``. A permutation counts the workers of
      its longest cycle: two of them swap.

  Raises:
    ValueError: the latency is below 0, the rate or a factor is not above 0, one of them
      is not finite, or a key is no pair of a name and a number of workers.

  Example:
    >>> factor = {("all_gather", 4): 1.5}
    >>> link = gradcomp.cost.Link(latency=50e-6, bytes_per_second=125e6, factor=factor)
    >>> round(gradcomp.cost.all_gather_seconds(1e6, 4, link), 6)
    0.03615
  """

  latency: float
  bytes_per_second: float
  factor: Mapping[tuple[str, int], float] = dataclasses.field(
    default_factory=dict, hash=False
  )

  def __post_init__(self) -> None:
    rate = above_0("bytes_per_second", self.bytes_per_second)
    object.__setattr__(self, "latency", at_least_0("latency", self.latency))
    object.__setattr__(self, "bytes_per_second", rate)
    if not isinstance(self.factor, Mapping):
      raise ValueError(
        f"`factor` must be a dict of (collective, workers), got {self.factor!r}."
      )
    factor = {}
    for key, value in self.factor.items():
      if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], str):
        raise ValueError(
          f"`factor` must have pairs of a collective and workers as keys, got {key!r}."
        )
      pair = (key[0], count(f"factor[{key!r}]'s workers", key[1]))
      factor[pair] = above_0(f"factor[{key!r}]", value)
    object.__setattr__(self, "factor", factor)

  def byte_seconds(self, collective: str, workers: int) -> float:
    """Returns the seconds of a byte in a collective of ``workers`` workers."""
    return self.factor.get((collective, workers), 1.0) / self.bytes_per_second

  @classmethod
  def measure(
    cls,
    mesh: "Mesh",
    *,
    axis_name: str | tuple[str, ...] | None = None,
    sizes: Sequence[int] = _SIZES,
    repeats: int = 2,
    progress: bool = True,
  ) -> "Link":
    """Measures the links between the devices of a mesh, in a few seconds.

    It times the collectives that gradcomp calls, and swaps between pairs of workers if
    they are even in number and on one axis. For each it draws the line ``a + b bytes``
    with the least squares of relative errors. The rate is the fastest collective's, and
    the latency is the median over all.

    Args:
      mesh: the mesh. If its devices belong to several processes, all of them must call
        this at the same time.
      axis_name: the axes of the workers; by default all of the mesh.
      sizes: the bytes that a worker sends, at least two different ones. All together
        take about ``6 repeats sum(sizes) / rate`` seconds, 7 at 1 Gbit/s. Choose
        smaller ones for slower links.
      repeats: the number of times that each size is sent; the median counts.
      progress: whether the first process prints a line for each collective.

    Returns:
      The link, the same in all processes.

    Raises:
      ValueError: there are less than two workers, or two sizes, or no repeat.
    """
    from gradcomp._src.cost.measure import measured_link

    return measured_link(mesh, axis_name, sizes, repeats, progress)

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the link to a file, as JSON."""
    factor = [[*key, value] for key, value in sorted(self.factor.items())]
    content = dataclasses.asdict(self) | {"factor": factor}
    pathlib.Path(path).write_text(json.dumps(content, indent=1) + "\n")

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "Link":
    """Reads a link that :meth:`save` wrote.

    Raises:
      ValueError: the file holds something else.
    """
    with made_from(path, "Link.save") as content:
      factor = {(name, workers): value for name, workers, value in content["factor"]}
      return cls(**content | {"factor": factor})
