"""Emulation and maps of N workers: every mode of a transformation, by one call."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp._src.core.feedback import is_stored
from gradcomp._src.core.specs import state_specs
from gradcomp._src.core.state import CompressState, is_state
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.floats.dtypes import addend_dtype
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp._src.mesh.trees import marked, of_all, unmarked
from gradcomp._src.report.tracing import study
from gradcomp._src.testing.kit import Transformation

__all__ = ["Run", "modes_for", "run"]

# Maps, in which the mean of the workers' gradients is taken.
MODES = ("shard_map", "shard_map_unchecked", "pmap", "vmap")
# Plain jit under Auto axes, with gradients that are marked as all workers'.
AUTO = "auto"
# Plain jit, in which the sum of addends is taken: gradients over N, which is exact for
# N a power of two.
EXPLICIT = "explicit"


class Place(NamedTuple):
  """A transformation of N workers in a mode, with its compiled programs."""

  workers: int
  init: Callable[[Any], Any]  # the first state, of params
  step: Any  # of gradients, state and params: the updates, [N, ...], and the state
  stacked: Callable[[Any], Any] = lambda state: state  # [N, ...], in gradients' units
  where: NamedSharding | None = None  # of gradients, where devices send

  def update(self, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Returns the updates, leaves ``[N, ...]``, and the state; None begins."""
    state = self.init(params) if state is None else state
    if self.where is not None:
      gradients = jax.device_put(gradients, self.where)
    return self.step(gradients, state, params)


@dataclasses.dataclass(frozen=True)
class Run:
  """The steps of a transformation, which run once a law reads them.

  Attributes:
    transformation: over the axis ``axis_name``.
    params: the parameters of ``init``.
    gradients: for each step a tree with leaves ``[N, ...]``.
    place: where it runs, and ``mode`` its name.
    sizes: N, or the size of each axis.
    program: a step that :func:`gradcomp.wire_report` reads; None to compile one.
    outputs: for each step a tree with leaves ``[N, ...]``.
    states: the first state and that after each step, ``[N, ...]``, as of gradients.
    placed: the same as the mode has them.
  """

  transformation: Transformation
  params: Any
  gradients: Sequence[Any]
  place: Place
  mode: str
  sizes: int | tuple[int, int]
  axis_name: str = "data"
  program: jax.stages.Lowered | jax.stages.Compiled | None = None

  @functools.cached_property
  def _steps(self) -> tuple[list[Any], list[Any]]:
    outputs, placed = [], [self.place.init(self.params)]
    for gradient in self.gradients:
      output, state = self.place.update(gradient, placed[-1], self.params)
      outputs.append(output)
      placed.append(state)
    return outputs, placed

  @functools.cached_property
  def planned(self) -> tuple[MessagePlan, Any] | None:
    """The message plan and the feedback; None of a chain, or of other states."""
    if not is_state(self.state):
      return None
    ((plan, options),) = study(self.transformation, self.params, self.sizes).made
    return plan, options["feedback"]

  outputs = property(lambda self: self._steps[0])
  placed = property(lambda self: self._steps[1])
  states = functools.cached_property(
    lambda self: [*map(self.place.stacked, self.placed)]
  )
  state = property(lambda self: self.states[-1])
  workers = property(lambda self: self.place.workers)
  # Whether all workers get the mean of all.
  exchanges = property(lambda self: self.planned is None or self.planned[0].sends)


def modes_for(workers: int) -> tuple[str, ...]:
  """Returns the modes with equal bits for N workers, ``"explicit"`` for powers of two.

  Args:
    workers: N.

  Example:
    >>> modes_for(3)
    ('shard_map', 'shard_map_unchecked', 'pmap', 'vmap', 'auto')
  """
  every = (*MODES, AUTO, EXPLICIT)
  return every if workers.bit_count() == 1 else every[:-1]


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
  """Returns a run that feeds gradients to ``update``, once its results are read.

  Args:
    mode: one of ``modes_for(workers)``.
    transformation, gradients, axis_name: see :class:`Run`.

  Raises:
    ValueError: ``mode`` is unknown, or there are too few devices for it.

  Example:
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data")
    >>> run("vmap", tx, [{"w": jnp.ones((2, 5))}]).outputs[0]["w"].shape
    (2, 5)
  """
  workers = len(jax.tree.leaves(gradients[0])[0])
  place = started(mode, transformation, workers, axis_name=axis_name)
  params = jax.tree.map(lambda leaf: np.asarray(leaf)[0, ...], gradients[0])
  return Run(transformation, params, gradients, place, mode, workers, axis_name)


