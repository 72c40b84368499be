"""``reshard_state``: moves an optimizer state from N to M workers, on the host."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import keystr

from gradcomp._src.checkpoint import shapes
from gradcomp._src.checkpoint.placement import host_array, is_key, put
from gradcomp._src.checks import one_of
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.core import feedback as storage
from gradcomp._src.core.state import CompressState, OwnedRows, OwnSteps, first_memory
from gradcomp._src.exchange.plan import MessagePlan, owned_matrices
from gradcomp._src.mesh import study, types
from gradcomp._src.mesh.axes import Axes, AxisName, axes_in, axis_names, is_spec
from gradcomp._src.mesh.trees import boxed_like, unboxed

Keep = Literal["sum", "mean", "addends"]
State = TypeVar("State")

_Plan = MessagePlan | None
_leaves = functools.partial(jax.tree_util.tree_leaves_with_path, is_leaf=is_spec)


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
  for path, x in _leaves(opt_state):
    if isinstance(x, jax.core.Tracer):
      raise ValueError(
        f"`opt_state`{keystr(path)} must be an array, got {x.aval.str_short()} inside "
        "a transformed function; call gradcomp.reshard_state outside of jax.jit."
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
  with study.planned_on(mesh):
    with study.planned_for(old_platform, "old_platform"):
      old, _, old_plans, _ = first(workers=old_workers)
    new, specs, plans, sizes = first(workers=workers)
  given, was, now, specs = map(unboxed, (opt_state, old, new, specs))
  shapes.check_fits(given, was, old_workers)
  places = lambda axes: math.prod(sizes[x] for x in axes if x not in names)
  pairs = zip(old_plans, plans, strict=True)
  move = Move(old_workers, workers, keep, places, pairs).part
  ours = lambda x: isinstance(x, CompressState | OwnedRows | OwnSteps)
  moved = jax.tree.map(move, given, was, now, is_leaf=ours)
  before, to = dict(_leaves(given)), dict(_leaves(specs))

  def place(path: Any, x: Any) -> Any:
    """Puts an array on devices by its spec, or as it lay over more axes."""
    if mesh.empty:
      return x if is_key(x) else host_array(x)
    spec, own = to[path], types.placed_spec(before.get(path, x))
    if axes_in(spec) <= axes_in(own) <= {*mesh.axis_names}:
      spec = own
    return put(x, NamedSharding(mesh, spec))

  return boxed_like(opt_state, jax.tree_util.tree_map_with_path(place, moved))


class Move(NamedTuple):
  """A move of a state from N to M workers; shared parts stay."""

  old: int  # N
  new: int  # M
  keep: Keep  # as for gradcomp.reshard_state
  places: Callable[[Axes], int]  # the shares of a worker along other axes of the mesh
  plans: Iterator[tuple[_Plan, _Plan]]  # old and new, of each CompressState

  def part(self, node: Any, was: Any, now: Any) -> Any:
    """Moves a part of a state, by the shapes of the old and the new one."""
    if isinstance(node, OwnedRows):
      return self._rows(node, now)
    if isinstance(node, OwnSteps):
      return self._own_steps(node, now)
    if not isinstance(node, CompressState):
      # Other arrays with more rows for more workers are gradients that MultiSteps
      # around an exchange has collected, each worker's own.
      return self._regrouped(node) if was.shape != now.shape else node
    plan, planned = next(self.plans)
    owned, left = self._owned(node, was, now, plan, planned)
    treedef: Any
    leaves, treedef = jax.tree.flatten(node.residual, is_leaf=storage.is_stored)
    if node.estimate is None or self.new == self.old:
      residual = [self._regrouped(x, left.get(i)) for i, x in enumerate(leaves)]
    else:
      # Each worker's residual, that with the shared estimate as its own.
      share = np.float32(-1 / self.new if self.keep == "addends" else -1)
      shares = [host_array(x) * share for x in jax.tree.leaves(node.estimate)]
      residual = [np.concatenate([x] * self.new) for x in shares]
      owned = jax.tree.map(np.zeros_like, owned)
    return node._replace(
      residual=jax.tree.unflatten(treedef, residual),
      server_residual=owned,
      memory=self._memory(node, was, now, planned),
      velocity=jax.tree.map(self._regrouped, node.velocity),
    )

  def _regrouped(self, x: Any, more: np.ndarray | None = None) -> Any:
    """Regroups N workers' addends for M, ``[M * n, ...]``, which add ``more``."""
    if storage.is_stored(x):
      blocks = x.scales.shape[-1] // (self.old if x.scales.ndim == 1 else 1)
      floats = floats_of(jax.tree.map(host_array, x), self.old)
      return stored_of(self._regrouped(floats, more), self.new, blocks)
    # New workers get zeros. Worker i that leaves adds its array to that of i % M.
    old, new, x = self.old, self.new, host_array(x)
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    parts, factor = np.split(wide, old), new / old if self.keep == "mean" else 1.0
    add = lambda a, b: np.where(b == 0, a, a + b)  # zeros leave the bits of the other
    sums = [functools.reduce(add, parts[i::new]) for i in range(min(old, new))]
    sums += [np.zeros_like(parts[0])] * (new - len(sums))
    result = np.concatenate(sums) * wide.dtype.type(factor)
    if more is not None:
      result += np.concatenate([np.atleast_1d(more)] * new)
    return result.astype(x.dtype)

  def _owned(
    self, node: CompressState, was: Any, now: Any, plan: _Plan, planned: _Plan
  ) -> tuple[Any, dict[int, np.ndarray]]:
    """Moves owner residuals; returns by leaf the parts that no owner keeps any more."""
    given, before, after = (x.server_residual for x in (node, was, now))
    # There are none, or the state was made without the number of workers.
    if given is None and (before is not None or after is None):
      return None, {}
    first, last = _known(plan), _known(planned)
    factor = np.float32(self.old / self.new if self.keep == "sum" else 1)
    # The rows of a leaf, [places, rows, *tile_shape], its codec and its shape. Worker i
    # has those from i * share on, and zeros fill the last shares of a matrix. Along
    # other mesh axes, each place has its own rows.
    waiting: dict[int, tuple[np.ndarray, Codec, jax.ShapeDtypeStruct]] = {}
    for axes, matrices in owned_matrices(first).items():
      for matrix, array in zip(matrices, (given or {})[axes], strict=True):
        rows = _swapped(host_array(array), first.workers, self.places(axes))
        for leaf, slot, like in matrix.leaves():
          waiting[leaf] = rows[:, slot.start : slot.stop], matrix.codec, like
    moved: dict[Axes, tuple[np.ndarray, ...]] = {}
    for axes, matrices in owned_matrices(last).items():
      for matrix in matrices:
        share, *tile = matrix.shape
        rows = np.zeros((self.places(axes), last.workers * share, *tile), np.float32)
        for leaf, slot, _ in matrix.leaves():
          if leaf in waiting:
            part, codec, like = waiting.pop(leaf)
            # A sparse codec has a range for each worker.
            if tuple(tile) != part.shape[2:]:
              tiles = [matrix.codec.split(_leaf(x, codec, like)) for x in part]
              part = np.stack([x.reshape(-1, *tile) for x in tiles])
            rows[:, slot.start : slot.stop] = part * factor
        owned = _swapped(rows.reshape(-1, *tile), self.places(axes), last.workers)
        moved[axes] = *moved.get(axes, ()), owned.reshape(-1, *tile)
    if any(len(rows) > 1 for rows, *_ in waiting.values()):
      raise ValueError(
        "`optimizer` must have an exchange with owner residuals for the new number of "
        "workers, too, where parameters are sharded over other axes; give its "
        "exchange= by name."
      )
    each = np.float32(1 / self.new) if self.keep == "addends" else factor
    left = {i: _leaf(x[0], codec, y) * each for i, (x, codec, y) in waiting.items()}
    return moved or None, left

  def _memory(self, node: CompressState, was: Any, now: Any, planned: _Plan) -> Any:
    """Moves codec states, by axes and leaf; new ones begin as in ``init``."""
    # Shared state stays. A worker that stays keeps its own, and others get the first
    # one; all do if shapes differ. The state may lack each worker's own part.
    if now.memory is None or (node.memory is None and was.memory is not None):
      return None
    first = first_memory(_known(planned), jnp.asarray(host_array(node.key)))
    kept, was = (x or Memory({}, {}) for x in (node.memory, was.memory))
    kept, own = jax.tree.map(host_array, kept), dict[Axes, dict[int, Any]]()
    stacked = lambda one, like: np.resize(np.asarray(one), like.shape)  # copies

    def followed(begins: np.ndarray, x: np.ndarray) -> np.ndarray:
      count, rest = divmod(len(x), self.old)
      if rest or (count * self.new, *x.shape[1:]) != begins.shape:
        return begins
      stay = count * min(self.old, self.new)
      return np.concatenate([x[:stay], begins[stay:]])

    for axes, trees in now.memory.own.items():
      for i, likes in trees.items():
        begins = jax.tree.map(stacked, first.own[axes][i], likes)
        if i in kept.own.get(axes, {}):
          begins = jax.tree.map(followed, begins, kept.own[axes][i])
        elif i in was.own.get(axes, {}):
          continue
        own.setdefault(axes, {})[i] = begins  # also where another exchange kept none
    shared = {
      axes: trees | {i: x for i, x in kept.shared.get(axes, {}).items() if i in trees}
      for axes, trees in first.shared.items()
    }
    return Memory(shared, own)

  def _rows(self, node: OwnedRows, now: OwnedRows) -> OwnedRows:
    """Reshards a leaf, ``[N * places * share, ...]``, to M owners."""
    ((axes, x),) = node.arrays.items()
    places, like = self.places(axes), now.arrays[axes]
    rows = _swapped(host_array(x), self.old, places).reshape(places, -1)
    result = np.zeros((places, like.size // places), x.dtype)
    count = min(rows.shape[1], result.shape[1])  # what is beyond is padding
    result[:, :count] = rows[:, :count]
    owned = _swapped(result.reshape(like.shape), places, self.new)
    return OwnedRows({axes: owned.reshape(like.shape)})

  def _own_steps(self, node: OwnSteps, now: OwnSteps) -> OwnSteps:
    """Gives worker i the inner state of worker i mod N; ValueError within a round."""
    for path, x in jax.tree_util.tree_leaves_with_path(node.moved):
      if np.any(host_array(x)):
        raise ValueError(
          "`opt_state` must be a state after an exchange, where all workers of "
          "local_steps have the same parameters, but they differ in "
          f"{keystr(path)}; take steps to the end of the round. "
          "With fragments, or mixing below 1, there is none: begin with the "
          "parameters and the state of optimizer.init."
        )
    own = lambda x, like: np.resize(host_array(x), like.shape)  # one after the other
    return jax.tree.map(own, node, now)


def floats_of(stored: storage.Int8Residual, workers: int) -> np.ndarray:
  """Returns the residuals of N workers as floats, stacked on the first axis."""
  own = jax.tree.map(lambda x: np.stack(np.split(np.asarray(x), workers)), stored)
  return np.concatenate(np.asarray(jax.jit(storage.read_residual)(own)))


def stored_of(
  x: np.ndarray, workers: int, blocks: int | None = None
) -> storage.Int8Residual:
  """Rounds M workers' residuals to ``int8``, in blocks of a worker's last axis."""
  own = np.stack(np.split(x, workers))
  rounded = jax.jit(storage.to_int8, static_argnums=2)  # else many programs
  found = rounded(own, np.full(own.shape, 1 << 15, np.uint16), blocks)
  return jax.tree.map(lambda x: np.concatenate(np.asarray(x)), found)


def _known(plan: _Plan) -> MessagePlan:
  if plan is None:
    raise ValueError(
      "`optimizer.init` must return gradcomp's states as their own `init` makes "
      "them, with the same `count`: otherwise, and for layers in a scan, the rows of "
      "owners are unknown; begin with the state of optimizer.init, or use "
      'exchange="all_gather", which has no owners.'
    )
  return plan


def _leaf(rows: np.ndarray, codec: Codec, like: jax.ShapeDtypeStruct) -> np.ndarray:
  tiles = np.asarray(codec.unrotated(jnp.asarray(rows)).reshape(rows.shape))
  return codec.join(tiles, like)


def _swapped(x: np.ndarray, outer: int, inner: int) -> Any:
  """Turns rows ``[outer * inner * n, ...]`` into ``[inner, outer * n, ...]``."""
  count = len(x) // inner
  rows = x.reshape(outer, inner, count // outer, *x.shape[1:]).swapaxes(0, 1)
  return rows.reshape(inner, count, *x.shape[1:])
