"""Parsing of ``workers=``: the sizes of the workers' axes."""

from collections.abc import Callable, Mapping
from typing import Any

from gradcomp._src.checks import static_integer
from gradcomp._src.mesh.axes import AxisName

# Of one axis; of two that a transformation names both; or of each axis by its name.
WorkerSizes = int | tuple[int, int] | Mapping[str, int]

_RULE = (
  "a number of workers, 1 or more, a tuple of the sizes of two axes, or the sizes of "
  "axes by their names, like {'host': 2, 'chip': 4}"
)


def sizes_of(workers: WorkerSizes) -> tuple[tuple[int, ...], dict[str, int]]:
  """Returns the sizes of the workers' axes, and by name if they have names."""
  by_name = dict(workers) if isinstance(workers, Mapping) else {}
  alone: Any = workers if isinstance(workers, tuple) else (workers,)
  given = tuple(by_name.values()) or alone
  if not given or (len(given) > 2 and not by_name):
    raise ValueError(f"`workers` must be {_RULE}, got {workers!r}.")
  sizes = tuple(static_integer("workers", _RULE, size) for size in given)
  if min(sizes) < 1:
    raise ValueError(f"`workers` must be {_RULE}, got {workers!r}.")
  return sizes, dict(zip(by_name, sizes, strict=False))


def only_named(by_name: Mapping[str, int]) -> Callable[[str], int | None]:
  """Returns a function that refuses axes without a size, if any axis has a name."""

  def known(axis: str) -> int | None:
    if by_name:
      raise ValueError(
        f"`workers` must have the size of each axis that is exchanged over, got "
        f"{dict(by_name)} and an exchange over {axis!r}; add its size."
      )
    return None

  return known


def check_both(axis_name: AxisName | None, workers: WorkerSizes) -> None:
  """Raises ValueError for two axes and the size of only one."""
  known = isinstance(workers, tuple | Mapping) and len(workers) > 1
  if isinstance(axis_name, tuple) and len(axis_name) == 2 and not known:
    raise ValueError(
      "`workers` must be the sizes of both axes, (between, inside), for "
      f'exchange="hierarchical" over two axes, got {workers}.'
    )
