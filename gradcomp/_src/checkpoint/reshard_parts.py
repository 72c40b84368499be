"""Resharding of each part of an optimizer state from N to M workers, on the host."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcomp._src.checkpoint.placement import host_array
from gradcomp._src.checkpoint.regroup_workers import (
  floats_of,
  regroup_memory,
  regroup_sum,
  stored_of,
)
from gradcomp._src.checkpoint.reshard_rows import recut_owned, recut_rows
from gradcomp._src.checkpoint.shapes import FirstState
from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.core.codec_memory import first_stored
from gradcomp._src.core.residual_storage import is_stored
from gradcomp._src.core.state import CompressState, OwnedRows, OwnSteps, collects
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.mesh.axes import Axes
from gradcomp._src.mesh.specs import stacked_over

Keep = Literal["sum", "mean", "addends"]

_Plans = Iterator[tuple[MessagePlan | None, MessagePlan | None]]


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
  """A move of a state from N to M workers, with the first states of both.

  ``names`` are the axes of the workers, and ``place(x, spec, like)`` puts an array on
  the devices; see :func:`gradcomp.reshard_state` for ``keep``.
  """

  old_workers: int
  workers: int
  names: tuple[str, ...]
  keep: Keep
  old: FirstState
  new: FirstState
  place: Callable[..., Any]

  def state(self, opt_state: Any) -> Any:
    """Moves a whole state."""
    like = self.old.shapes, self.new.shapes, self.new.specs
    return self._tree(opt_state, like, zip(self.old.plans, self.new.plans, strict=True))

  def _tree(self, state: Any, like: tuple[Any, Any, Any], plans: _Plans) -> Any:
    """Moves a tree of states; ``like`` are its shapes, old and new, and its specs."""

    def moved(node: Any, old: Any, new: Any, specs: Any) -> Any:
      if isinstance(node, CompressState):
        return self._compressed(node, old, new, specs, next(plans))
      if isinstance(node, OwnedRows):
        return self._rows(node, new)
      if isinstance(node, OwnSteps):
        return self._own_steps(node, specs)
      if collects(node):
        inner = tuple(x.inner_opt_state for x in (old, new, specs))
        return optax.MultiStepsState(
          mini_step=self.place(node.mini_step, specs.mini_step),
          gradient_step=self.place(node.gradient_step, specs.gradient_step),
          inner_opt_state=self._tree(node.inner_opt_state, inner, plans),
          acc_grads=jax.tree.map(self._addends, node.acc_grads, specs.acc_grads),
          skip_state=jax.tree.map(self.place, node.skip_state, specs.skip_state),
        )
      return self.place(node, specs)

    return jax.tree.map(moved, state, *like, is_leaf=_is_ours)

  def _compressed(
    self,
    node: CompressState,
    old: CompressState,
    new: CompressState,
    specs: Any,
    plans: tuple[MessagePlan | None, MessagePlan | None],
  ) -> CompressState:
    owned, left = self._owned(node, old, new, plans)
    treedef: Any
    leaves, treedef = jax.tree.flatten(node.residual, is_leaf=is_stored)
    places = treedef.flatten_up_to(specs.residual)
    residual = [
      self._residual(x, spec, left.get(i))
      for i, (x, spec) in enumerate(zip(leaves, places, strict=True))
    ]
    memory = self._memory(node, old, new, plans[1])
    return CompressState(
      count=self.place(node.count, specs.count),
      key=self.place(node.key, specs.key),
      residual=jax.tree.unflatten(treedef, residual),
      server_residual=owned and self._stacked(owned),
      memory=memory and Memory(*map(self._stacked, memory)),
      velocity=jax.tree.map(self._addends, node.velocity, specs.velocity),
    )

  def _stacked(self, arrays: dict[Axes, Any]) -> dict[Axes, Any]:
    """Places arrays by the axes that stack them."""
    result = {}
    for axes, own in arrays.items():
      spec = stacked_over(axes, axes)
      result[axes] = jax.tree.map(lambda x, spec=spec: self.place(x, spec), own)
    return result

  def _residual(self, x: Any, spec: Any, more: np.ndarray | None) -> Any:
    """Moves the residual of a leaf, in any storage format."""
    if not is_stored(x):
      return self._addends(x, spec, more)
    wide = floats_of(jax.tree.map(host_array, x), self.old_workers)
    blocks = x.scales.shape[-1] // (self.old_workers if x.scales.ndim == 1 else 1)
    stored = stored_of(self._regrouped(wide, more), self.workers, blocks)
    return jax.tree.map(self.place, stored, spec)

  def _addends(self, x: Any, spec: Any, more: np.ndarray | None = None) -> Any:
    """Moves an array that workers sum; each also gets ``more``."""
    return self.place(self._regrouped(host_array(x), more), spec, x)

  def _regrouped(self, x: np.ndarray, more: np.ndarray | None) -> np.ndarray:
    factor = self.workers / self.old_workers if self.keep == "mean" else 1.0
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    result = regroup_sum(wide, self.old_workers, self.workers, factor)
    if more is not None:
      result += np.concatenate([np.atleast_1d(more)] * self.workers)
    return result.astype(x.dtype)

  def _owned(
    self,
    node: CompressState,
    old: CompressState,
    new: CompressState,
    plans: tuple[MessagePlan | None, MessagePlan | None],
  ) -> tuple[Any, dict[int, np.ndarray]]:
    """Moves owner residuals; returns by leaf the parts that no owner keeps any more."""
    given, was, now = (x.server_residual for x in (node, old, new))
    # There are none, or the state was made without the number of workers.
    if given is None and (was is not None or now is None):
      return None, {}
    known = self._known(plans[0]), self._known(plans[1])
    factor = self.old_workers / self.workers if self.keep == "sum" else 1.0
    arrays = {axes: [*map(host_array, own)] for axes, own in (given or {}).items()}
    places = {axes: self._places(axes) for axes in {**(was or {}), **(now or {})}}
    moved, left = recut_owned(arrays, known, places, factor)
    each = np.float32(1 / self.workers if self.keep == "addends" else factor)
    return moved or None, {i: x * each for i, x in left.items()}

  def _memory(
    self,
    node: CompressState,
    old: CompressState,
    new: CompressState,
    plan: MessagePlan | None,
  ) -> Any:
    """Moves the state of codecs."""
    if new.memory is None or (node.memory is None and old.memory is not None):
      return None
    first = first_stored(self._known(plan), jnp.asarray(host_array(node.key)))
    kept, was, first = (x or Memory({}, {}) for x in (node.memory, old.memory, first))
    kept = jax.tree.map(host_array, kept)
    return regroup_memory(
      kept, was, new.memory, first, (self.old_workers, self.workers)
    )

  def _rows(self, node: OwnedRows, new: OwnedRows) -> OwnedRows:
    """Moves the rows that workers own."""
    arrays = {}
    for axes, own in node.arrays.items():
      moved = [
        recut_rows(
          host_array(x), self.old_workers, self.workers, self._places(axes), y.shape[0]
        )
        for x, y in zip(own, new.arrays[axes], strict=True)
      ]
      arrays[axes] = tuple(moved)
    return OwnedRows(self._stacked(arrays))

  def _own_steps(self, node: OwnSteps, specs: OwnSteps) -> OwnSteps:
    """Gives worker i the inner state of worker i mod N; ValueError within a round."""
    for path, x in jax.tree_util.tree_leaves_with_path(node.moved):
      if np.any(host_array(x)):
        raise ValueError(
          f"`opt_state` must be that behind an exchange, where all workers of "
          f"local_steps have the same parameters, but those of "
          f"{jax.tree_util.keystr(path)} differ; take steps to the end of the round. "
          "With fragments, or mixing below 1, there is none: begin with the "
          "parameters and the state of optimizer.init."
        )

    def moved(x: Any, spec: Any) -> Any:
      parts = np.split(host_array(x), self.old_workers)
      own = [parts[i % self.old_workers] for i in range(self.workers)]
      return self.place(np.concatenate(own), spec, x)

    return jax.tree.map(moved, node, specs)

  def _places(self, axes: Axes) -> int:
    """Returns the number of shares of a worker along other axes."""
    return math.prod(self.new.sizes[axis] for axis in axes if axis not in self.names)

  def _known(self, plan: MessagePlan | None) -> MessagePlan:
    if plan is None:
      raise ValueError(
        "`optimizer.init` must return gradcomp's states as their own `init` makes "
        "them, with the same `count`: what rows owners keep is not known otherwise."
      )
    return plan


def _is_ours(node: Any) -> bool:
  return collects(node) or isinstance(node, CompressState | OwnedRows | OwnSteps)
