"""Measures of a step's messages by sums of leaves, for `gradcomp.telemetry.inspect`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp._src.core.residual_storage import is_stored, read_residual
from gradcomp._src.core.state import CompressState, measures, with_measures
from gradcomp._src.exchange.collectives import STAGE, psum
from gradcomp._src.exchange.owners import OwnerResiduals, owned_leaves
from gradcomp._src.exchange.plan import MessagePlan, own_axes
from gradcomp._src.exchange.step import Leaves, Reduced, Step
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.types import mark_varying

# The least share of the gradients' squares that those of their mean are where all are
# the same. Two sums of the same float32 numbers differ by less.
_SAME = 1 - 1e-6


class Sums(NamedTuple):
  """Sums over a leaf's elements, ``float32[leaves]``: means over the workers."""

  gradient: jax.Array  # squares of the gradient
  residual: jax.Array  # squares of the residual after the step
  corrected: jax.Array  # squares of gradient plus residual
  unsent: jax.Array  # squares of the unsent part
  zeros: jax.Array  # zeros in the sent part
  owned: jax.Array  # squares of the owner residuals, added over the workers
  size: jax.Array  # elements
  mean: jax.Array  # squares of the result
  true: jax.Array  # squares of the mean of all workers' gradients
  product: jax.Array  # products of result and mean gradient
  equal: jax.Array  # elements of leaves with the same gradient on all workers


class WorkerLeaf(NamedTuple):
  """The arrays of one leaf on a worker in a step, in ``float32``."""

  gradient: jax.Array
  residual: jax.Array  # after the step
  corrected: jax.Array
  unsent: jax.Array
  sent: jax.Array
  mean: jax.Array


def squares(x: jax.Array) -> jax.Array:
  """Returns the sum of the squares of all elements."""
  return jnp.sum(x * x)


def watched(state: CompressState, leaves: int) -> CompressState:
  """Returns a state with sums for ``leaves`` leaves, NaN until a step measures."""
  return with_measures(state, _filled(leaves, jnp.nan))


def _filled(leaves: int, value: float) -> Sums:
  return Sums(*[jnp.full(leaves, value, jnp.float32)] * len(Sums._fields))


def measured(
  state: CompressState, step: Step, updates: Any, corrected: Leaves, reduced: Reduced
) -> CompressState:
  """Returns the state after a step, with the sums of the step if it is inspected."""
  if measures(state) is None:
    return state
  plan, workers = step.plan, step.workers
  # Under Explicit axes gradients are addends, an Nth of a worker's gradient elsewhere.
  size = 1 if workers is None else workers.size
  factor = 1.0 if workers is None else workers.scale * size
  residuals = map(read_residual, jax.tree.leaves(state.residual, is_leaf=is_stored))
  none = [jnp.zeros(1, jnp.float32)] * len(corrected)
  before = jax.tree.leaves(updates), list(residuals) or none, corrected
  after = reduced.unsent, reduced.sent, reduced.mean or _unknown(plan)
  leaves = []
  for column in zip(*before, *after, strict=True):
    leaf = WorkerLeaf(*(x.astype(jnp.float32) for x in column))
    gradient, residual = factor * leaf.gradient, factor * leaf.residual
    leaves.append(leaf._replace(gradient=gradient, residual=residual))
  # Types tell leaves apart that differ over other axes, so they share no array.
  groups: dict[tuple[str, ...], list[int]] = {}
  for i, others in enumerate(plan.others):
    groups.setdefault(others, []).append(i)
  found = [_filled(0, 0.0)]
  for others, numbers in groups.items():
    group = [leaves[i] for i in numbers]
    owned = size * _owned(plan, state.server_residual, others)[np.array(numbers)]
    own = jnp.stack([*_columns(map(_of_worker, group)), owned])
    true = [leaf.gradient for leaf in group]
    if workers is not None:  # all that an inspected step sends more
      total = _sum((own, true), workers.axis_name)
      own, true = jax.tree.map(lambda x: x / size, total)
    rows = jnp.concatenate([own, jnp.stack(_columns(map(_of_all, group, true)))])
    if others:
      rows = _sum(rows, others)
    sums = Sums._make([*rows, rows[0]])
    same = (sums.true >= _SAME * sums.gradient) & (size > 1)
    found.append(sums._replace(equal=jnp.where(same, sums.size, 0.0)))
  order = np.argsort([i for numbers in groups.values() for i in numbers])
  in_order = lambda *x: jnp.concatenate(x)[order]
  return with_measures(state, jax.tree.map(in_order, *found))


def _of_worker(leaf: WorkerLeaf) -> tuple[jax.Array, ...]:
  """Returns the sums of a leaf that differ between workers."""
  squared = map(squares, (leaf.gradient, leaf.residual, leaf.corrected, leaf.unsent))
  return *squared, jnp.sum(leaf.sent == 0, dtype=jnp.float32)


def _of_all(leaf: WorkerLeaf, true: jax.Array) -> tuple[jax.Array, ...]:
  """Returns the sums of a leaf that all workers share: size, result, mean gradient."""
  product = jnp.sum(leaf.mean * true)
  return jnp.float32(true.size), squares(leaf.mean), squares(true), product


def _columns(leaves: Any) -> list[jax.Array]:
  """Turns a tuple of sums a leaf into an array of leaves a sum."""
  return [jnp.stack(column) for column in zip(*leaves, strict=True)]


def _unknown(plan: MessagePlan) -> list[jax.Array]:
  """Returns NaN in place of means that stay with their owners."""
  # Typed as a mean is, which is equal on all workers.
  nan = [jnp.full(leaf.shape, jnp.nan, jnp.float32) for leaf in plan.leaves]
  typed = lambda x, axes: mark_varying(x, axes) if axes else x
  return list(map(typed, nan, plan.others))


def _sum(x: Any, axis_name: AxisName) -> Any:
  with jax.named_scope(STAGE):
    return psum(x, axis_name)


def _owned(
  plan: MessagePlan, residuals: OwnerResiduals | None, others: tuple[str, ...]
) -> jax.Array:
  """Returns squares of this worker's owner residuals, ``float32[leaves + 1]``."""
  result = jnp.zeros(len(plan.names) + 1, jnp.float32)
  if residuals is None or plan.axis_name is None:
    return result
  axes = own_axes(plan.axis_name, others)
  number = lax.axis_index(plan.axis_name)
  places = owned_leaves(plan, number).get(axes)
  for place, rows in zip(places or (), residuals[axes] if places else (), strict=True):
    by_row = jnp.sum(rows * rows, axis=range(1, rows.ndim))
    result = result.at[place].add(by_row)
  return result
