"""The optimizer's step on a worker's shard of the rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.core.state import OwnedRows
from gradcomp._src.floats.dtypes import within
from gradcomp._src.floats.rounding import round_to
from gradcomp._src.kernels.common.float_formats import FloatFormat
from gradcomp._src.parallel.zero.inner import Inner
from gradcomp._src.parallel.zero.shared_rows import SharedRows


class Moved(NamedTuple):
  """The rows of a worker after a step.

  Attributes:
    master: the parameters of the owner. Where a value is not finite, they stay.
    inner_state: the state of the optimizer, with old rows there.
    lacking: the master minus the parameters of all. It is NaN where a value is not
      finite, and zero in the padding of rows.
  """

  master: OwnedRows
  inner_state: Any
  lacking: OwnedRows


def step_owned(
  inner: Inner,
  means: OwnedRows,
  old: Any,
  rows: SharedRows,
  seen: OwnedRows,
  unsent: OwnedRows,
) -> Moved:
  """Runs the inner optimizer on this worker's shard; returns rows and unsent updates.

  ``means`` are the gradients, ``old`` the state of ``inner``, ``seen`` the parameters
  that all workers have, and ``unsent`` the master minus these.
  """
  with jax.named_scope("gradcomp_inner"):
    master = jax.tree.map(jnp.add, seen, unsent)
    leaves = rows.first_leaves()
    moved, finite, state = inner.step(means, old, master, leaves)

    def lacking(
      here: jax.Array, ok: jax.Array, m: jax.Array, p: jax.Array
    ) -> jax.Array:
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

  All workers had the parameters ``seen``, and add the decoded updates ``sent``. ``old``
  is the difference before the step, which stays where no finite update is sent.
  ``dtypes`` are those of each leaf's parameter and update.
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

  def left(here: jax.Array, m: jax.Array, p: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(here & jnp.isfinite(p), m - p, old)

  return jax.tree.map(left, rows.elements(), master, found, old)


def _applied(p: jax.Array, d: jax.Array, param: Any, update: Any) -> jax.Array:
  """Adds a parameter and its update, rounded to their dtypes."""
  return _rounded(p + _rounded(within(d, update), update), param)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
  """Rounds float32 to the values of a dtype."""
  # XLA may drop a cast to the dtype and back.
  info = jnp.finfo(dtype)
  return round_to(x, FloatFormat(info.nexp, info.nmant)) if info.bits < 32 else x
