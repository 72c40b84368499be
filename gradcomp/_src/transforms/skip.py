"""``skip_nonfinite``: all workers skip a step if one has a NaN or an infinity."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradcomp._src.checks import step_count
from gradcomp._src.core.border import any_tree
from gradcomp._src.exchange.collectives import largest
from gradcomp._src.mesh import agreement, axes, shard_maps
from gradcomp._src.mesh.trees import is_marked, on_rows, with_rows
from gradcomp._src.mesh.types import other_axes, place


class SkipNonfiniteState(NamedTuple):
  """The state of :func:`gradcomp.skip_nonfinite`, as of ``optax.apply_if_finite``."""

  notfinite_count: jax.Array  # int32[], replicated: steps in a row that were not finite
  last_finite: jax.Array  # bool[], replicated: whether the last step was
  total_notfinite: jax.Array  # int32[], replicated: all steps that were not finite
  inner_state: Any


def skip_nonfinite(
  inner: optax.GradientTransformation,
  max_consecutive_errors: int,
  *,
  axis_name: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Skips a step if a gradient or an update of any worker has a NaN or an infinity.

  It is ``optax.apply_if_finite`` for several workers, which all decide alike; put it
  around the whole optimizer, exchange included. A skipped step returns zeros, and
  leaves the whole inner state as it was, residuals included. The exchange always runs,
  because collectives must not hide in branches. To agree, each worker sends one byte
  after it, which :func:`gradcomp.wire_report` lists and :func:`gradcomp.explain` does
  not. Gradients and updates are tested: a mean that is too large for a 16-bit type is
  not finite, unless feedback keeps the rest.

  Args:
    inner: the transformation, e.g. a chain of an exchange and an optimizer.
    max_consecutive_errors: the number of steps in a row that may be skipped. The next
      is applied, whether finite or not.
    axis_name: the axes of the workers, see :class:`gradcomp.CompressOptions`.

  Returns:
    A gradient transformation; its state has the fields of ``optax.ApplyIfFiniteState``.

  Raises:
    ValueError: ``max_consecutive_errors`` is no number of steps, or ``axis_name`` names
      no axes; in ``update``, the axes are wrong, as for :func:`gradcomp.compress`.

  Example:
    >>> tx = skip_nonfinite(optax.chain(gradcomp.qsgd(bits=4), optax.sgd(0.1)), 5)
    >>> state = tx.init(jnp.ones(2))
    >>> update, state = tx.update(jnp.array([jnp.nan, 1.0]), state)
    >>> update.tolist(), int(state.total_notfinite)
    ([0.0, 0.0], 1)
  """
  told = dict(locals())
  most = step_count("max_consecutive_errors", max_consecutive_errors, least=0)
  if axis_name is not None:
    axes.axis_names(axis_name)
  inner = optax.with_extra_args_support(inner)

  def init_fn(params: Any) -> SkipNonfiniteState:
    zero = lambda: jnp.zeros([], jnp.int32)
    return SkipNonfiniteState(zero(), jnp.array(True), zero(), inner.init(params))

  def update_fn(
    updates: Any, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[Any, SkipNonfiniteState]:
    record = "gradcomp.skip_nonfinite", told, updates, axis_name
    agreement.require_agreement(*record, inner_state=state.inner_state)
    new, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
    finite = _all_finite(updates, new, axis_name)
    more = optax.safe_increment(state.notfinite_count)
    count = jnp.where(finite, jnp.zeros_like(more), more)
    total = optax.safe_increment(state.total_notfinite)
    total = jnp.where(finite, state.total_notfinite, total)
    taken = finite | (count > most)
    either = lambda a, b: lax.select(taken, a, jnp.asarray(b))  # without a branch
    choose = functools.partial(jax.tree.map, functools.partial(on_rows, either))
    empty = functools.partial(on_rows, jnp.zeros_like)
    zeros = jax.tree.map(empty, new, is_leaf=is_marked)
    kept = choose(inner_state, state.inner_state, is_leaf=is_marked)
    updates = choose(new, zeros, is_leaf=is_marked)
    return updates, SkipNonfiniteState(count, finite, total, kept)

  return any_tree(init_fn, update_fn)


def _all_finite(updates: Any, new: Any, axis_name: axes.AxisName | None) -> jax.Array:
  """Returns True if all workers' gradients and updates are finite: ``bool[]``."""
  if not jax.tree.leaves(updates):
    return jnp.array(True)
  # The compiler reduces rows of all workers by itself.
  across = place(updates, axis_name)
  own = () if across.axes is None else axes.axis_names(across.axes)
  both = with_rows((updates, new))
  others = {x for leaf in jax.tree.leaves(both) for x in other_axes(leaf, across.axes)}
  over = (*own, *sorted(others))

  def on_device(both: Any, found: jax.Array) -> tuple[Any, jax.Array]:
    bad = [~jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(both)]
    found = found | functools.reduce(operator.or_, bad).astype(found.dtype)
    return both, largest(found, over) if over else found

  found = jnp.zeros([], jnp.uint8)  # a byte, for no collective is given a bool
  _, found = shard_maps.per_device(on_device, both, across, keeps=True)(both, found)
  return found == 0
