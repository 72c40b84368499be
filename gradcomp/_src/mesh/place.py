"""Reads from types where gradients are, and refuses types that contradict it.

Parameters must not be sharded over the axes of an exchange. JAX has already reduced the
gradient of a worker's own rows (FSDP, ZeRO-3): an exchange would average it with the
gradients of other workers' rows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from gradcomp._src.checks import see
from gradcomp._src.mesh import axes as mesh_axes
from gradcomp._src.mesh import study, types
from gradcomp._src.mesh.axes import AROUND, AxisName, as_axis_name, axis_names
from gradcomp._src.mesh.per_worker import of_all
from gradcomp._src.mesh.specs import axes_in, is_spec

GATHER_FIRST = (
  "the exchange would average different rows with each other. Gather the parameters "
  "before jax.grad, exchange whole gradients, and cut the result"
)
_name = lambda path: f"`updates`{jax.tree_util.keystr(path)}"


class Place(NamedTuple):
  """The workers of a step, and the kind of their gradients; samples have a mean."""

  axes: AxisName | None  # the axes to exchange over; None to exchange nothing
  workers: int = 1  # along these axes
  is_sum: bool = False  # whether gradients are addends of their sum
  others: Sequence[tuple[str, ...]] = ()  # over which leaves vary, too
  dtypes: Sequence[np.dtype] = ()  # the dtype of the update of each leaf

  @property
  def addends(self) -> int:
    """The divisor of an addend: the number of workers, or 1 for samples."""
    return self.workers if self.is_sum else 1

  def own(self, tree: Any) -> Any:
    """Returns a worker's own gradients: an addend times N."""
    times = lambda x: x * jnp.asarray(self.addends, x.dtype)
    return jax.tree.map(times, tree) if self.is_sum else tree


def place(
  updates: Any, axis_name: AxisName | None, *, params: Any = None, local: bool = False
) -> Place:
  """Returns the place in the types of gradients; ``local`` exchanges send nothing."""
  if axis_name is not None and not local:
    # Types show it under Explicit axes, and in a map that checks types; nowhere else.
    cut = lambda x: types.varying_axes(x) | axes_in(types.typed_spec(x))
    more = "; if it is whole, and gradcomp.defer_reduction has marked it, pass what was"
    check_whole("params", params, axis_name, cut, more=f"{more} marked")
  found = Place(None)
  if not of_all(updates) and not study.is_followed():
    found = _reduction(updates, study.studied_axes(axis_name), local)
  others = [types.other_axes(leaf, found.axes) for leaf in jax.tree.leaves(updates)]
  return found._replace(others=others)


def _reduction(updates: Any, axis_name: AxisName | None, local: bool) -> Place:
  """Returns the workers to exchange with, if any, and whether they have addends."""
  paths = jax.tree_util.tree_leaves_with_path(updates)
  addends = [types.unreduced_axes(leaf) for _, leaf in paths]
  found = frozenset().union(*addends)
  if found:
    # A gradient typed {U:data} is the sum of the devices' addends, and that sum is the
    # gradient of the loss over the whole batch. In a map the loss is a mean over the
    # worker's part of the batch, so that the gradient is the mean.
    return _addends(paths, addends, axis_name)
  if axis_name is None:
    if (manual := mesh_axes.manual_axes()) and not local:
      raise ValueError(
        f"`axis_name` must name the axis to average over inside a map with the axes "
        f'{manual}, got None; pass axis_name=, or exchange="local" to exchange nothing.'
      )
    return Place(None)
  mesh, kind = types.around(updates, axis_name)
  if not paths and kind != AxisType.Manual:
    return Place(None)
  if kind == AxisType.Explicit:
    if mesh.size > 1:
      raise _already_reduced(paths[0][0], axis_name)
    return Place(axis_name, is_sum=True)  # a sum of one, see unreduce
  workers = mesh_axes.require_size(axis_name, mesh)
  if types.is_typed(axis_name):
    for path, leaf in paths:
      if not types.varying_axes(leaf).issuperset(axis_names(axis_name)):
        raise _already_reduced(path, axis_name)
  return Place(axis_name, workers)


def _addends(paths: Any, addends: list[Any], axis_name: AxisName | None) -> Place:
  """Returns the unreduced axes of every leaf; ValueError if leaves differ."""
  mesh = types.mesh_of([leaf for _, leaf in paths])
  names = tuple(name for name in mesh.axis_names if name in addends[0])
  if axis_name is not None:
    names = axis_names(axis_name)
  for (path, _), axes in zip(paths, addends, strict=True):
    if axes != set(names):
      raise ValueError(
        f"{_name(path)} must be unreduced over {names}, like `axis_name` or the first "
        f"gradient, got one over {tuple(sorted(axes))}; take the gradients of "
        "gradcomp.value_and_grad, or leave axis_name out to take it from the type."
      )
  workers = math.prod(mesh.shape[name] for name in names)
  return Place(as_axis_name(names), workers, is_sum=True)


def _already_reduced(path: Any, axis_name: AxisName) -> ValueError:
  """Returns the error for a gradient that is equal on all workers."""
  return ValueError(
    f"{_name(path)} must differ between the workers of {axis_name!r}, but its type "
    "says that it is equal on all: inside jax.shard_map, and under Explicit axes, "
    "jax.grad with respect to replicated parameters has already all-reduced it in full "
    "precision. Use gradcomp.value_and_grad in place of jax.value_and_grad, or "
    f"gradcomp.defer_reduction(params, axis_name=axis_name) before jax.grad. {AROUND} "
    "Layers of compress_in_scan are means already: leave them out by optax.partition."
    f"{see('says-that-it-is-equal-on-all')}"
  )


def _cut_over(x: Any) -> frozenset[str]:
  """Returns the axes that shard an array or a spec; of traced arrays Explicit ones."""
  return axes_in(x if is_spec(x) else types.placed_spec(x))


def leaves_cut(
  tree: Any,
  axis_name: AxisName,
  cut_over: Callable[[Any], frozenset[str]] = _cut_over,
) -> Iterator[tuple[str, list[str], Any]]:
  """Yields the path, the axes and the type of each leaf that these axes cut."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec):
    if cut := cut_over(leaf).intersection(axis_names(axis_name)):
      got = leaf if is_spec(leaf) else jax.typeof(leaf)
      yield jax.tree_util.keystr(path), sorted(cut), got


def check_whole(
  name: str,
  tree: Any,
  axis_name: AxisName,
  cut_over: Callable[[Any], frozenset[str]] = _cut_over,
  more: str = "",
) -> None:
  """Raises ValueError for arrays or specs of an argument that the axes shard."""
  for path, cut, got in leaves_cut(tree, axis_name, cut_over):
    raise ValueError(
      f"`{name}`{path} must be whole along {axis_name!r}, which gradients are averaged "
      f"over, but is sharded over {cut}, got {got}: {GATHER_FIRST}{more}."
      f"{see('averaged-over-but-is-sharded-over')}"
    )


def unaveraged(updates: Any, params: Any) -> list[str]:
  """Returns the paths of updates that vary over more axes than their parameters."""
  axes_of = lambda x: types.varying_axes(x) | types.unreduced_axes(x)
  leaves = jax.tree_util.tree_leaves_with_path(updates)
  allowed = [*map(axes_of, jax.tree.leaves(params))] or [frozenset()] * len(leaves)
  return [
    jax.tree_util.keystr(path)
    for (path, x), axes in zip(leaves, allowed, strict=True)
    if not axes_of(x) <= axes
  ]