def lowered(
  transformation: Transformation, params: Any, *, axis_name: str, workers: int
) -> jax.stages.Lowered:
  """Lowers a step with its ``init`` in ``shard_map``: XLA takes its first branches."""

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
def started(
  mode: str, transformation: Transformation, workers: int, *, axis_name: str = "data"
) -> Place:
  """Returns a transformation in a mode, which is cached."""
  tx = transformation
  if mode in ("vmap", "pmap"):
    vmapped = lambda f, **given: jax.jit(jax.vmap(f, **given))
    transform: Any = jax.pmap if mode == "pmap" else vmapped
    # With ``init``, for the second stage counts the workers.
    init = transform(tx.init, axis_name=axis_name)
    local = lambda gradient, state, params: tx.update(gradient, state)
    update = transform(local, axis_name=axis_name, in_axes=(0, 0, None))
    copies = lambda params: jax.tree.map(lambda x: np.stack([x] * workers), params)
    return Place(workers, lambda params: init(copies(params)), update)
  if mode in ("shard_map", "shard_map_unchecked"):
    return sharded_map(tx, workers, axis_name, check_vma=mode == "shard_map")
  if mode not in (AUTO, EXPLICIT):
    known = (*MODES, AUTO, EXPLICIT)
    raise ValueError(f"`mode` must be one of {known}, got {mode!r}.")

  def step(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    if mode == AUTO:
      output, state = tx.update(marked(gradient, axis_name, P()), state, params)
      if of_all(output):
        return unmarked(output)[0], state
    else:
      addend = lambda x: x.astype(addend_dtype(x.dtype)) * (1 / workers)
      addends = unreduce(jax.tree.map(addend, gradient), axis_name)
      output, state = tx.update(addends, state, params)
    return _of_all(output, workers), state

  kind = AxisType.Explicit if mode == EXPLICIT else AxisType.Auto
  devices = mesh(workers, kind, axis_name=axis_name)
  place = _on_devices(tx, devices, (axis_name,), step)
  if mode == AUTO:
    return place
  scaled = lambda x: _of_sums(x, workers) if is_state(x) else x
  stacked = lambda state: jax.tree.map(scaled, place.stacked(state), is_leaf=is_state)
  return place._replace(stacked=stacked)


def sharded_map(tx: Transformation, workers: int, *axes: str, **options: Any) -> Place:
  """Returns a transformation in ``jax.shard_map`` over axes, with its options."""
  devices = options.pop("mesh", None) or mesh(workers, axis_name=axes[0])
  check_vma = options.setdefault("check_vma", False)

  def local(gradient: Any, state: Any) -> tuple[Any, Any]:
    output, state = tx.update(jax.tree.map(lambda leaf: leaf[0], gradient), state)
    own = output if check_vma else jax.tree.map(lambda leaf: leaf[None], output)
    return own, state

  def step(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    specs = state_specs(state, axis_name=axes)
    # Unchecked, the outputs are sharded like the gradients, so that each worker's own
    # copy comes back; checked, P() is accepted only because they are proved equal.
    out = (P() if check_vma else P(axes), specs)
    given: Any = {"in_specs": (P(axes), specs), "out_specs": out, **options}
    output, state = jax.shard_map(local, mesh=devices, **given)(gradient, state)
    return _of_all(output, workers) if check_vma else output, state

  return _on_devices(tx, devices, axes, step)


def _on_devices(
  tx: Transformation, devices: Mesh, axes: tuple[str, ...], step: Any
) -> Place:
  workers = math.prod(devices.shape[axis] for axis in axes)
  init = jax.jit(tx.init)

  def first(params: Any) -> Any:
    with jax.set_mesh(devices):
      return init(params)

  stacked = functools.partial(of_each, axes, workers)
  return Place(workers, first, jax.jit(step), stacked, NamedSharding(devices, P(axes)))


def of_each(axes: tuple[str, ...], workers: int, state: Any) -> Any:
  """Returns each worker's shards of a state of global arrays, leaves ``[N, ...]``."""

  def stack(x: Any, spec: P) -> np.ndarray:
    typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    x = np.asarray(jax.random.key_data(x) if typed else x)
    if len(spec) and set(axes) & set(np.ravel(spec[0])):
      return x.reshape(workers, x.shape[0] // workers, *x.shape[1:])
    return np.stack([x] * workers)

  return jax.tree.map(stack, state, state_specs(state, axis_name=axes))


def _of_all(update: Any, workers: int) -> Any:
  """Returns the one update of all workers for each of them, ``[N, ...]``."""
  return jax.tree.map(lambda leaf: jnp.stack([leaf] * workers), update)


def _of_sums(state: CompressState, workers: int) -> CompressState:
  """Scales the state of addends, which are gradients over N, to gradients."""

  def times(x: Any) -> Any:
    if is_stored(x):
      return x._replace(scales=times(x.scales))
    return x * x.dtype.type(workers)

  scale = lambda tree: jax.tree.map(times, tree, is_leaf=is_stored)
  return state._replace(residual=scale(state.residual), velocity=scale(state.velocity))
