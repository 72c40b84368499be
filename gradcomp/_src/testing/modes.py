"""Emulation and maps of N workers: every mode of a transformation, by one call."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp._src.core.residual_storage import is_stored
from gradcomp._src.core.specs import state_specs
from gradcomp._src.core.state import CompressState, is_state
from gradcomp._src.floats.dtypes import addend_dtype
from gradcomp._src.mesh.per_worker import marked, of_all, unmarked
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp._src.testing.leaves import Transformation, params_of, workers_of

__all__ = ["Run", "modes_for", "run"]

# Maps, in which the mean of the workers' gradients is taken.
MODES = ("shard_map", "shard_map_unchecked", "pmap", "vmap")

# Plain jit under Auto axes, with gradients that are marked as those of all workers.
AUTO = "auto"

# Plain jit, in which the sum of addends is taken: gradients over N, which is exact for
# N a power of two.
EXPLICIT = "explicit"

# ``update(gradients, state or None, params)`` of all workers.
Mapped = Callable[[Any, Any, Any], tuple[Any, Any]]


class Run(NamedTuple):
  """The outputs and the state of each worker after some steps.

  Attributes:
    outputs: for each step a tree with leaves ``[N, ...]``.
    state: the last state, with leaves ``[N, ...]``.
  """

  outputs: list[Any]
  state: Any


def modes_for(workers: int) -> tuple[str, ...]:
  """Returns the modes with equal bits for N workers.

  Args:
    workers: N.

  Returns:
    Their names; ``"explicit"`` is one of them for a power of two.

  Example:
    >>> modes_for(3)
    ('shard_map', 'shard_map_unchecked', 'pmap', 'vmap', 'auto')
  """
  every = (*MODES, AUTO)
  return (*every, EXPLICIT) if workers & (workers - 1) == 0 else every


def mesh(
  workers: int, kind: AxisType = AxisType.Auto, *, axis_name: str = "data"
) -> Mesh:
  """Returns a mesh of the first N devices."""
  devices = jax.devices()[:workers]
  if len(devices) < workers:
    raise ValueError(
      f"`workers` must be at most the number of devices, {len(devices)}, got "
      f'{workers}; on a CPU set jax_num_cpu_devices, or use the mode "vmap".'
    )
  return jax.make_mesh((workers,), (axis_name,), (kind,), devices=devices)


def run(
  mode: str,
  transformation: Transformation,
  gradients: Sequence[Any],
  *,
  axis_name: str = "data",
) -> Run:
  """Feeds gradients to ``update``, step by step.

  Args:
    mode: one of ``modes_for(workers)``.
    transformation: over the axis.
    gradients: trees with leaves ``[N, ...]``, one tree a step.
    axis_name: the name of the axis.

  Returns:
    The outputs and the last state of each worker.

  Raises:
    ValueError: ``mode`` is unknown, or there are too few devices for it.

  Example:
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data")
    >>> run("vmap", tx, [{"w": jnp.ones((2, 5))}]).outputs[0]["w"].shape
    (2, 5)
  """
  workers = workers_of(gradients)
  params = params_of(gradients)
  update = mapped(mode, transformation, workers, axis_name=axis_name)
  state, outputs = None, []
  for gradient in gradients:
    output, state = update(gradient, state, params)
    outputs.append(output)
  if mode not in ("pmap", "vmap"):
    unstacked = functools.partial(_unstacked, workers, axis_name)
    state = jax.tree.map(unstacked, state, state_specs(state, axis_name=axis_name))
  if mode == EXPLICIT:
    scaled = lambda x: _of_sums(x, workers) if is_state(x) else x
    state = jax.tree.map(scaled, state, is_leaf=is_state)
  return Run(outputs, state)


def lowered(
  transformation: Transformation, params: Any, *, axis_name: str, workers: int
) -> jax.stages.Lowered:
  """Lowers a step with its ``init`` in ``shard_map``, for ``wire_report``."""

  def local(gradient: Any) -> Any:
    gradient = jax.tree.map(lambda leaf: leaf[0], gradient)
    update, state = transformation.update(gradient, transformation.init(gradient))
    # XLA drops what nobody reads, and collectives of the next state with it.
    return update, jax.tree.map(lambda leaf: leaf[None], state)

  of_all = lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype)
  devices, spec = mesh(workers, axis_name=axis_name), P(axis_name)
  # Unchecked, because arrays of an optimizer's ``init`` are typed as varying.
  specs: Any = {"in_specs": spec, "out_specs": (P(), spec), "check_vma": False}
  step = jax.shard_map(local, mesh=devices, **specs)
  return jax.jit(step).lower(jax.tree.map(of_all, params))


@functools.lru_cache(maxsize=8)
def mapped(
  mode: str, transformation: Transformation, workers: int, *, axis_name: str = "data"
) -> Mapped:
  """Returns ``update`` of all workers, cached with its compiled programs."""
  if mode not in _MAPS:
    raise ValueError(f"`mode` must be one of {tuple(_MAPS)}, got {mode!r}.")
  return _MAPS[mode](transformation, workers, axis_name)


def _of_sums(state: CompressState, workers: int) -> CompressState:
  """Scales the state of addends, which are gradients over N, to gradients."""

  def times(x: Any) -> Any:
    if is_stored(x):
      return x._replace(scales=times(x.scales))
    return x * x.dtype.type(workers)

  scale = lambda tree: jax.tree.map(times, tree, is_leaf=is_stored)
  return state._replace(residual=scale(state.residual), velocity=scale(state.velocity))


def _unstacked(workers: int, axis_name: str, x: Any, spec: P) -> np.ndarray:
  """Returns each worker's shard of a global array, ``[N, ...]``."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  x = np.asarray(x)
  if len(spec) and axis_name in np.ravel(spec[0]):
    return x.reshape(workers, x.shape[0] // workers, *x.shape[1:])
  return np.stack([x] * workers)


def _replicated_map(
  transform: Callable[..., Any], tx: Transformation, workers: int, axis_name: str
) -> Mapped:
  """Maps ``init`` too, for the second stage counts the workers."""
  update, init = (transform(f, axis_name=axis_name) for f in (tx.update, tx.init))

  def mapped(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    if state is None:
      state = init(jax.tree.map(lambda leaf: np.stack([leaf] * workers), params))
    return update(gradient, state)

  return mapped


def _on_devices(
  devices: Mesh, tx: Transformation, axis_name: str, update: Mapped
) -> Mapped:
  """Calls ``init`` in the mesh, and ``update`` with one gradient on each device."""

  def mapped(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    with jax.set_mesh(devices):
      state = tx.init(params) if state is None else state
    gradient = jax.device_put(gradient, NamedSharding(devices, P(axis_name)))
    return update(gradient, state, params)

  return mapped


def _explicit(tx: Transformation, workers: int, axis_name: str) -> Mapped:
  @jax.jit
  def step(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    wide = lambda leaf: leaf.astype(addend_dtype(leaf.dtype))
    addends = jax.tree.map(lambda leaf: wide(leaf) * (1 / workers), gradient)
    return tx.update(unreduce(addends, axis_name), state, params)

  def update(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    output, state = step(gradient, state, params)
    return jax.tree.map(lambda leaf: np.stack([leaf] * workers), output), state

  devices = mesh(workers, AxisType.Explicit, axis_name=axis_name)
  return _on_devices(devices, tx, axis_name, update)


def _auto(tx: Transformation, workers: int, axis_name: str) -> Mapped:
  @jax.jit
  def step(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    return tx.update(marked(gradient, axis_name, P()), state, params)

  def update(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    output, state = step(gradient, state, params)
    if of_all(output):
      return unmarked(output)[0], state
    return jax.tree.map(lambda leaf: np.stack([leaf] * workers), output), state

  return _on_devices(mesh(workers, axis_name=axis_name), tx, axis_name, update)


def _sharded_map(
  check_vma: bool, tx: Transformation, workers: int, axis_name: str
) -> Mapped:
  devices = mesh(workers, axis_name=axis_name)

  def local(gradient: Any, state: Any) -> tuple[Any, Any]:
    gradient = jax.tree.map(lambda leaf: leaf[0], gradient)
    output, state = tx.update(gradient, state)
    return jax.tree.map(lambda leaf: leaf[None], output), state

  @jax.jit
  def step(gradient: Any, state: Any) -> tuple[Any, Any]:
    specs = state_specs(state, axis_name=axis_name)
    # Unchecked, the outputs are sharded like the gradients, so that each worker's own
    # copy comes back; checked, P() is accepted only because they are proved equal.
    out = (P() if check_vma else P(axis_name), specs)
    given: Any = {"in_specs": (P(axis_name), specs), "check_vma": check_vma}
    return jax.shard_map(local, mesh=devices, out_specs=out, **given)(gradient, state)

  def update(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    output, state = step(gradient, state)
    if check_vma:
      output = jax.tree.map(lambda leaf: np.concatenate([leaf] * workers), output)
    return output, state

  return _on_devices(devices, tx, axis_name, update)


_vmap = lambda function, axis_name: jax.jit(jax.vmap(function, axis_name=axis_name))
_MAPS: dict[str, Callable[..., Mapped]] = {
  AUTO: _auto,
  EXPLICIT: _explicit,
  "shard_map": functools.partial(_sharded_map, True),
  "shard_map_unchecked": functools.partial(_sharded_map, False),
  "pmap": functools.partial(_replicated_map, jax.pmap),
  "vmap": functools.partial(_replicated_map, _vmap),
}
