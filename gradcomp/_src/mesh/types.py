"""Reads in types where arrays are, refuses other places, and casts to types.

An array is ``unreduced`` over Explicit axes where each device holds an addend.

Parameters must not be sharded over the axes of an exchange. JAX has already reduced the
gradient of a worker's own rows (FSDP, ZeRO-3): an exchange would average it with the
gradients of other workers' rows.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from gradcomp._src.checks import see
from gradcomp._src.mesh import axes, study
from gradcomp._src.mesh.axes import AxisName, axes_in, axis_names, is_spec
from gradcomp._src.mesh.trees import of_all, with_rows

GATHER_FIRST = (
  "the exchange would average different rows with each other. Gather the parameters "
  "before jax.grad, exchange whole gradients, and cut the result"
)


def typed_spec(x: Any) -> PartitionSpec:
  """Returns the spec in the type of an array, which has Explicit axes only."""
  return jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else PartitionSpec()


def placed_spec(x: Any) -> PartitionSpec:
  """Returns the spec of an array; if it is concrete, also over Auto axes."""
  if isinstance(x, jax.core.Tracer):
    return typed_spec(x)
  sharding = getattr(x, "sharding", None)
  return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def is_traced(tree: Any) -> bool:
  """Returns True for arrays inside of a transformed function."""
  return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def unreduced_axes(tree: Any) -> frozenset[str]:
  """Returns the Explicit axes over which arrays are still sums of addends."""
  return frozenset().union(*(typed_spec(x).unreduced for x in jax.tree.leaves(tree)))


def sharded_over(tree: Any) -> frozenset[str]:
  """Returns the Explicit axes that shard any array of a tree."""
  return axes.axes_in(jax.tree.map(typed_spec, tree))


def typed_specs(tree: Any, axis_name: AxisName) -> Any:
  """Returns the specs in arrays' types, of these axes only; None for other leaves."""
  own = lambda x: axes.restrict_spec(typed_spec(x), axis_names(axis_name))
  return jax.tree.map(lambda x: own(x) if isinstance(x, jax.Array) else None, tree)


def varying_axes(x: Any) -> frozenset[str]:
  """Returns the manual axes over which ``x`` varies by its type."""
  if not isinstance(x, jax.Array):
    return frozenset()
  return frozenset(jax.typeof(x).manual_axis_type.varying)


def other_axes(x: Any, axis_name: AxisName | None) -> tuple[str, ...]:
  """Returns the axes but ``axis_name`` over which an array differs by its type."""
  own = () if axis_name is None else axis_names(axis_name)
  found = axes.axes_in(typed_spec(x)) | varying_axes(x)
  return tuple(sorted(found.difference(own)))


def mesh_of(tree: Any) -> AbstractMesh:
  """Returns the mesh in the types of a tree's arrays, or of ``jax.set_mesh``."""
  for leaf in jax.tree.leaves(with_rows(tree)):
    mesh = jax.typeof(leaf).sharding.mesh if isinstance(leaf, jax.Array) else None
    if mesh is not None and not mesh.empty:
      return mesh
  return jax.sharding.get_abstract_mesh()


def under_mesh_of(tree: Any) -> AbstractContextManager[Any]:
  """Sets the mesh that concrete arrays lie on, if none is set."""
  arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
  placed = [x.sharding for x in arrays if not is_traced(x)]
  meshes: set[Any] = {x.mesh for x in placed if isinstance(x, NamedSharding)}
  if len(meshes) == 1 and jax.sharding.get_abstract_mesh().empty:
    with contextlib.suppress(ValueError):  # where JAX traces, it can set none
      return jax.set_mesh(*meshes)
  return contextlib.nullcontext()


def around(
  tree: Any, axis_name: AxisName, mesh: Mesh | AbstractMesh | None = None
) -> tuple[Any, AxisType | None]:
  """Returns the mesh of a call, and the type of axes: Manual in maps, None if mixed."""
  context = jax.sharding.get_abstract_mesh()
  mesh = mesh_of(tree) if mesh is None else mesh
  mesh = context if context.manual_axes else mesh  # a map in another has its mesh
  if axes.bound_size(axis_name) is not None:
    return mesh, AxisType.Manual
  types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  kinds = {types.get(name) for name in axis_names(axis_name)}
  return mesh, kinds.pop() if len(kinds) == 1 else None


def is_typed(axis_name: AxisName) -> bool:
  """Returns True if the enclosing map types arrays as varying (``check_vma=True``)."""
  return axis_names(axis_name)[0] in varying_axes(lax.axis_index(axis_name))


def mark_varying(tree: Any, axis_name: AxisName | None, *like: Any) -> Any:
  """Types leaves as varying over axes, and over the axes of ``like``."""
  names = (axis_name,) if isinstance(axis_name, str) else axis_name or ()
  more = frozenset[str]().union(*map(varying_axes, like)).difference(names)
  names = (*names, *sorted(more))
  if not names or not is_typed(names):
    return tree

  def mark(x: jax.Array) -> jax.Array:
    varying = varying_axes(x)
    missing = tuple(name for name in names if name not in varying)
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(mark, tree)


