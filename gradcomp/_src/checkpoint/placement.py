"""``place``: puts arrays that every process has whole on the mesh of all of them."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr

from gradcomp._src.mesh.axes import is_spec


def put_on_mesh(state: Any, mesh: Mesh, specs: Any) -> Any:
  """Returns a state on a mesh, which may have devices of many processes.

  All processes call it, each with the same values: of ``optimizer.init``, or of a
  checkpoint in NumPy's arrays. A process copies its parts to its devices, and sends
  nothing to others. Arrays on all devices of the mesh change their shardings, by
  ``jax.device_put``. The result shares no memory with ``state``: a step may donate it.

  Args:
    state: a tree of NumPy's arrays, numbers, and JAX's arrays, each of the whole shape.
    mesh: the devices.
    specs: the ``PartitionSpec`` of each, as :func:`gradcomp.state_specs` returns them;
      one spec may stand for a whole branch of the tree.

  Raises:
    ValueError: the axes of a spec do not cut an array; or ``specs`` is no such tree.

  Example:
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> state = {"count": 3, "residual": np.zeros((4, 8), np.float32)}
    >>> specs = {"count": P(), "residual": P("data")}
    >>> placed = put_on_mesh(state, mesh, specs)
    >>> placed["residual"].sharding.spec == P("data"), placed["count"].dtype.name
    (True, 'int32')
  """
  try:
    whole = jax.tree.broadcast(specs, state, is_leaf=is_spec)
  except ValueError as error:
    raise ValueError(
      "`specs` must be a tree of PartitionSpec like `state`, or one of its branches: "
      f"{error}; take gradcomp.state_specs of this state."
    ) from None

  def one(path: Any, x: Any, spec: PartitionSpec) -> jax.Array:
    try:
      sharding = NamedSharding(mesh, spec)
      sharding.shard_shape(np.shape(x))
    except (ValueError, IndexError):  # of an axis that the array does not have
      raise ValueError(
        f"`specs{keystr(path)}` must cut an array of shape {np.shape(x)} into equal "
        f"parts on the axes of the mesh, {dict(mesh.shape)}, got {spec}; take "
        "gradcomp.state_specs of this state, and gradcomp.reshard_state for that of "
        "another number of workers."
      ) from None
    return put(x, sharding)

  return jax.tree_util.tree_map_with_path(one, state, whole)


def put(x: Any, sharding: NamedSharding) -> jax.Array:
  """Returns a copy with this sharding, which no donation of ``x`` deletes."""
  if is_key(x):  # which NumPy and device_put between hosts do not know
    words = put(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
  if isinstance(x, jax.Array):
    local = x.is_fully_addressable and sharding.is_fully_addressable
    if local or x.sharding.device_set == sharding.device_set:
      return jax.device_put(x, sharding, may_alias=False)
  x = host_array(x)
  dtype = jax.dtypes.canonicalize_dtype(x.dtype)
  part = lambda index: np.array(x[index])  # a copy: devices that are CPUs would share x
  return jax.make_array_from_callback(x.shape, sharding, part, dtype=dtype)


def host_array(x: Any) -> np.ndarray:
  """Returns a NumPy array, gathered if other processes have shards of it."""
  # Then all processes must call this for these arrays in the same order.
  here = not isinstance(x, jax.Array) or x.is_fully_addressable
  if not here and not x.sharding.addressable_devices:
    raise ValueError(
      "`opt_state` must hold arrays with a part in this process, got "
      f"{jax.typeof(x)} on devices of other processes only; call this in those alone, "
      "without mesh=, and send the result, or restore all from a checkpoint."
    )
  if here or x.is_fully_replicated:
    return np.asarray(x)
  return multihost_utils.process_allgather(x, tiled=True)


def is_key(x: Any) -> bool:
  kind = jax.dtypes.prng_key
  return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, kind)
