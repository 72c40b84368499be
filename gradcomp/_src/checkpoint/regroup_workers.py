"""Moves a state from N to M workers, in NumPy: each worker's own, and owned rows."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.checkpoint.placement import host_array
from gradcomp._src.codecs.protocol import Codec, elements
from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.core import residual_storage as storage
from gradcomp._src.core.codec_memory import first_stored
from gradcomp._src.core.state import CompressState, OwnedRows, OwnSteps
from gradcomp._src.exchange.plan import MessagePlan, owned_matrices
from gradcomp._src.mesh.axes import Axes

Keep = Literal["sum", "mean", "addends"]

_Plan = MessagePlan | None


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
  """A move of a state from N to M workers; shared parts stay."""

  old: int  # N
  new: int  # M
  keep: Keep  # as for gradcomp.reshard_state
  places: Callable[[Axes], int]  # the shares of a worker along other axes of the mesh
  plans: Iterator[tuple[_Plan, _Plan]]  # old and new, of each CompressState

  def __call__(self, node: Any, was: Any, now: Any) -> Any:
    """Moves a part of a state, by the shapes of the old and the new one."""
    if isinstance(node, CompressState):
      return self._compressed(node, was, now, *next(self.plans))
    if isinstance(node, OwnedRows):
      return self._rows(node, now)
    if isinstance(node, OwnSteps):
      return self._own_steps(node, now)
    # Other arrays with more rows for more workers are gradients that MultiSteps around
    # an exchange has collected, each worker's own.
    return self._regrouped(node) if was.shape != now.shape else node

  def _compressed(
    self, node: CompressState, was: Any, now: Any, plan: _Plan, planned: _Plan
  ) -> CompressState:
    owned, left = self._owned(node, was, now, plan, planned)
    treedef: Any
    leaves, treedef = jax.tree.flatten(node.residual, is_leaf=storage.is_stored)
    if node.estimate is None or self.new == self.old:
      residual = [self._residual(x, left.get(i)) for i, x in enumerate(leaves)]
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

  def _residual(self, x: Any, more: np.ndarray | None) -> Any:
    """Moves the residual of a leaf, in any storage format."""
    if not storage.is_stored(x):
      return self._regrouped(x, more)
    blocks = x.scales.shape[-1] // (self.old if x.scales.ndim == 1 else 1)
    wide = floats_of(jax.tree.map(host_array, x), self.old)
    return stored_of(self._regrouped(wide, more), self.new, blocks)

  def _regrouped(self, x: Any, more: np.ndarray | None = None) -> np.ndarray:
    """Regroups N workers' addends for M, ``[M * n, ...]``, which add ``more``."""
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
        rows = _by_place(host_array(array), first.workers, self.places(axes))
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
        moved[axes] = *moved.get(axes, ()), _by_worker(rows, last.workers)
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
    first = first_stored(_known(planned), jnp.asarray(host_array(node.key)))
    kept, was, first = (x or Memory({}, {}) for x in (node.memory, was.memory, first))
    kept, own = jax.tree.map(host_array, kept), dict[Axes, dict[int, Any]]()
    stacked = lambda one, like: np.resize(np.asarray(one), like.shape)  # copies

    def followed(begins: np.ndarray, x: np.ndarray) -> np.ndarray:
      count, rest = divmod(len(x), self.old)
      if rest or (count * self.new, *x.shape[1:]) != begins.shape:
        return begins
      stay = count * min(self.old, self.new)
      return np.concatenate([x[:stay], begins[stay:]])

    for axes, trees in now.memory.own.items():
      for i, shapes in trees.items():
        begins = jax.tree.map(stacked, first.own[axes][i], shapes)
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
    rows = _by_place(host_array(x), self.old, places).reshape(places, -1)
    result = np.zeros((places, like.size // places), x.dtype)
    count = min(rows.shape[1], result.shape[1])  # what is beyond is padding
    result[:, :count] = rows[:, :count]
    rows = result.reshape(places, len(like) // places, *like.shape[1:])
    return OwnedRows({axes: _by_worker(rows, self.new)})

  def _own_steps(self, node: OwnSteps, now: OwnSteps) -> OwnSteps:
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
  tiles = np.asarray(elements(jnp.asarray(rows), codec))
  return codec.join(tiles, like)


def _by_place(x: np.ndarray, workers: int, places: int) -> np.ndarray:
  """Turns ``[N * places * n, ...]``, of shares, into ``[places, N * n, ...]``."""
  share = len(x) // (workers * places)
  shares = x.reshape(workers, places, share, *x.shape[1:]).swapaxes(0, 1)
  return shares.reshape(places, workers * share, *x.shape[1:])


def _by_worker(rows: np.ndarray, workers: int) -> Any:
  """Undoes :func:`_by_place` of M workers."""
  places, count, *tile = rows.shape
  shares = rows.reshape(places, workers, count // workers, *tile).swapaxes(0, 1)
  return shares.reshape(places * count, *tile)
