"""Names and sizes of axes, the maps that bind them, and specs of arrays."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from gradcomp._src.checks import see, static_integer

# One axis, or several that are reduced together, as jax.lax.psum takes them.
AxisName = str | tuple[str, ...]

# The axes that stack arrays which differ between workers: keys in states.
Axes = tuple[str, ...]

# A cure in several errors: such transformations hide whose gradients they have.
AROUND = (
  "Around an exchange, use accumulate= of gradcomp.value_and_grad in place of optax."
  "MultiSteps, and leave out optax.flatten: leaves share messages anyway. Or put "
  "both after it: optax.chain(exchange, optax.MultiSteps(optimizer, k))."
)


class UnboundAxisError(ValueError):
  """No map binds an axis here; ``axis_name`` holds the axes that are needed."""

  def __init__(self, message: str, axis_name: AxisName):
    super().__init__(message)
    self.axis_name = axis_name


def as_axis_name(names: Sequence[str]) -> Any:
  """Returns the name of one axis, a tuple of several, and None for none."""
  return tuple(names) if len(names) > 1 else next(iter(names), None)


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
  """Returns the axes as a tuple; ValueError for none, or for one twice."""
  result = axis_name if isinstance(axis_name, tuple) else (axis_name,)
  named = all(isinstance(name, str) for name in result)
  if not result or not named or len(set(result)) < len(result):
    raise ValueError(
      f"`axis_name` must be the name of an axis or a tuple of different ones, got "
      f"{axis_name!r}."
    )
  return result


def abstract_mesh(
  sizes: Mapping[str, int], axis_types: tuple[AxisType, ...] | None = None
) -> AbstractMesh:
  """Returns a mesh of devices that need not exist."""
  # JAX fails with std::bad_cast.
  if math.prod(sizes.values()) >= 2**31:
    raise ValueError(
      "`workers` must be less: JAX takes fewer than 2**31 devices on all axes of a "
      f"trace together, got {' x '.join(map(str, sizes.values()))}."
    )
  # The devices have the platform of the mesh that is in use, if there is one.
  device = jax.sharding.get_abstract_mesh().abstract_device
  given = tuple(sizes.values()), tuple(sizes), axis_types
  return AbstractMesh(*given, abstract_device=device)


def bound_size(axis_name: AxisName) -> int | None:
  """Returns the number of workers on axes of enclosing maps; None if one is unbound."""
  try:
    return math.prod(lax.axis_size(name) for name in axis_names(axis_name))
  except NameError:
    return None


def count(axis_name: AxisName, mesh: Any = None) -> tuple[int | None, bool]:
  """Returns the workers of axes, in a map or on a mesh, and if a map binds them."""
  size, names = bound_size(axis_name), axis_names(axis_name)
  shape = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape
  if size is None and shape.keys() >= set(names):
    return math.prod(shape[name] for name in names), False
  return size, size is not None


def require_size(axis_name: AxisName, mesh: AbstractMesh | None = None) -> int:
  """Returns the number of workers on bound axes; else UnboundAxisError."""
  if (size := bound_size(axis_name)) is not None:
    return size
  mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  known = set(axis_names(axis_name)).issubset(mesh.axis_names)
  cure = "call this inside one (or use gradcomp.make_train_step), "
  if not mesh.axis_names:
    cure += (
      "or in plain jax.jit under jax.set_mesh(jax.make_mesh(...)) or with mesh= of "
      "gradcomp.value_and_grad, "
    )
  elif known:
    cure += (
      "or in plain jax.jit give update the gradients of gradcomp.value_and_grad("
      f"loss_fn, axis_name={axis_name!r}), "
    )
  else:
    cure = f"the axes of the mesh are {mesh.axis_names}: name one of these, "
  raise UnboundAxisError(
    f"`axis_name` must be an axis of the enclosing jax.shard_map, jax.pmap or "
    f"jax.vmap, and {axis_name!r} is not bound here; {cure}or pass axis_name=None to "
    f"compress on one device.{f' {AROUND}' * known}{see('is-not-bound-here')}",
    axis_name,
  )


def automatic_axes(axis_name: AxisName | None = None) -> dict[str, int]:
  """Returns the Auto axes of an enclosing shard_map or of the mesh, with sizes."""
  # Under pmap and vmap there are none. Without a name, they are the axes in no map.
  mesh = jax.sharding.get_abstract_mesh()
  names = () if axis_name is None else axis_names(axis_name)
  if not set(names).issubset(mesh.manual_axes):
    return {}
  return {name: mesh.shape[name] for name in mesh.auto_axes if mesh.shape[name] > 1}


def manual_axes() -> tuple[str, ...]:
  """Returns the mesh axes that an enclosing shard_map or pmap has made manual."""
  return tuple(jax.sharding.get_abstract_mesh().manual_axes)


MOST_WORKERS = 2**18  # of a study: the pairs of a ring take seconds then

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
  given = tuple(by_name.values()) or (alone if len(alone) < 3 else ())
  sizes = tuple(static_integer("workers", _RULE, size) for size in given)
  if min(sizes, default=0) < 1:
    raise ValueError(f"`workers` must be {_RULE}, got {workers!r}.")
  if math.prod(sizes) > MOST_WORKERS:
    raise ValueError(
      f"`workers` must be less, at most {MOST_WORKERS:,} together, because a trace "
      f"lists all pairs that send, got {workers!r}."
    )
  return sizes, dict(zip(by_name, sizes, strict=False))


def sizes_by_axis(argument: str, axis_name: AxisName, given: Any) -> dict[str, int]:
  """Returns the workers along each axis; ValueError that names the argument."""
  names = axis_names(axis_name)
  rule = f"the number of workers of {axis_name!r}, 1 or more"
  if len(names) > 1:
    rule = f"a tuple of the numbers of workers along {names}, each 1 or more"
  counts = given if isinstance(given, tuple) else (given,)
  if len(counts) != len(names):
    raise ValueError(f"`{argument}` must be {rule}, got {given!r}.")
  sizes = [static_integer(argument, rule, count, least=1) for count in counts]
  return dict(zip(names, sizes, strict=True))


def on_each(
  function: Callable[[], Any], sizes: dict[str, int], *, stacked: bool
) -> Any:
  """Calls a function on each worker of emulated axes; rows ``[N, ...]`` if stacked."""
  for name, size in reversed(sizes.items()):
    out = 0 if stacked else None  # JAX raises ValueError for what differs
    function = jax.vmap(function, out_axes=out, axis_name=name, axis_size=size)
  return function()


def check_both(axis_name: AxisName | None, workers: WorkerSizes) -> None:
  """Raises ValueError for two axes and the size of only one."""
  known = isinstance(workers, tuple | Mapping) and len(workers) > 1
  if isinstance(axis_name, tuple) and len(axis_name) == 2 and not known:
    raise ValueError(
      "`workers` must be the sizes of both axes, (between, inside), for "
      f'exchange="hierarchical" over two axes, got {workers}.'
    )


def is_spec(x: Any) -> bool:
  """Returns True for a PartitionSpec; it is meant for ``is_leaf``."""
  return isinstance(x, PartitionSpec)


def entries(spec: PartitionSpec) -> tuple[Any, ...]:
  """Returns a spec's entry for each array axis: None, a name, or a tuple of names."""
  return tuple(spec.partitions if hasattr(spec, "partitions") else spec)


