"""Runs the optimizer on the rows that a worker owns."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp.state import OwnedRows, is_rows


def step_owned(
  inner: optax.GradientTransformationExtraArgs,
  means: OwnedRows,
  master: OwnedRows,
  old: Any,
  seen: OwnedRows,
  elements: OwnedRows,
  extra_args: dict[str, Any],
) -> tuple[OwnedRows, Any, OwnedRows]:
  """Returns the rows after a step, and what the parameters of all lack of them.

  Args:
    inner: the optimizer.
    means: the gradients.
    master: the master copy of the parameters.
    old: the state of ``inner``.
    seen: the parameters that all workers have.
    elements: True in places that have elements, and do not only fill up rows.
    extra_args: further arguments of ``inner.update``.

  Returns:
    The master copy and the state of ``inner``, with old values where something is not
    finite, and what the parameters lack. That is NaN there, and zero in places that
    only fill up rows.
  """
  with jax.named_scope("gradcomp_inner"):
    updates, inner_state = inner.update(means, old, master, **extra_args)
    moved = jax.tree.map(jnp.add, master, updates)
    finite = jax.tree.map(lambda g, m: jnp.isfinite(g) & jnp.isfinite(m), means, moved)
    kept = lambda new, old: jax.tree.map(jnp.where, finite, new, old)

    def kept_rows(new: Any, old: Any) -> Any:
      return kept(new, old) if is_rows(new) else new

    def lacking(
      here: jax.Array, ok: jax.Array, m: jax.Array, p: jax.Array
    ) -> jax.Array:
      return jnp.where(here, jnp.where(ok, m - p, jnp.nan), 0.0)

    changed = jax.tree.map(lacking, elements, finite, moved, seen)
    inner_state = jax.tree.map(kept_rows, inner_state, old, is_leaf=is_rows)
    return kept(moved, master), inner_state, changed
