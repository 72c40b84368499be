"""The optimizer's step on a worker's shard of the rows, and its measures."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.core.measures import Sums
from gradcomp._src.core.state import CompressState, OwnedRows, measures, with_measures
from gradcomp._src.exchange.collectives import STAGE, psum
from gradcomp._src.floats.dtypes import within
from gradcomp._src.floats.rounding import round_to
from gradcomp._src.kernels.common.float_formats import FloatFormat
from gradcomp._src.mesh.axes import axis_names
from gradcomp._src.parallel.zero.inner import Inner
from gradcomp._src.parallel.zero.shared_rows import SharedRows


class Moved(NamedTuple):
  """The rows of a worker after a step, old ones where a value is not finite."""

  master: OwnedRows  # the parameters of the owner
  inner_state: Any
  lacking: OwnedRows  # the master minus all workers' parameters; NaN if not finite


def step_owned(
  inner: Inner,
  means: OwnedRows,
  old: Any,
  rows: SharedRows,
  seen: OwnedRows,
  unsent: OwnedRows,
) -> Moved:
  """Runs the inner optimizer on this worker's rows.

  ``seen`` are the parameters of all workers, and ``unsent`` the master minus these.
  """
  with jax.named_scope("gradcomp_inner"):
    master = jax.tree.map(jnp.add, seen, unsent)
    leaves = rows.first_leaves()
    moved, finite, state = inner.step(means, old, master, leaves)

    def lacking(here: Any, ok: Any, m: jax.Array, p: jax.Array) -> jax.Array:
      return jnp.where(here, jnp.where(ok, m - p, jnp.nan), 0.0)

    changed = jax.tree.map(lacking, rows.elements(), finite, moved, seen)
    return Moved(jax.tree.map(jnp.where, finite, moved, master), state, changed)


def still_lacking(
  master: OwnedRows,
  seen: OwnedRows,
  sent: OwnedRows,
  old: OwnedRows,
  rows: SharedRows,
  dtypes: Sequence[tuple[Any, Any]],
) -> OwnedRows:
  """Returns the master minus the parameters after ``optax.apply_updates``.

  ``old`` is that before, and stays where no finite update is sent. ``dtypes`` are those
  of each leaf's parameter and update.
  """
  if not dtypes:
    return old
  first, *others = sorted(set(dtypes), key=str)

  def after(p: jax.Array, d: jax.Array, *number: jax.Array) -> jax.Array:
    result = _applied(p, d, *first)
    for pair in others:
      here = jnp.array([x == pair for x in dtypes])[number[0]]
      here = here.reshape(-1, *[1] * (p.ndim - 1))
      result = jnp.where(here, _applied(p, d, *pair), result)
    return result

  found = jax.tree.map(after, seen, sent, *([rows.numbers()] if others else []))
  left = lambda here, m, p, old: jnp.where(here & jnp.isfinite(p), m - p, old)
  return jax.tree.map(left, rows.elements(), master, found, old)


def _applied(p: jax.Array, d: jax.Array, param: Any, update: Any) -> jax.Array:
  """Adds a parameter and its update, rounded to their dtypes."""
  return _rounded(p + _rounded(within(d, update), update), param)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
  """Rounds float32 to the values of a dtype."""
  # XLA may drop a cast to the dtype and back.
  info = jnp.finfo(dtype)
  return round_to(x, FloatFormat(info.nexp, info.nmant)) if info.bits < 32 else x


class Changes(NamedTuple):
  """A worker's rows of a step: updates, and the parameters' distance to the master."""

  before: OwnedRows  # the master minus the parameters
  sent: OwnedRows  # the decoded updates
  after: OwnedRows  # the master minus the parameters with these


def measured_zero(
  state: CompressState, rows: SharedRows, changes: Changes
) -> CompressState:
  """Returns the state, if inspected with sums of gradients, then of updates."""
  found = measures(state)
  if found is None:
    return state
  back = _sums(rows, changes)
  gradients = found._replace(owned=back.owned)
  both = jax.tree.map(lambda *x: jnp.concatenate(x), gradients, back)
  return with_measures(state, both)


def _sums(rows: SharedRows, changes: Changes) -> Sums:
  """Returns the sums of the updates that owners send, by leaf."""
  count = len(rows.plan.names)
  columns = ("size", "gradient", "owned", "mean", "product", "zeros")
  result = {name: jnp.zeros(count, jnp.float32) for name in columns}
  elements, numbers = rows.elements(), rows.numbers()
  own = axis_names(rows.workers.axis_name)
  for axes in changes.before.arrays:
    sums = jnp.zeros((len(columns), count), jnp.float32)
    parts = [x.arrays[axes] for x in (*changes, elements, numbers)]
    for *given, here, leaf in zip(*parts, strict=True):
      wanted, sent, kept = (jnp.where(here, x, 0.0) for x in given)
      ones = jnp.broadcast_to(here, wanted.shape).astype(jnp.float32)
      zeros = ones * (sent == 0)
      terms = (ones, wanted**2, kept**2, sent**2, sent * wanted, zeros)
      by_row = [jnp.sum(x, axis=range(1, x.ndim)) for x in terms]
      stacked, same = jnp.stack(by_row), leaf[:, None] == lax.iota(jnp.int32, count)
      of_leaf = lambda x, same=same: jnp.sum(jnp.where(same, x[:, None], 0.0), axis=0)
      sums += jax.vmap(of_leaf)(stacked)
    others = tuple(name for name in axes if name not in own)
    with jax.named_scope(STAGE):
      sums = psum(sums, (*own, *others))
    for name, column in zip(columns, sums, strict=True):
      result[name] += column
  none = jnp.zeros(count, jnp.float32)
  return Sums(
    **result,
    residual=none,
    corrected=result["gradient"],
    unsent=result["owned"],
    true=result["gradient"],
    equal=none,
  )
