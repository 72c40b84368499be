"""Calls of a function for each worker of axes that no map has bound."""

from collections.abc import Callable
from typing import Any

import jax

from gradcomp._src.checks import static_integer
from gradcomp._src.mesh.axes import AxisName, axis_names


def sizes_by_axis(argument: str, axis_name: AxisName, given: Any) -> dict[str, int]:
  """Returns the workers along each axis; ValueError that names the argument."""
  names = axis_names(axis_name)
  rule = (
    f"the number of workers of {axis_name!r}, 1 or more"
    if len(names) == 1
    else f"a tuple of the numbers of workers along {names}, each 1 or more"
  )
  counts = given if isinstance(given, tuple) else (given,)
  if len(counts) != len(names):
    raise ValueError(f"`{argument}` must be {rule}, got {given!r}.")
  sizes = [static_integer(argument, rule, count, least=1) for count in counts]
  return dict(zip(names, sizes, strict=True))


def on_each(
  function: Callable[[], Any], sizes: dict[str, int], *, stacked: bool
) -> Any:
  """Calls a function on each worker of emulated axes; rows ``[N, ...]`` if stacked.

  Otherwise JAX raises ValueError for results that differ between the workers.
  """
  for name, size in reversed(sizes.items()):
    out = 0 if stacked else None
    function = jax.vmap(function, out_axes=out, axis_name=name, axis_size=size)
  return function()
