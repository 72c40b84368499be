"""Measures of a step's messages by sums of leaves, for `telemetry.inspect_update`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp._src.core.feedback import is_stored, read_residual
from gradcomp._src.core.state import CompressState
from gradcomp._src.exchange import plan as plans
from gradcomp._src.exchange.collectives import STAGE, psum
from gradcomp._src.exchange.step import Leaves, Step
from gradcomp._src.mesh.types import mark_varying

# Equal gradients have a mean with at least this share of their squares: two sums of the
# same float32 numbers differ by less.
_SAME = 1 - 1e-6
_sum = jax.named_scope(STAGE)(psum)


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


def squares(x: jax.Array) -> jax.Array:
  """Returns the sum of the squares of all elements."""
  return jnp.sum(x * x)


def watched(state: CompressState, leaves: int) -> CompressState:
  """Returns a state with sums for ``leaves`` leaves, NaN until a step measures."""
  return state._replace(measures=_filled(leaves, jnp.nan))


def _filled(leaves: int, value: float) -> Sums:
  return Sums(*[jnp.full(leaves, value, jnp.float32)] * len(Sums._fields))


def measured(
  state: CompressState, step: Step, updates: Any, corrected: Leaves, reduced: Any
) -> CompressState:
  """Returns the state after a step that is inspected, with the sums of the step."""
  plan, size = step.plan, step.plan.workers
  # Under Explicit axes gradients are addends, an Nth of a worker's gradient elsewhere.
  factor = size if plan.is_sum else 1.0
  residuals = map(read_residual, jax.tree.leaves(state.residual, is_leaf=is_stored))
  none = [jnp.zeros(1, jnp.float32)] * len(corrected)
  before = jax.tree.leaves(updates), list(residuals) or none, corrected
  leaves = []
  for i, (x, *given) in enumerate(zip(reduced, *before, strict=True)):
    mean = x.mean
    if mean is None:  # it stays with its owners; NaN is equal on all workers, as it is
      nan = jnp.full(plan.leaves[i].shape, jnp.nan, jnp.float32)
      mean = mark_varying(nan, plan.others[i])
    given += x.unsent, x.sent, mean
    gradient, residual, *rest = (y.astype(jnp.float32) for y in given)
    leaves.append((factor * gradient, factor * residual, *rest))
  # Types tell leaves apart that differ over other axes, so they share no array.
  groups: dict[tuple[str, ...], list[int]] = {}
  for i, others in enumerate(plan.others):
    groups.setdefault(others, []).append(i)
  found = [_filled(0, 0.0)]
  for others, numbers in groups.items():
    mine, shared = [], []
    for *squared, sent, _ in (leaves[i] for i in numbers):
      mine.append([*map(squares, squared), jnp.sum(sent == 0, dtype=jnp.float32)])
    owned = size * _owned(plan, state.server_residual, others)[np.array(numbers)]
    own = jnp.stack([*map(jnp.stack, zip(*mine, strict=True)), owned])
    true = [leaves[i][0] for i in numbers]
    if plan.axis_name is not None:  # all that an inspected step sends more
      total = _sum((own, true), plan.axis_name)
      own, true = jax.tree.map(lambda x: x / size, total)
    for x, (*_, mean) in zip(true, (leaves[i] for i in numbers), strict=True):
      product = jnp.sum(mean * x)
      shared.append([jnp.float32(x.size), squares(mean), squares(x), product])
    columns = map(jnp.stack, zip(*shared, strict=True))
    rows = jnp.concatenate([own, jnp.stack(list(columns))])
    if others:
      rows = _sum(rows, others)
    sums = Sums._make([*rows, rows[0]])
    same = (sums.true >= _SAME * sums.gradient) & (size > 1)
    found.append(sums._replace(equal=jnp.where(same, sums.size, 0.0)))
  order = np.argsort([i for numbers in groups.values() for i in numbers])
  in_order = lambda *x: jnp.concatenate(x)[order]
  return state._replace(measures=jax.tree.map(in_order, *found))


def _owned(
  plan: plans.MessagePlan,
  residuals: plans.OwnerResiduals | None,
  others: tuple[str, ...],
) -> jax.Array:
  """Returns squares of this worker's owner residuals, ``float32[leaves + 1]``."""
  result = jnp.zeros(len(plan.names) + 1, jnp.float32)
  if residuals is None or plan.axis_name is None:
    return result
  axes = plans.own_axes(plan.axis_name, others)
  worker = lax.axis_index(plan.axis_name)
  matrices = plans.owned_matrices(plan).get(axes, [])
  for matrix, rows in zip(matrices, residuals.get(axes, ()), strict=True):
    own = worker * matrix.shape[0] + lax.iota(jnp.int32, matrix.shape[0])
    # Rows that fill up the last shares have the number of leaves.
    numbers = jnp.asarray([*matrix.message.leaves, len(plan.names)])
    place = numbers[matrix.message.layout.leaf_of_row(matrix.group, own)]
    result = result.at[place].add(jnp.sum(rows * rows, axis=range(1, rows.ndim)))
  return result
