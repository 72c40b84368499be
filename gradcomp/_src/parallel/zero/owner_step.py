"""Runs the optimizer on the rows that a worker owns."""

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
  """Holds rows after a step.

  Attributes:
    master: the parameters that their owner knows. Where something is not finite, they
      stay as they were.
    inner_state: the state of the optimizer; of rows it has old values there.
    lacking: what the parameters of all lack of the master. It is NaN where something is
      not finite, and zero in places that only fill up rows.
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
  extra_args: dict[str, Any],
) -> Moved:
  """Takes a step.

  Args:
    inner: the optimizer.
    means: the gradients.
    old: the state of ``inner``.
    rows: which rows this worker owns.
    seen: the parameters that all workers have.
    unsent: what these lack of the master.
    extra_args: further arguments of the optimizer.
  """
  with jax.named_scope("gradcomp_inner"):
    master = jax.tree.map(jnp.add, seen, unsent)
    leaves = rows.first_leaves()
    moved, finite, state = inner.step(means, old, master, leaves, extra_args)

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
  """Returns what parameters lack of the master after ``optax.apply_updates``.

  Args:
    master: the rows that this worker owns.
    seen: the parameters that all workers had.
    sent: what all add to them.
    old: what they lacked before the step, which stays where nothing finite is sent.
    rows: which rows this worker owns.
    dtypes: a pair for each leaf, that of the parameter, and that of its update.
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
  """Returns the sum of a parameter and its update, both of these dtypes."""
  return _rounded(p + _rounded(within(d, update), update), param)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
  """Returns float32 with the values of a dtype.

  Of a cast there and back XLA may leave out both.
  """
  info = jnp.finfo(dtype)
  return round_to(x, FloatFormat(info.nexp, info.nmant)) if info.bits < 32 else x
