"""The optax transformation: gradient, residual, encode, exchange, decode."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from gradcomp import _agreement, sums
from gradcomp._border import not_differentiated, of_reals
from gradcomp._checks import optional_size
from gradcomp.codecs import (
  Codec,
  first_memory,
  recalled,
)
from gradcomp.exchange import (
  Auto,
  Exchange,
  ExchangeName,
  Message,
  OwnerResiduals,
  Plan,
  Workers,
  as_exchange,
  average_messages,
  check_exchange,
  note,
  owner_shapes,
  plan_messages,
  recall,
  refit,
  remember,
  selected_rows,
)
from gradcomp.feedback import (
  Feedback,
  FeedbackName,
  as_feedback,
  correct,
  remainder,
)
from gradcomp.state import (
  CompressState,
  check_state,
  seed_words,
  selected_shapes,
  step_keys,
)
from gradcomp.workers import (
  Axes,
  AxisName,
  axis_names,
  check_own,
  check_residual_types,
  check_whole_arrays,
  check_whole_params,
  or_explained,
  other_axes,
  per_device,
  reduction,
  require_size,
  zero_state,
)


def compress(
  codec: Codec,
  *,
  axis_name: AxisName | None = None,
  exchange: ExchangeName | Auto | Exchange = "auto",
  feedback: FeedbackName | Feedback | None = "auto",
  min_leaf_size: int | None = None,
  message_bytes: int | None = None,
  key: ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces each worker's gradient by the mean of all workers', sent compressed.

  Put it in front of an optimizer, and give it gradients that no collective has touched
  yet: see :func:`gradcomp.value_and_grad`. With worker :math:`i`'s gradient
  :math:`g_i` and residual :math:`e_i` (zero without feedback), it returns

  .. math:: \frac{1}{N} \sum_i Q(g_i + e_i), \qquad e_i' = g_i + e_i - Q(g_i + e_i)

  where :math:`Q` encodes and decodes. ``two_shot`` encodes the mean once more, and
  keeps what that loses, too: see :class:`gradcomp.exchange.TwoShot`. Every worker gets
  the same bits. Without feedback the result is unbiased if the codec is.

  Under Explicit axes, call ``update`` in plain ``jax.jit``. It takes gradients typed
  ``{U:data}``, whose sum over the devices is the gradient of the whole batch, and
  returns that sum, replicated. There is then no :math:`1/N` in the formula.

  All is computed in float32, and returned in the gradient's dtype. Of float64, what is
  beyond 3.4e38 becomes infinite. But with ``Dense()``, float64 is added as float64.
  Complex gradients travel, and wait in residuals, as pairs of reals.

  A non-finite gradient makes (at least) its bucket NaN on every worker, and leaves the
  residuals there as they were. Guard with ``optax.apply_if_finite`` *after* this. The
  residuals of other buckets go on, as if the guard had not dropped the step. Or put
  :func:`gradcomp.skip_nonfinite` around all, which leaves every residual as it was.

  Args:
    codec: the codec of the leaves, e.g. :class:`gradcomp.codecs.QSGD`.
    axis_name, exchange, feedback, min_leaf_size, message_bytes, key: the options, which
      all recipes take, too: see :class:`gradcomp.CompressOptions`.

  Returns:
    A gradient transformation; its state is a :class:`CompressState`. Inside the map,
    ``init`` makes the worker's own state. Outside, under ``jax.set_mesh(mesh)`` with
    the axis in the mesh, it makes the global one, with residuals stacked on their first
    axis. See :func:`gradcomp.state_specs`.

  Raises:
    ValueError: ``exchange`` or ``feedback`` is unknown; the codec or the axes do not
      allow the exchange; or ``min_leaf_size``, ``message_bytes`` or ``key`` is bad. In
      ``update``: an axis is not bound; there are manual axes and no ``axis_name``;
      gradients are already reduced; residuals have other shapes than it needs; or
      another process of the run has other options. In both, parameters are cut over an
      axis that is averaged over, as far as their types, their placement or the
      residuals show it.
    TypeError: ``codec`` is not one; in ``update``, a gradient leaf is neither real nor
      complex floating point, or ``jax.grad`` differentiates through it.

  Example:
    >>> tx = compress(gradcomp.codecs.QSGD(bits=8, rounding="nearest"))
    >>> grads = {"w": jnp.linspace(-1.0, 1.0, 512)}
    >>> state = tx.init(grads)
    >>> updates, state = tx.update(grads, state)
    >>> bool(jnp.all(updates["w"] + state.residual["w"] == grads["w"]))
    True

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning with Low-Precision
    Communication <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, sections 2.4 and
    3.2; Han et al., `Auto-Precision Scaling for Distributed Deep Learning
    <https://arxiv.org/abs/1911.08907>`_, 2021, section 4.2
  """
  if isinstance(codec, type) or not isinstance(codec, Codec):
    raise TypeError(f"`codec` must be an instance of a codec, got {codec!r}.")
  if axis_name is not None:
    names = axis_names(axis_name)
    axis_name = names if len(names) > 1 else names[0]
  schedule, keeper = as_exchange(exchange), as_feedback(feedback, codec)
  check_exchange(schedule, codec, axis_name)
  if keeper.moves and sums.of(codec).drops and not schedule.of_leaves:
    raise ValueError(
      f'`feedback` must not be "momentum" for a sparse codec in a "{schedule.name}" '
      "exchange, where no worker knows what of its own momentum a group has sent, "
      f'got {codec}; use feedback="error", with momentum behind it.'
    )
  min_leaf_size = optional_size("min_leaf_size", "elements", min_leaf_size)
  message_bytes = optional_size("message_bytes", "bytes", message_bytes)
  keeps_owned = keeper.keeps and schedule.keeps
  averages = axis_name if schedule.sends else None
  plan = functools.partial(
    plan_messages,
    codec=codec,
    exchange=schedule,
    min_leaf_size=min_leaf_size,
    message_bytes=message_bytes,
  )

  # What decides how workers read each other's messages.
  told = {
    "codec": repr(codec),
    "exchange": repr(schedule),
    "min_leaf_size": repr(min_leaf_size),
    "message_bytes": repr(message_bytes),
  }
  if isinstance(key, int):
    told["key"] = repr(key)

  def init_fn(params: Any) -> CompressState:
    if averages:
      check_whole_arrays("params", params, averages)
    count = keeper.keeps + keeper.moves
    axes = or_explained(axis_name)
    trees, own = zero_state(params, axes, count, own_shapes)
    residual, moving, *_ = (*trees, None, None)
    owned = {axes: arrays for axes, (arrays, _) in own.items() if arrays}
    selection = {axes: found for axes, (_, found) in own.items() if found}
    return CompressState(
      jnp.zeros([], jnp.int32),
      seed_words(key),
      residual,
      owned or None,
      first_memory(codec),
      moving,
      selection or None,
    )

  def own_shapes(
    leaves: Sequence[jax.ShapeDtypeStruct],
    others: Sequence[tuple[str, ...]],
    workers: int | None,
  ) -> dict[Axes, tuple[tuple[jax.ShapeDtypeStruct, ...], Any]]:
    """Returns the shapes of owners' residuals and of selections, by axes."""
    over = or_explained(axis_name)
    if over is None:
      workers = 1
    if workers is None:
      return {}  # if update needs some, it raises an error
    messages = plan(leaves, others, workers=workers)
    owned: dict[Axes, list[tuple[int, int]]] = {}
    if keeps_owned and over is not None:
      owned = owner_shapes(messages, workers, over)
    rows = selected_rows(codec, messages, over)
    return {
      axes: (
        tuple(jax.ShapeDtypeStruct(x, jnp.float32) for x in owned.get(axes, ())),
        selected_shapes(rows[axes]) if axes in rows else None,
      )
      for axes in {**owned, **rows}
    }

  def update_fn(
    updates: Any, state: CompressState, params: Any = None, **extra_args: Any
  ) -> tuple[Any, CompressState]:
    del extra_args
    updates = not_differentiated(updates)
    if averages:
      check_whole_params(params, averages)
    axes, is_sum = reduction(updates, axis_name, local=not schedule.sends)
    needs = {
      "residual": keeper.keeps and bool(jax.tree.leaves(updates)),
      "momentum": keeper.moves and bool(jax.tree.leaves(updates)),
      "memory": jax.eval_shape(lambda: first_memory(codec)),
    }
    check_state(state, needs, f"feedback={feedback!r} and {codec}")
    if is_sum:
      check_residual_types(state.residual, updates, axes)
    others = [other_axes(leaf, axes) for leaf in jax.tree.leaves(updates)]
    names = [
      jax.tree_util.keystr(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(updates)
    ]

    if axes is not None and schedule.sends:
      shapes = [leaf.shape for leaf in jax.tree.leaves(updates)]
      _agreement.require_agreement(repr((axes, names, shapes)), told)

    def on_device(updates: Any, state: CompressState) -> tuple[Any, CompressState]:
      count = 1 if axes is None else require_size(axes)
      check_own("residual", state.residual, updates, axes, count)
      check_own("momentum", state.momentum, updates, axes, count)
      given = keeper.sent(updates, state.momentum)
      corrected, treedef = jax.tree.flatten(correct(given, state.residual, codec))
      workers = (
        None if axes is None else Workers(axes, count, 1 if is_sum else 1 / count)
      )
      messages = plan(corrected, others, workers=count)
      note(Plan(tuple(names), messages, codec, axis_name), state.step)
      owned = None
      if keeps_owned and workers and owner_shapes(messages, count, workers.axis_name):
        owned = _required_owned(state, workers)
      memory = refit(codec, state.memory, messages, corrected, state.step, axes)
      thresholds = recall(codec, state.selection, messages, state.step, axes)
      exchanged = average_messages(
        messages,
        corrected,
        step_keys(state, messages, names, axes),
        workers,
        owned=owned,
        memory=recalled(codec, memory, state.step, agreed=schedule.sends),
        thresholds=thresholds,
        keep=keeper.keeps,
      )
      unflatten = functools.partial(jax.tree.unflatten, treedef)
      result = optax.tree.cast_like(unflatten(exchanged.mean), updates)
      unsent, means = exchanged.unsent, jax.tree.leaves(result)
      residual = state.residual
      if residual is not None:
        # A residual that an earlier transformation left, see switch, is sent once.
        lost = unsent if keeper.keeps else [jnp.zeros_like(x) for x in corrected]
        old = jax.tree.leaves(residual)
        residual = unflatten(
          [remainder(*x) for x in zip(lost, means, old, strict=True)]
        )
      moving = state.momentum
      if keeper.moves:
        chosen = _chosen(messages, exchanged.sent, len(corrected))
        moving = keeper.keep(updates, moving, means, unsent, chosen)
      selection = remember(
        codec, state.selection, messages, thresholds, exchanged.sent, axes
      )
      # Owners' residuals that only an earlier transformation kept stay: see switch.
      owned = state.owner_residual if owned is None else exchanged.owned
      return result, CompressState(
        optax.safe_increment(state.step),
        state.key,
        residual,
        owned,
        memory,
        moving,
        selection,
      )

    unreduced = not schedule.sends
    return per_device(on_device, updates, state, axes, keeps_addends=unreduced)

  return of_reals(init_fn, update_fn)


def _required_owned(state: CompressState, workers: Workers) -> OwnerResiduals:
  """Returns the residuals of owners.

  Raises:
    ValueError: the state was made where nobody knew the number of workers.
  """
  if state.owner_residual is None:
    raise ValueError(
      f"`state.owner_residual` must be kept by the {workers.size} workers of "
      f"{workers.axis_name!r}, whose second stage loses something; make the state by "
      "optimizer.init inside the map or under jax.set_mesh(mesh), or pass "
      "exchange=gradcomp.exchange.TwoShot(feedback=False)."
    )
  return state.owner_residual


def _chosen(
  messages: Sequence[Message],
  sent: Sequence[list[jax.Array] | None],
  leaves: int,
) -> list[jax.Array | None]:
  """Returns where this worker sent something, of leaves that are sent in part.

  Args:
    messages: the plan.
    sent: this worker's own rows for each message and codec, or None.
    leaves: their number.

  Returns:
    For each leaf positions in it, flat; or None.
  """
  found: list[jax.Array | None] = [None] * leaves
  for message, matrices in zip(messages, sent, strict=True):
    layout = message.layout
    for number, like, slot in zip(
      message.leaves, layout.like, layout.slots, strict=True
    ):
      if matrices is not None:
        rows = matrices[slot.group][slot.start : slot.stop]
        found[number] = sums.of(layout.codecs[slot.group]).sent_at(rows, like.size)
  return found
