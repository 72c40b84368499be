"""The optax transformation: gradient, residual, encode, exchange, decode."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from gradcomp import _agreement, _axes, _whole, explicit
from gradcomp._axes import AxisName
from gradcomp._border import not_differentiated, of_reals
from gradcomp._checks import flag, optional_size, share_below_1
from gradcomp.codecs import (
  Codec,
  SelectingCodec,
  SparseCodec,
  is_fitted,
)
from gradcomp.exchange import (
  Exchange,
  Message,
  OwnerResiduals,
  Plan,
  Workers,
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
  Momentum,
  check_own,
  correct,
  mask_momentum,
  remainder,
  zero_state,
)
from gradcomp.gradients import reduction
from gradcomp.state import (
  CompressState,
  check_state,
  seed_words,
  selected_shapes,
  step_keys,
)


def compress(
  codec: Codec,
  *,
  axis_name: AxisName | None = None,
  exchange: Exchange = "auto",
  group_size: int | None = None,
  feedback: Literal["auto", "error", "momentum"] | None = "auto",
  momentum: float = 0.9,
  nesterov: bool = False,
  second_stage_feedback: bool = True,
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
  keeps what that loses, too: see ``second_stage_feedback``. Every worker gets the same
  bits. Without feedback the result is unbiased if the codec is.

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
    axis_name: the axis of the enclosing shard_map, pmap or vmap to average over, or a
      tuple of axes to average over together; under Explicit axes, the axes that the
      gradients are unreduced over. None takes these from the type, if no residual is
      kept. Elsewhere None exchanges nothing, and returns ``Q(g + e)``.
    exchange: ``"all_gather"``, ``"two_shot"``, ``"ring"``, ``"hierarchical"``,
      ``"psum"`` (dense float32, and codecs that share their scale), ``"local"`` or
      ``"auto"``: see :func:`gradcomp.exchange.choose`. ``"local"`` exchanges nothing:
      outputs differ between workers, and under Explicit axes stay unreduced.
    group_size: workers in a group of ``"hierarchical"`` over one axis, which sends full
      precision inside groups of consecutive workers. Over two axes, ``("host",
      "chip")``, the groups are the workers of the second.
    feedback: ``"error"`` keeps what was not sent, and adds it to the next gradient.
      None does not. ``"auto"`` does for biased codecs. ``"momentum"`` does so with
      each worker's momentum of its gradients, ``u' = m u + g``, in place of the
      gradient: put no momentum behind it. Where a sparse codec sends something, ``u``
      becomes zero, so that what waited is not pushed on once it is sent.
    momentum: m, at least 0 and below 1, with ``feedback="momentum"``.
    nesterov: whether ``m u' + g`` takes the place of ``u'``.
    second_stage_feedback: whether, with feedback, the owner of a share in ``two_shot``
      and ``hierarchical`` keeps what encoding the mean lost, an Nth of the gradient a
      worker in float32. ``init`` must then know the number of workers: call it inside
      the map, or under ``jax.set_mesh(mesh)``.
    min_leaf_size: leaves with fewer elements travel in float32, in the same message, or
      in one of their own where sums of codes are exact. By default these are the
      smallest leaves that together hold less than 0.5 % of all elements, or 0.01 % with
      a sparse codec.
    message_bytes: the largest payload in bytes that leaves share; None for one message.
      Several messages can be on their way before the whole backward pass is done. A
      leaf is never cut.
    key: a seed, or a threefry key, of the stochastic rounding, equal on all workers.
      The bits of a step derive from key, step, the leaf's path in the tree and worker
      alone.

  Returns:
    A gradient transformation; its state is a :class:`CompressState`. Inside the map,
    ``init`` makes the worker's own state. Outside, under ``jax.set_mesh(mesh)`` with
    the axis in the mesh, it makes the global one, with residuals stacked on their first
    axis. See :func:`gradcomp.state_specs`.

  Raises:
    ValueError: ``exchange`` or ``feedback`` is unknown; the codec or the axes do not
      allow the exchange; or ``momentum``, ``nesterov``, ``second_stage_feedback``,
      ``group_size``, ``min_leaf_size``, ``message_bytes`` or ``key`` is bad. In
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
    names = _axes.names(axis_name)
    axis_name = names if len(names) > 1 else names[0]
  check_exchange(exchange, codec, axis_name, group_size)
  min_leaf_size = optional_size("min_leaf_size", "elements", min_leaf_size)
  message_bytes = optional_size("message_bytes", "bytes", message_bytes)
  if feedback not in ("auto", "error", "momentum", None):
    raise ValueError(
      f'`feedback` must be "auto", "error", "momentum" or None, got {feedback!r}.'
    )
  flag("second_stage_feedback", second_stage_feedback)
  flag("nesterov", nesterov)
  accumulator = None
  # optax.inject_hyperparams makes an array of `momentum`, even if nobody uses it.
  if feedback == "momentum" or not isinstance(momentum, jax.Array):
    momentum = share_below_1("momentum", momentum)
  if feedback == "momentum":
    if exchange == "hierarchical" and isinstance(codec, SparseCodec):
      raise ValueError(
        '`feedback` must not be "momentum" for a sparse codec in a "hierarchical" '
        "exchange, where no worker knows what of its own momentum a group has sent, "
        f'got {codec}; use feedback="error", with momentum behind it.'
      )
    accumulator = Momentum(momentum, nesterov)
  keeps_residual = feedback in ("error", "momentum") or (
    feedback == "auto" and not codec.unbiased
  )
  keeps_owned = keeps_residual and second_stage_feedback
  averages = None if exchange == "local" else axis_name
  plan = functools.partial(
    plan_messages,
    codec=codec,
    exchange=exchange,
    min_leaf_size=min_leaf_size,
    message_bytes=message_bytes,
  )

  # What decides how workers read each other's messages.
  told = {
    "codec": repr(codec),
    "exchange": exchange,
    "group_size": repr(group_size),
    "min_leaf_size": repr(min_leaf_size),
    "message_bytes": repr(message_bytes),
  }
  if isinstance(key, int):
    told["key"] = repr(key)

  def init_fn(params: Any) -> CompressState:
    step, memory = jnp.zeros([], jnp.int32), None
    if is_fitted(codec):
      memory = codec.init()
    if averages:
      _whole.check_placed("params", params, averages)
    count = keeps_residual + bool(accumulator)
    axes = _axes.or_explained(axis_name)
    trees, own = zero_state(params, axes, count, own_shapes)
    residual, moving, *_ = (*trees, None, None)
    owned = {axes: arrays for axes, (arrays, _) in own.items() if arrays}
    selection = {axes: found for axes, (_, found) in own.items() if found}
    return CompressState(
      step,
      seed_words(key),
      residual,
      owned or None,
      memory,
      moving,
      selection or None,
    )

  def own_shapes(
    leaves: Sequence[jax.ShapeDtypeStruct],
    others: Sequence[tuple[str, ...]],
    workers: int | None,
  ) -> dict[str, tuple[tuple[jax.ShapeDtypeStruct, ...], Any]]:
    """Returns the shapes of owners' residuals and of selections, by axes."""
    over = _axes.or_explained(axis_name)
    if over is None:
      workers = 1
    if workers is None:
      return {}  # if update needs some, it raises an error
    messages = plan(leaves, others, workers=workers)
    owned: dict[str, list[tuple[int, int]]] = {}
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
      _whole.check_params(params, averages)
    axes, is_sum = reduction(updates, axis_name, local=exchange == "local")
    needs = {
      "residual": keeps_residual and bool(jax.tree.leaves(updates)),
      "momentum": accumulator is not None and bool(jax.tree.leaves(updates)),
      "memory": jax.eval_shape(codec.init) if is_fitted(codec) else None,
    }
    check_state(state, needs, f"feedback={feedback!r} and {codec}")
    if is_sum:
      explicit.check_stacked(state.residual, updates, axes)
    others = [explicit.other_axes(leaf, axes) for leaf in jax.tree.leaves(updates)]
    names = [
      jax.tree_util.keystr(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(updates)
    ]

    if axes is not None and exchange != "local":
      shapes = [leaf.shape for leaf in jax.tree.leaves(updates)]
      _agreement.require_agreement(repr((axes, names, shapes)), told)

    def on_device(updates: Any, state: CompressState) -> tuple[Any, CompressState]:
      count = 1 if axes is None else _axes.require_size(axes)
      check_own("residual", state.residual, updates, axes, count)
      check_own("momentum", state.momentum, updates, axes, count)
      given, moving = updates, state.momentum
      if accumulator:
        given, moving = accumulator.accumulate(updates, moving)
      corrected, treedef = jax.tree.flatten(correct(given, state.residual, codec))
      workers = (
        None if axes is None else Workers(axes, count, 1 if is_sum else 1 / count)
      )
      messages = plan(corrected, others, workers=count)
      note(Plan(tuple(names), messages, codec, axis_name), state.step)
      owned = None
      if keeps_owned and workers and owner_shapes(messages, count, workers.axis_name):
        owned = _required_owned(state, workers)
      memory = state.memory
      if is_fitted(codec) and memory is not None:
        memory = refit(codec, memory, messages, corrected, state.step, axes)
      turn = memory
      if isinstance(codec, SelectingCodec) and codec.alternates:
        turn = codec.turn(state.step)
      thresholds = recall(codec, state.selection, messages, state.step, axes)
      exchanged = average_messages(
        messages,
        corrected,
        step_keys(state, messages, names, axes),
        workers,
        group_size=group_size,
        owned=owned,
        memory=turn,
        thresholds=thresholds,
        keep=keeps_residual,
      )
      unflatten = functools.partial(jax.tree.unflatten, treedef)
      result = optax.tree.cast_like(unflatten(exchanged.mean), updates)
      unsent, means = exchanged.unsent, jax.tree.leaves(result)
      residual = state.residual
      if residual is not None:
        # A residual that an earlier transformation left, see switch, is sent once.
        lost = unsent if keeps_residual else [jnp.zeros_like(x) for x in corrected]
        old = jax.tree.leaves(residual)
        residual = unflatten(
          [remainder(*x) for x in zip(lost, means, old, strict=True)]
        )
      if accumulator:
        trees = map(jax.tree.leaves, (moving, state.momentum))
        sparse = _sparse_leaves(messages)
        moving = unflatten(
          [
            mask_momentum(*x, sparse=i in sparse)
            for i, x in enumerate(zip(*trees, corrected, unsent, means, strict=True))
          ]
        )
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

    unreduced = exchange == "local"
    return explicit.per_device(on_device, updates, state, axes, keeps_addends=unreduced)

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
      "second_stage_feedback=False."
    )
  return state.owner_residual


def _sparse_leaves(messages: Sequence[Message]) -> set[int]:
  """Returns the numbers of the leaves of which only some elements are sent."""
  return {
    number
    for message in messages
    for number, slot in zip(message.leaves, message.layout.slots, strict=True)
    if isinstance(message.layout.codecs[slot.group], SparseCodec)
  }
