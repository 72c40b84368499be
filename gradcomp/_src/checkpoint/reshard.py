"""``reshard_state``: moves an optimizer state from N to M workers, on the host."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp._src.checkpoint import regroup_workers as regroup
from gradcomp._src.checkpoint import shapes
from gradcomp._src.checkpoint.placement import host_array, is_key, put
from gradcomp._src.checks import one_of
from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.core.codec_memory import first_stored
from gradcomp._src.core.residual_storage import is_stored
from gradcomp._src.core.state import CompressState, OwnedRows, OwnSteps
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.mesh import platforms, types
from gradcomp._src.mesh.axes import Axes, AxisName, axis_names
from gradcomp._src.mesh.specs import axes_in, stacked_over
from gradcomp._src.mesh.trees import boxed_like, unboxed

State = TypeVar("State")
Keep = Literal["sum", "mean", "addends"]

_Plan = MessagePlan | None
_Plans = tuple[_Plan, _Plan]


def reshard_state(  # noqa: PLR0913 - options of users, by keyword
  optimizer: optax.GradientTransformation,
  params: Any,
  opt_state: State,
  *,
  axis_name: AxisName,
  old_workers: int,
  workers: int,
  old_platform: str | None = None,
  keep: Keep = "sum",
  param_specs: Any = None,
  mesh: Mesh | None = None,
) -> State:
  r"""Returns an optimizer state that moved from N workers to M workers.

  No residual is lost. With the residuals :math:`e_i` of workers, and :math:`r` of
  owners (see :class:`gradcomp.exchange.TwoShot`),

  .. math:: \sum_{i \le M} e'_i + M r' = \sum_{i \le N} e_i + N r

  up to rounding in float32, and then to ``residual_dtype``, to nearest. With as many
  workers on another platform, which may cut other messages, every bit is preserved.

  - Residuals, gradcomp's momentum, and what ``optax.MultiSteps`` around the exchange
    has collected: new workers begin with zeros. Worker :math:`i` that leaves adds its
    own to those of worker :math:`i \bmod M`.
  - Residuals of owners, and the rows of :func:`gradcomp.parallel.zero`: the same rows
    are split into M shares. If ``"auto"`` takes an exchange without owners for M
    workers, all workers share the owner residuals, or drop them if they keep none.
  - Codec memories: shared memory stays. A worker's own stays with it, and new workers
    begin as in ``optimizer.init``. All do if ranges change, as for
    :class:`gradcomp.codecs.TopK` in ``two_shot``.
  - Estimates of ``feedback="ef21"``: the shared one becomes each worker's own, and
    owner residuals become zero. So no sum is preserved.
  - Local steps: worker i gets the inner state of worker i mod N. This works only at the
    end of a round, where all displacements are zero.
  - Everything else is equal on all workers, and stays.

  Args:
    optimizer, params: those of the state; shapes of whole parameters will do.
    opt_state: the whole global state, as ``optimizer.init`` makes it under
      ``jax.set_mesh``, in NumPy's or JAX's arrays. If several processes have parts of
      JAX's, all of them call this. Of ``jax.vmap`` and ``jax.pmap``, take one row where
      workers are equal, else join the first two axes.
    axis_name: the axis, or the tuple of axes, given to the gradcomp transformation.
    old_workers, workers: N, that the state was made for, and M, that go on with it.
    old_platform: that of the N, by which ``message_bytes="auto"`` cut messages, in the
      record of :func:`gradcomp.checkpoint.make_record`; by default that of the M.
    keep: the sum that is preserved. ``"sum"`` is that above, for a learning rate that
      grows with the number of workers, and the batch. ``"mean"`` is :math:`\frac{1}{N}
      \sum e_i + r`: take it if batch and learning rate stay. ``"addends"`` is
      :math:`\sum e_i + r`, for ``update`` in plain ``jax.jit`` under Explicit axes.
    param_specs: the specs of the parameters, if :func:`init_state` made the state.
    mesh: the M devices, of one or several processes; by default the mesh of
      ``jax.set_mesh``. Arrays lie on it by :func:`state_specs`, and over other axes as
      before; without a mesh they are NumPy's.

  Raises:
    ValueError: ``workers`` is not that of the mesh, or an option is bad; the state is
      not that of N workers with this optimizer and these parameters, or in the midst of
      a round; or an array is only on devices of other processes.

  Example:
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
    >>> params = {"w": jnp.ones((2, 512))}
    >>> with jax.set_mesh(jax.make_mesh((3,), ("data",))):
    ...   state = jax.tree.map(jnp.ones_like, tx.init(params))
    >>> options = {"axis_name": "data", "old_workers": 3, "workers": 2}
    >>> moved = reshard_state(tx, params, state, **options)
    >>> moved.residual["w"].shape, moved.residual["w"][:, 0].tolist()
    ((4, 512), [2.0, 2.0, 1.0, 1.0])
  """
  one_of("keep", Keep, keep)
  for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
    if isinstance(x, jax.core.Tracer):
      raise ValueError(
        f"`opt_state`{jax.tree_util.keystr(path)} must be an array, got "
        f"{x.aval.str_short()} inside a transformed function; call "
        "gradcomp.reshard_state outside of jax.jit."
      )
  old_workers = shapes.number_of_workers("old_workers", old_workers)
  workers = shapes.number_of_workers("workers", workers)
  names = axis_names(axis_name)
  mesh = jax.sharding.get_mesh() if mesh is None else mesh
  here = math.prod(mesh.shape.get(name, 0) for name in names)
  if not mesh.empty and here != workers:
    raise ValueError(
      f"`workers` must be the number of workers on the axes {names} of the mesh, "
      f"which has {dict(mesh.shape)}, got {workers}; pass mesh=, or call this under "
      "jax.set_mesh(mesh) with the mesh that goes on."
    )
  options: Any = {"axis_name": axis_name, "param_specs": param_specs, "mesh": mesh}
  first = functools.partial(shapes.first_state_of, optimizer, params, **options)
  with platforms.planned_on(mesh):
    with platforms.planned_for(old_platform, "old_platform"):
      old = first(workers=old_workers)
    new = first(workers=workers)
  given, was, now, specs = map(unboxed, (opt_state, old.shapes, new.shapes, new.specs))
  shapes.check_fits(given, was, old_workers)
  plans = zip(old.plans, new.plans, strict=True)
  move = Move(old_workers, workers, names, keep, new.sizes, mesh, plans)
  ours = lambda x: isinstance(x, CompressState | OwnedRows | OwnSteps)
  return boxed_like(opt_state, jax.tree.map(move, given, was, now, specs, is_leaf=ours))


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
  """A move of a state from N to M workers."""

  old_workers: int
  workers: int
  names: tuple[str, ...]  # of the axes of workers
  keep: Keep  # as for gradcomp.reshard_state
  sizes: dict[str, int]  # of the axes of the mesh
  mesh: Mesh  # of the M workers; an empty one is for NumPy arrays
  plans: Iterator[_Plans]  # old and new, of each CompressState

  def __call__(self, node: Any, old: Any, new: Any, specs: Any) -> Any:
    """Moves a part of a state, by the shapes of the old and the new one, and specs."""
    if isinstance(node, CompressState):
      return self._compressed(node, old, new, specs, next(self.plans))
    if isinstance(node, OwnedRows):
      return self._rows(node, new)
    if isinstance(node, OwnSteps):
      return self._own_steps(node, new, specs)
    # Other arrays with more rows for more workers are gradients that MultiSteps around
    # an exchange has collected, each worker's own.
    collected = old.shape != new.shape
    return self._addends(node, specs) if collected else self.place(node, specs)

  def place(self, x: Any, spec: PartitionSpec, like: Any = None) -> Any:
    """Puts an array on devices by its spec, or like one of more axes, or itself."""
    if self.mesh.empty:
      return x if is_key(x) else host_array(x)
    own = types.placed_spec(x if like is None else like)
    if axes_in(spec) <= axes_in(own) <= {*self.mesh.axis_names}:
      spec = own
    return put(x, NamedSharding(self.mesh, spec))

  def _compressed(
    self, node: CompressState, old: Any, new: Any, specs: Any, plans: _Plans
  ) -> CompressState:
    owned, left = self._owned(node, old, new, plans)
    treedef: Any
    leaves, treedef = jax.tree.flatten(node.residual, is_leaf=is_stored)
    places = treedef.flatten_up_to(specs.residual)
    parts = [left.get(i) for i in range(len(leaves))]
    residual = [*map(self._residual, leaves, places, parts)]
    if node.estimate is not None and self.workers != self.old_workers:
      # Each worker's residual, that with the shared estimate as its own.
      share = np.float32(-1 / self.workers if self.keep == "addends" else -1)
      for i, x in enumerate(jax.tree.leaves(node.estimate)):
        own = np.concatenate([host_array(x) * share] * self.workers)
        residual[i] = self.place(own, places[i], leaves[i])
      owned = jax.tree.map(np.zeros_like, owned)
    memory = self._memory(node, old, new, plans[1])
    return CompressState(
      count=self.place(node.count, specs.count),
      key=self.place(node.key, specs.key),
      residual=jax.tree.unflatten(treedef, residual),
      server_residual=owned and self._stacked(owned),
      memory=memory and Memory(*map(self._stacked, memory)),
      velocity=jax.tree.map(self._addends, node.velocity, specs.velocity),
      estimate=jax.tree.map(self.place, node.estimate, specs.estimate),
    )

  def _stacked(self, arrays: dict[Axes, Any]) -> dict[Axes, Any]:
    """Places arrays by the axes that stack them."""
    put = lambda axes, x: self.place(x, stacked_over(axes, axes))
    return {x: jax.tree.map(functools.partial(put, x), y) for x, y in arrays.items()}

  def _residual(self, x: Any, spec: Any, more: np.ndarray | None) -> Any:
    """Moves the residual of a leaf, in any storage format."""
    if not is_stored(x):
      return self._addends(x, spec, more)
    wide = regroup.floats_of(jax.tree.map(host_array, x), self.old_workers)
    blocks = x.scales.shape[-1] // (self.old_workers if x.scales.ndim == 1 else 1)
    stored = regroup.stored_of(self._regrouped(wide, more), self.workers, blocks)
    return jax.tree.map(self.place, stored, spec)

  def _addends(self, x: Any, spec: Any, more: np.ndarray | None = None) -> Any:
    """Moves an array that workers sum; each also gets ``more``."""
    return self.place(self._regrouped(host_array(x), more), spec, x)

  def _regrouped(self, x: np.ndarray, more: np.ndarray | None) -> np.ndarray:
    """Regroups N workers' addends for M, ``[M * n, ...]``, which add ``more``."""
    # New workers get zeros. Worker i that leaves adds its array to that of i % M.
    old, new = self.old_workers, self.workers
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    parts, factor = np.split(wide, old), new / old if self.keep == "mean" else 1.0
    add = lambda a, b: np.where(b == 0, a, a + b)  # zeros leave the bits of the other
    sums = [functools.reduce(add, parts[i::new]) for i in range(min(old, new))]
    sums += [np.zeros_like(parts[0])] * (new - len(sums))
    result = np.concatenate(sums) * wide.dtype.type(factor)
    if more is not None:
      result += np.concatenate([np.atleast_1d(more)] * self.workers)
    return result.astype(x.dtype)

  def _owned(
    self, node: CompressState, old: Any, new: Any, plans: _Plans
  ) -> tuple[Any, dict[int, np.ndarray]]:
    """Moves owner residuals; returns by leaf the parts that no owner keeps any more."""
    given, was, now = (x.server_residual for x in (node, old, new))
    # There are none, or the state was made without the number of workers.
    if given is None and (was is not None or now is None):
      return None, {}
    known = self._known(plans[0]), self._known(plans[1])
    factor = self.old_workers / self.workers if self.keep == "sum" else 1.0
    arrays = {axes: [*map(host_array, own)] for axes, own in (given or {}).items()}
    moved, left = regroup.recut_owned(arrays, known, self._places, factor)
    each = np.float32(1 / self.workers if self.keep == "addends" else factor)
    return moved or None, {i: x * each for i, x in left.items()}

  def _memory(self, node: CompressState, old: Any, new: Any, plan: _Plan) -> Any:
    if new.memory is None or (node.memory is None and old.memory is not None):
      return None
    first = first_stored(self._known(plan), jnp.asarray(host_array(node.key)))
    kept, was, first = (x or Memory({}, {}) for x in (node.memory, old.memory, first))
    kept, workers = jax.tree.map(host_array, kept), (self.old_workers, self.workers)
    return regroup.regroup_memory(kept, was, new.memory, first, workers)

  def _rows(self, node: OwnedRows, new: OwnedRows) -> OwnedRows:
    """Reshards a leaf, ``[N * places * share, ...]``, to M owners."""
    ((axes, x),) = node.arrays.items()
    places, like = self._places(axes), new.arrays[axes]
    rows = regroup.swap_outer(host_array(x), self.old_workers, places)
    rows = rows.reshape(places, x.size // places)
    result = np.zeros((places, like.size // places), x.dtype)
    count = min(rows.shape[1], result.shape[1])  # what is beyond is padding
    result[:, :count] = rows[:, :count]
    shares = regroup.swap_outer(result.reshape(like.shape), places, self.workers)
    return OwnedRows(self._stacked({axes: shares}))

  def _own_steps(self, node: OwnSteps, new: OwnSteps, specs: OwnSteps) -> OwnSteps:
    """Gives worker i the inner state of worker i mod N; ValueError within a round."""
    for path, x in jax.tree_util.tree_leaves_with_path(node.moved):
      if np.any(host_array(x)):
        raise ValueError(
          "`opt_state` must be a state after an exchange, where all workers of "
          "local_steps have the same parameters, but they differ in "
          f"{jax.tree_util.keystr(path)}; take steps to the end of the round. "
          "With fragments, or mixing below 1, there is none: begin with the "
          "parameters and the state of optimizer.init."
        )
    own = lambda x, like: np.resize(host_array(x), like.shape)  # one after the other
    moved = lambda x, like, spec: self.place(own(x, like), spec, x)
    return jax.tree.map(moved, node, new, specs)

  def _places(self, axes: Axes) -> int:
    """Returns the number of shares of a worker along other axes."""
    return math.prod(self.sizes[axis] for axis in axes if axis not in self.names)

  def _known(self, plan: _Plan) -> MessagePlan:
    if plan is None:
      raise ValueError(
        "`optimizer.init` must return gradcomp's states as their own `init` makes "
        "them, with the same `count`: otherwise, and for layers in a scan, the rows of "
        "owners are unknown; begin with the state of optimizer.init, or use "
        'exchange="all_gather", which has no owners.'
      )
    return plan