def put(tree: Any, mesh: Mesh | AbstractMesh, axis_name: AxisName, spec: Any) -> Any:
  """Reshards arrays to a spec of axes, where types say how they are sharded."""
  if around(tree, axis_name, mesh)[1] != AxisType.Explicit:
    return tree
  return jax.reshard(tree, NamedSharding(mesh, spec))


def zeros(x: jax.Array) -> jax.Array:
  """Returns zeros like ``x`` that are equal on all workers."""
  spec, own = axes.entries(typed_spec(x)), jnp.zeros(x.shape, x.dtype)
  if not any(spec):
    return own
  return jax.reshard(own, NamedSharding(mesh_of(x), PartitionSpec(*spec)))


def mark_reduced(tree: Any, axis_name: AxisName) -> Any:
  """Types arrays so that gradients with respect to them are unreduced over the axes."""
  names = set(axis_names(axis_name))

  def mark(x: jax.Array) -> jax.Array:
    spec = PartitionSpec(*axes.entries(typed_spec(x)), reduced=names)
    return jax.reshard(x, NamedSharding(mesh_of(x), spec))

  return jax.tree.map(mark, tree)


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
    cut = lambda x: varying_axes(x) | axes_in(typed_spec(x))
    more = "; if it is whole, and gradcomp.defer_reduction has marked it, pass what was"
    check_whole("params", params, axis_name, cut, more=f"{more} marked")
  found = Place(None)
  if not of_all(updates) and not study.is_followed():
    found = _reduction(updates, study.studied_axes(axis_name), local)
  others = [other_axes(leaf, found.axes) for leaf in jax.tree.leaves(updates)]
  return found._replace(others=others)


def _reduction(updates: Any, axis_name: AxisName | None, local: bool) -> Place:
  """Returns the workers to exchange with, if any, and whether they have addends."""
  name = lambda path: f"`updates`{jax.tree_util.keystr(path)}"
  leaves = jax.tree_util.tree_leaves_with_path(updates)
  addends = [typed_spec(leaf).unreduced for _, leaf in leaves]
  if any(addends):
    # A gradient typed {U:data} is the sum of the devices' addends, and that sum is the
    # gradient of the loss over the whole batch. In a map the loss is a mean over the
    # worker's part of the batch, so that the gradient is the mean.
    mesh = mesh_of(updates)
    names = tuple(x for x in mesh.axis_names if x in addends[0])
    names = names if axis_name is None else axis_names(axis_name)
    for (path, _), found in zip(leaves, addends, strict=True):
      if found != set(names):
        raise ValueError(
          f"{name(path)} must be unreduced over {names}, like `axis_name` or the first "
          f"gradient, got one over {tuple(sorted(found))}; take the gradients of "
          "gradcomp.value_and_grad, or leave axis_name out to take it from the type."
        )
    workers = math.prod(mesh.shape[x] for x in names)
    return Place(axes.as_axis_name(names), workers, is_sum=True)
  if axis_name is None:
    if (manual := axes.manual_axes()) and not local:
      raise ValueError(
        f"`axis_name` must name the axis to average over inside a map with the axes "
        f'{manual}, got None; pass axis_name=, or exchange="local" to exchange nothing.'
      )
    return Place(None)
  mesh, kind = around(updates, axis_name)
  explicit = kind == AxisType.Explicit
  if not leaves and kind != AxisType.Manual:
    return Place(None)
  if explicit and mesh.size == 1:
    return Place(axis_name, is_sum=True)  # a sum of one, see unreduce
  workers = 1 if explicit else axes.require_size(axis_name, mesh)
  for path, leaf in leaves if explicit or is_typed(axis_name) else ():
    if not varying_axes(leaf).issuperset(axis_names(axis_name)):
      raise ValueError(
        f"{name(path)} must differ between the workers of {axis_name!r}, but its type "
        "says that it is equal on all: inside jax.shard_map, and under Explicit axes, "
        "jax.grad with respect to replicated parameters has already all-reduced it in "
        "full precision. Use gradcomp.value_and_grad in place of jax.value_and_grad, "
        "or gradcomp.defer_reduction(params, axis_name=axis_name) before jax.grad. "
        f"{axes.AROUND} Layers of compress_in_scan are means already: leave them out "
        f"by optax.partition.{see('says-that-it-is-equal-on-all')}"
      )
  return Place(axis_name, workers)


def _cut_over(x: Any) -> frozenset[str]:
  """Returns the axes that shard an array or a spec; of traced arrays Explicit ones."""
  return axes_in(x if is_spec(x) else placed_spec(x))


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
  axes_of = lambda x: varying_axes(x) | unreduced_axes(x)
  leaves = jax.tree_util.tree_leaves_with_path(updates)
  allowed = [*map(axes_of, jax.tree.leaves(params))] or [frozenset()] * len(leaves)
  return [
    jax.tree_util.keystr(path)
    for (path, x), axes in zip(leaves, allowed, strict=True)
    if not axes_of(x) <= axes
  ]
