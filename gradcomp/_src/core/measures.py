"""Measures of a step's messages, inside the step, for `gradcomp.telemetry.inspect`.

A worker measures its own leaves by sums, which add up over leaves and workers. So all
workers exchange a few kilobytes a leaf, in one message.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from gradcomp._src.core.leaf_measures import Sums, WorkerLeaf, squares, worker_sums
from gradcomp._src.core.residual_storage import is_stored, read
from gradcomp._src.core.sketch import sketch
from gradcomp._src.core.state import CompressState, Watched
from gradcomp._src.exchange.collectives import STAGE, Workers, psum
from gradcomp._src.exchange.messages import Exchanged, OwnerResiduals, owned_leaves
from gradcomp._src.exchange.plan import Plan, own_axes
from gradcomp._src.mesh.axes import AxisName


def watched(state: CompressState, leaves: int) -> Watched:
  """Returns a state with sums for ``leaves`` leaves, NaN until a step measures."""
  return Watched(*state, _filled(leaves, jnp.nan))


def _filled(leaves: int, value: float) -> Sums:
  column = jnp.full(leaves, value, jnp.float32)
  sums = Sums._make([column] * len(Sums._fields))
  return sums._replace(exponents=jnp.full((leaves, 256), value, jnp.float32))


def measured(
  state: Any,
  plan: Plan,
  updates: Any,
  corrected: Sequence[jax.Array],
  exchanged: Exchanged,
  workers: Workers | None,
) -> Any:
  """Returns the state after a step, with its sums if it is :class:`Watched`.

  ``updates`` are the gradients, and ``corrected`` the gradients plus residuals.
  """
  if not isinstance(state, Watched):
    return state
  # Under Explicit axes gradients are addends, an Nth of a worker's gradient elsewhere.
  size = 1 if workers is None else workers.size
  factor = 1.0 if workers is None else workers.scale * size
  gradients = jax.tree.leaves(updates)
  nothing = [jnp.zeros(1, jnp.float32)] * len(gradients)
  residuals = map(read, jax.tree.leaves(state.residual, is_leaf=is_stored))
  columns = (
    gradients,
    list(residuals) or nothing,
    corrected,
    exchanged.unsent,
    exchanged.sent(),
    exchanged.mean,
  )
  leaves = [WorkerLeaf(*_float32(leaf)) for leaf in zip(*columns, strict=True)]
  leaves = [
    x._replace(gradient=factor * x.gradient, residual=factor * x.residual)
    for x in leaves
  ]
  # Types tell leaves apart that differ over other axes, so they share no array.
  groups: dict[tuple[str, ...], list[int]] = {}
  for i, others in enumerate(plan.others):
    groups.setdefault(others, []).append(i)
  rows: dict[int, Sums] = {}
  for others, numbers in groups.items():
    of_group = {i: leaves[i] for i in numbers}
    owned = _owned(plan, state.server_residual, others)
    own = [
      x._replace(owned=size * owned[i])
      for i, x in zip(numbers, worker_sums(plan, of_group), strict=True)
    ]
    found = _over_workers(plan, own, list(of_group.values()), workers, others)
    rows |= zip(numbers, found, strict=True)
  if not rows:
    return state._replace(sums=_filled(0, 0.0))
  ordered = [rows[i] for i in range(len(leaves))]
  return state._replace(sums=jax.tree.map(lambda *x: jnp.stack(x), *ordered))


def _float32(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  return [x.astype(jnp.float32) for x in arrays]


def _over_workers(
  plan: Plan,
  own: list[Sums],
  leaves: Sequence[WorkerLeaf],
  workers: Workers | None,
  others: tuple[str, ...],
) -> list[Sums]:
  """Averages sums over the workers, and estimates the square norm of the true mean."""
  # No worker has the true mean of a leaf. It is a m + r, where m is the result and r is
  # at right angles to m. So is each worker's gradient, and the means of the workers' a
  # and r are the a and r of the true mean. Workers know a from scalar products, and
  # estimate the length of the mean r from sketches.
  if workers is not None:
    sketches = list(map(_across, own, leaves)) if plan.sends else []
    flat, restore = ravel_pytree((own, sketches))
    own, sketches = restore(_sum(flat, workers.axis_name) / workers.size)
    if sketches:
      own = list(map(_with_true, own, sketches))
  if others:
    flat, restore = ravel_pytree(own)
    own = restore(_sum(flat, others))
  return own


def _sum(x: jax.Array, axis_name: AxisName) -> jax.Array:
  with jax.named_scope(STAGE):
    return psum(x, axis_name)


def _along(sums: Sums) -> jax.Array:
  """Returns a: a gradient's projection on the result, as a multiple of the result."""
  return sums.product / jnp.where(sums.mean > 0, sums.mean, 1.0)


def _across(sums: Sums, leaf: WorkerLeaf) -> jax.Array:
  """Sketches r: the component of a worker's gradient at right angles to the result."""
  return sketch(leaf.gradient - _along(sums) * leaf.mean)


def _with_true(sums: Sums, across: jax.Array) -> Sums:
  """Adds the squares of the true mean of a leaf, from the sketch of its r."""
  return sums._replace(true=_along(sums) * sums.product + squares(across))


def _owned(
  plan: Plan, residuals: OwnerResiduals | None, others: tuple[str, ...]
) -> jax.Array:
  """Returns the squares of this worker's owner residuals, ``float32[leaves + 1]``.

  Only leaves that vary over the other axes ``others`` count.
  """
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