def names_by_axis(spec: PartitionSpec, ndim: int) -> tuple[tuple[str, ...], ...]:
  """Returns the names that shard each of an array's axes."""
  found = [_names(entry) for entry in entries(spec)]
  return (*found, *[()] * (ndim - len(found)))


def shard_shape(
  shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> tuple[int, ...]:
  """Returns the shape of one device's shard; JAX's function raises inside of maps."""
  cuts = names_by_axis(spec, len(shape))
  parts = [math.prod(mesh.shape[name] for name in names) for names in cuts]
  return tuple(n // part for n, part in zip(shape, parts, strict=True))


def spec_of(names: Sequence[Sequence[str]]) -> PartitionSpec:
  """Returns the spec in which these names shard each axis."""
  return PartitionSpec(*map(as_axis_name, names))


def axes_in(specs: Any) -> frozenset[str]:
  """Returns the mesh axes over which a spec, or any of a tree, shards an array."""
  every = map(entries, jax.tree.leaves(specs, is_leaf=is_spec))
  return frozenset(name for entry in chain(*every) for name in _names(entry))


def restrict_spec(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
  """Removes all axes but these from a spec."""
  free = PartitionSpec.UNCONSTRAINED
  kept = lambda entry: as_axis_name([name for name in _names(entry) if name in axes])
  return PartitionSpec(*(x if x is free else kept(x) for x in entries(spec)))


def stack_spec(axis_name: AxisName, spec: PartitionSpec) -> PartitionSpec:
  """Returns the spec of workers' arrays of this spec, stacked on their first axis."""
  first, *rest = entries(spec) or (None,)
  return PartitionSpec(as_axis_name([*axis_names(axis_name), *_names(first)]), *rest)


def _names(entry: Any) -> tuple[str, ...]:
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)
