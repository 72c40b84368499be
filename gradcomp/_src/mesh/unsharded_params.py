"""Checks that parameters are not sharded over the axes of an exchange.

JAX has already reduced the gradient of a worker's own rows (FSDP, ZeRO-3). An exchange
would average it with the gradients of other workers' rows.
"""

from collections.abc import Callable
from typing import Any

import jax

from gradcomp._src.checks import see
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.specs import is_spec, sharded_axes
from gradcomp._src.mesh.types import placed_spec, typed_spec, varying_axes

GATHER_FIRST = (
  "the exchange would average different rows with each other. Gather the parameters "
  "before jax.grad, exchange whole gradients, and cut the result"
)


def check_whole_specs(name: str, specs: Any, axis_name: AxisName) -> None:
  """Raises ValueError if a ``PartitionSpec`` of the argument ``name`` has an axis."""
  _check(name, specs, axis_name, sharded_axes, is_spec)


def check_whole_arrays(name: str, tree: Any, axis_name: AxisName) -> None:
  """Raises ValueError for arrays that are sharded over the axes."""
  # Inside a transformed function this sees Explicit axes only.
  _check(name, tree, axis_name, lambda x: sharded_axes(placed_spec(x)))


def check_whole_params(params: Any, axis_name: AxisName) -> None:
  """Raises ValueError for parameters of ``update`` that differ between the workers."""
  # Types show it under Explicit axes, and in a map that checks types; nowhere else.
  differs = lambda x: varying_axes(x) | sharded_axes(typed_spec(x))
  more = (
    "; if it is whole, and gradcomp.defer_reduction has marked it, pass what was marked"
  )
  _check("params", params, axis_name, differs, more=more)


def _check(
  name: str,
  tree: Any,
  axis_name: AxisName,
  cut_over: Callable[[Any], frozenset[str]],
  is_leaf: Callable[[Any], bool] | None = None,
  more: str = "",
) -> None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
    if cut := cut_over(leaf).intersection(axis_names(axis_name)):
      got = leaf if is_spec(leaf) else jax.typeof(leaf)
      raise ValueError(
        f"`{name}`{jax.tree_util.keystr(path)} must be whole along {axis_name!r}, "
        f"which gradients are averaged over, but is sharded over {sorted(cut)}, got "
        f"{got}: {GATHER_FIRST}{more}.{see('averaged-over-but-is-sharded-over')}"
      )
