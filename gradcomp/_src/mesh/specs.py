"""Readers and makers of PartitionSpecs, which are tuples in some versions of JAX."""

import math
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from gradcomp._src.mesh.axes import AxisName, axis_names


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
  return PartitionSpec(*map(_entry, names))


def axes_in(specs: Any) -> frozenset[str]:
  """Returns the mesh axes over which a spec, or any of a tree, shards an array."""
  every = map(entries, jax.tree.leaves(specs, is_leaf=is_spec))
  return frozenset(name for entry in chain(*every) for name in _names(entry))


def restrict_spec(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
  """Removes all axes but these from a spec."""
  free = PartitionSpec.UNCONSTRAINED
  kept = lambda entry: _entry([name for name in _names(entry) if name in axes])
  return PartitionSpec(*(x if x is free else kept(x) for x in entries(spec)))


def stack_spec(axis_name: AxisName, spec: PartitionSpec) -> PartitionSpec:
  """Returns the spec of workers' arrays of this spec, stacked on their first axis."""
  first, *rest = entries(spec) or (None,)
  return PartitionSpec(_entry([*axis_names(axis_name), *_names(first)]), *rest)


def stacked_over(axes: Sequence[str], inside: Collection[str]) -> PartitionSpec:
  """Returns the spec of arrays stacked over ``axes``, without axes outside the map."""
  return PartitionSpec(_entry([name for name in axes if name in inside]))


def _names(entry: Any) -> tuple[str, ...]:
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def _entry(names: Sequence[str]) -> Any:
  """Returns the shortest entry of a spec for these names."""
  if len(names) > 1:
    return tuple(names)
  return names[0] if names else None
