"""Transfer of arrays to the host, and from there to the devices of a mesh."""

import math
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp._src.mesh.specs import sharded_axes
from gradcomp._src.mesh.types import placed_spec


def mesh_to_go_on(mesh: Mesh | None, names: tuple[str, ...], workers: int) -> Mesh:
  """Returns the mesh of M workers, by default the current one; it may be empty."""
  mesh = jax.sharding.get_mesh() if mesh is None else mesh
  found = math.prod(mesh.shape.get(name, 0) for name in names)
  if not mesh.empty and found != workers:
    raise ValueError(
      f"`workers` must be the number of workers on the axes {names} of the mesh, "
      f"which has {dict(mesh.shape)}, got {workers}; pass mesh=, or call this under "
      "jax.set_mesh(mesh) with the mesh that goes on."
    )
  return mesh


def placed(mesh: Mesh, x: Any, spec: PartitionSpec, like: Any = None) -> Any:
  """Puts an array on the devices of its spec, or of the sharding that it has.

  ``spec`` has the axes that shard it, at least. ``like`` is an array that is sharded
  like it, perhaps over more axes; by default itself. An empty mesh is for NumPy arrays.
  """
  if mesh.empty:
    return x if _is_key(x) else host_array(x)
  own = placed_spec(x if like is None else like)
  known = sharded_axes(own).issubset(mesh.axis_names)
  if known and sharded_axes(own).issuperset(sharded_axes(spec)):
    spec = own
  sharding = NamedSharding(mesh, spec)
  local = isinstance(x, jax.Array) and x.is_fully_addressable
  if local and sharding.is_fully_addressable:
    # A copy: a step that donates the new state must not delete the old one.
    return jax.device_put(x, sharding, may_alias=False)
  if _is_key(x):  # which NumPy has no dtype for
    words = placed(mesh, jax.random.key_data(x), spec, like)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
  x = host_array(x)
  return jax.make_array_from_callback(
    x.shape, sharding, lambda index: x[index], dtype=x.dtype
  )


def host_array(x: Any) -> np.ndarray:
  """Returns a NumPy array, gathered if other processes have shards of it.

  Then all processes must call this for these arrays in the same order.
  """
  if not isinstance(x, jax.Array) or x.is_fully_addressable:
    return np.asarray(x)
  if not x.sharding.addressable_devices:
    raise ValueError(
      "`opt_state` must hold arrays of which this process has a part, got "
      f"{jax.typeof(x)} on devices of other processes only; call this in those alone, "
      "without mesh=, and send what it returns, or restore all from a checkpoint."
    )
  if x.is_fully_replicated:
    return np.asarray(x)
  return multihost_utils.process_allgather(x, tiled=True)


def _is_key(x: Any) -> bool:
  return isinstance(x, jax.Array) and jax.dtypes.issubdtype(
    x.dtype, jax.dtypes.prng_key
  )
