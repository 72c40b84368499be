"""The reduction that a gradient's type asks for, and errors of contradicting types."""

from typing import Any, NamedTuple

import jax

from gradcomp._src.checks import see
from gradcomp._src.mesh import axes as mesh_axes
from gradcomp._src.mesh import types
from gradcomp._src.mesh.axes import AROUND, AxisName, as_axis_name, axis_names
from gradcomp._src.mesh.study import is_followed, studied_axes

_name = lambda path: f"`updates`{jax.tree_util.keystr(path)}"


class Reduction(NamedTuple):
  """The axes to exchange over, if any; addends have a sum, and samples a mean."""

  axis_name: AxisName | None
  is_sum: bool


def reduction(updates: Any, axis_name: AxisName | None, *, local: bool) -> Reduction:
  """Returns the reduction that the types of the gradients ask for.

  ``local`` is for exchanges that send nothing. ValueError if the types contradict
  ``axis_name``, or gradients are already reduced.
  """
  if is_followed():
    return Reduction(None, is_sum=False)
  axis_name = studied_axes(axis_name)
  paths = jax.tree_util.tree_leaves_with_path(updates)
  addends = [types.unreduced_axes(leaf) for _, leaf in paths]
  found = frozenset().union(*addends)
  if found:
    # A gradient typed {U:data} is the sum of the devices' addends, and that sum is the
    # gradient of the loss over the whole batch. In a map the loss is a mean over the
    # worker's part of the batch, so that the gradient is the mean.
    return Reduction(_addends(paths, addends, axis_name), is_sum=True)
  if axis_name is None:
    if mesh_axes.manual_axes() and not local:
      raise ValueError(
        f"`axis_name` must name the axis to average over inside a map with the axes "
        f'{mesh_axes.manual_axes()}, got None; pass axis_name=, or exchange="local" to '
        "exchange nothing."
      )
    return Reduction(None, is_sum=False)
  if not paths and mesh_axes.bound_size(axis_name) is None:
    return Reduction(None, is_sum=False)
  mesh = types.mesh_of(updates)
  if mesh_axes.bound_size(axis_name) is None and types.is_explicit(mesh, axis_name):
    if mesh.size > 1:
      raise _already_reduced(paths[0][0], axis_name)
    return Reduction(axis_name, is_sum=True)  # a sum of one, see unreduce
  mesh_axes.require_size(axis_name, mesh)
  if types.is_typed(axis_name):
    for path, leaf in paths:
      if not types.varying_axes(leaf).issuperset(axis_names(axis_name)):
        raise _already_reduced(path, axis_name)
  return Reduction(axis_name, is_sum=False)


def _addends(paths: Any, addends: list[Any], axis_name: AxisName | None) -> AxisName:
  """Returns the unreduced axes of every leaf; ValueError if leaves differ."""
  mesh = types.mesh_of([leaf for _, leaf in paths])
  names = tuple(name for name in mesh.axis_names if name in addends[0])
  if axis_name is not None:
    names = axis_names(axis_name)
  for (path, _), axes in zip(paths, addends, strict=True):
    if axes != set(names):
      raise ValueError(
        f"{_name(path)} must be unreduced over {names}, as `axis_name` or the first "
        f"gradient says, but its type says {tuple(sorted(axes))}; gradients from "
        "gradcomp.value_and_grad are, or leave axis_name out to take it from the type."
      )
  return as_axis_name(names)


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
