"""The optax transformation: gradient, residual, encode, exchange, decode."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from gradcomp import _axes, _planning, explicit
from gradcomp._axes import AxisName
from gradcomp._checks import static_integer
from gradcomp.codecs import Codec, is_fitted
from gradcomp.exchange import (
  Exchange,
  Message,
  OwnerResiduals,
  Workers,
  average_messages,
  check_exchange,
  owner_shapes,
  plan_messages,
  refit,
)
from gradcomp.feedback import correct, remainder, zero_residuals
from gradcomp.gradients import check_dtypes, reduction
from gradcomp.kernels import key_words


class CompressState(NamedTuple):
  """The state of :func:`compress`, in plain arrays that any checkpointer saves."""

  step: jax.Array  # int32[], replicated
  key: jax.Array  # uint32[2], replicated
  residual: Any  # float32, like the parameters but at least 1-d, per worker; or None
  owner_residual: OwnerResiduals | None  # float32, rows that a worker owns; or None
  memory: jax.Array | None  # of a codec that has one, replicated; or None


def compress(
  codec: Codec,
  *,
  axis_name: AxisName | None = None,
  exchange: Exchange = "auto",
  group_size: int | None = None,
  feedback: Literal["auto", "error"] | None = "auto",
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
  bits.

  Under Explicit axes, call ``update`` in plain ``jax.jit``: it takes gradients typed
  ``{U:data}``, whose sum over the devices is the gradient of the whole batch, and
  returns that sum, replicated. There is then no :math:`1/N` in the formula.

  A non-finite gradient makes (at least) its bucket NaN on every worker and leaves the
  residuals there as they were: guard with ``optax.apply_if_finite`` *after* this. The
  residuals of other buckets go on, as if the guard had not dropped the step.

  Args:
    codec: how leaves are encoded, e.g. :class:`gradcomp.codecs.QSGD`.
    axis_name: the axis of the enclosing shard_map, pmap or vmap to average over, or a
      tuple of axes to average over together; under Explicit axes, the axes that the
      gradients are unreduced over. None takes these from the type, if no residual is
      kept, and elsewhere exchanges nothing and applies the codec's noise: ``Q(g + e)``.
    exchange: ``"all_gather"``, ``"two_shot"``, ``"ring"``, ``"hierarchical"``,
      ``"psum"`` (dense float32, and codecs that share their scale), ``"local"``
      (nothing is exchanged: outputs differ between workers, and under Explicit axes
      stay unreduced) or ``"auto"``: see :func:`gradcomp.exchange.choose`.
    group_size: workers in a group of ``"hierarchical"`` over one axis, which sends full
      precision inside groups of consecutive workers. Over two axes, ``("host",
      "chip")``, the groups are the workers of the second.
    feedback: ``"error"`` keeps what was not sent and adds it to the next gradient;
      None does not; ``"auto"`` does for biased codecs.
    second_stage_feedback: whether, with feedback, the owner of a share in ``two_shot``
      and ``hierarchical`` keeps what encoding the mean lost, an Nth of the gradient a
      worker in float32. ``init`` must then know the number of workers: call it inside
      the map, or under ``jax.set_mesh(mesh)``.
    min_leaf_size: leaves with fewer elements travel in float32, in the same message;
      where sums of codes are exact, in one of their own. By default the smallest leaves
      that together hold less than 0.5 % of all elements.
    message_bytes: the largest payload in bytes that leaves share; None for one message.
      Several can be on their way before the whole backward pass is done. A leaf is
      never cut.
    key: seed, or a threefry key, of the stochastic rounding; equal on all workers. The
      bits of a step derive from key, step, leaf and worker alone.

  Returns:
    A gradient transformation; its state is a :class:`CompressState`. ``init`` inside
    the map makes the worker's own state; outside, under ``jax.set_mesh(mesh)`` with
    the axis in the mesh, the global one: residuals stacked on their first axis. See
    :func:`gradcomp.state_specs`.

  Raises:
    ValueError: an unknown ``exchange`` or ``feedback``, an exchange that the codec or
      the axes do not allow, a bad ``group_size``, ``min_leaf_size``, ``message_bytes``
      or ``key``; in ``update``, an axis that is not bound, manual axes and no
      ``axis_name``, gradients that are already reduced, or residuals of other shapes
      than it needs.
    TypeError: ``codec`` is not one; in ``update``, a gradient leaf that is not real
      floating point.

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
  min_leaf_size = _optional_size("min_leaf_size", "elements", min_leaf_size)
  message_bytes = _optional_size("message_bytes", "bytes", message_bytes)
  if feedback not in ("auto", "error", None):
    raise ValueError(f'`feedback` must be "auto", "error" or None, got {feedback!r}.')
  if not isinstance(second_stage_feedback, bool):
    raise ValueError(
      f"`second_stage_feedback` must be a bool, got {second_stage_feedback!r}."
    )
  keeps_residual = feedback == "error" or (feedback == "auto" and not codec.unbiased)
  keeps_owned = keeps_residual and second_stage_feedback
  plan = functools.partial(
    plan_messages,
    codec=codec,
    exchange=exchange,
    min_leaf_size=min_leaf_size,
    message_bytes=message_bytes,
  )

  def init_fn(params: Any) -> CompressState:
    residual, owned = None, None
    if keeps_residual and not _planning.current():
      residual, owned = zero_residuals(params, axis_name, shapes_owned)
    step = jnp.zeros([], jnp.int32)
    memory = codec.init() if is_fitted(codec) else None
    return CompressState(step, _seed_words(key), residual, owned or None, memory)

  def shapes_owned(
    leaves: Sequence[jax.ShapeDtypeStruct],
    others: Sequence[tuple[str, ...]],
    workers: int | None,
  ) -> dict[str, list[tuple[int, int]]]:
    if not keeps_owned or axis_name is None or workers is None:
      return {}  # if update needs some, it says so
    messages = plan(leaves, others, workers=workers)
    return owner_shapes(messages, workers, axis_name)

  def update_fn(
    updates: Any, state: CompressState, params: Any = None, **extra_args: Any
  ) -> tuple[Any, CompressState]:
    del params, extra_args
    check_dtypes(updates)
    if study := _planning.current():
      study.add(updates, plan, group_size, codec)
      return updates, state
    axes, is_sum = reduction(updates, axis_name, local=exchange == "local")
    if keeps_residual != (state.residual is not None) and jax.tree.leaves(updates):
      raise ValueError(
        f"`state.residual` must {'' if keeps_residual else 'not '}be kept with "
        f"feedback={feedback!r} and {codec}; make the state with this transformation."
      )
    if is_fitted(codec) != (state.memory is not None):
      raise ValueError(
        f"`state.memory` must {'' if is_fitted(codec) else 'not '}be kept with "
        f"{codec}; make the state with this transformation."
      )
    if is_sum:
      explicit.check_stacked(state.residual, updates, axes)
    others = [explicit.other_axes(leaf, axes) for leaf in jax.tree.leaves(updates)]

    def on_device(updates: Any, state: CompressState) -> tuple[Any, CompressState]:
      corrected, treedef = jax.tree.flatten(correct(updates, state.residual))
      count = 1 if axes is None else _axes.require_size(axes)
      workers = (
        None if axes is None else Workers(axes, count, 1 if is_sum else 1 / count)
      )
      messages = plan(corrected, others, workers=count)
      if keeps_owned and state.owner_residual is None:
        _check_nothing_owned(messages, workers)
      memory = state.memory
      if is_fitted(codec) and memory is not None:
        memory = refit(codec, memory, messages, corrected, state.step, axes)
      mean, unsent, owned = average_messages(
        messages,
        corrected,
        _step_keys(state, messages, axes),
        workers,
        group_size=group_size,
        owned=state.owner_residual,
        memory=memory,
        keep=keeps_residual,
      )
      result = optax.tree.cast_like(jax.tree.unflatten(treedef, mean), updates)
      residual = state.residual
      if residual is not None:
        old, given = jax.tree.leaves(residual), jax.tree.leaves(result)
        kept = [remainder(*x) for x in zip(unsent, given, old, strict=True)]
        residual = jax.tree.unflatten(treedef, kept)
      step = optax.safe_increment(state.step)
      return result, CompressState(step, state.key, residual, owned, memory)

    unreduced = exchange == "local"
    return explicit.per_device(on_device, updates, state, axes, keeps_addends=unreduced)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_nothing_owned(messages: Sequence[Message], workers: Workers | None) -> None:
  """ValueError if the state was made where nobody knew the number of workers."""
  if workers and owner_shapes(messages, workers.size, workers.axis_name):
    raise ValueError(
      f"`state.owner_residual` must be kept by the {workers.size} workers of "
      f"{workers.axis_name!r}, whose second stage loses something; make the state by "
      "optimizer.init inside the map or under jax.set_mesh(mesh), or pass "
      "second_stage_feedback=False."
    )


def _optional_size(name: str, unit: str, value: Any) -> int | None:
  """A hyperparameter that counts something, or None."""
  if value is None:
    return None
  rule = f"a number of {unit}, 0 or more, or None"
  size = static_integer(name, rule, value)
  if size < 0:
    raise ValueError(f"`{name}` must be {rule}, got {size}.")
  return size


def _seed_words(key: ArrayLike) -> jax.Array:
  """``uint32[2]`` of a seed or of a threefry key; a copy, which may be donated."""
  if not isinstance(key, int | jax.Array):
    key = jnp.asarray(key)
  if isinstance(key, int) or (
    key.shape == () and jnp.issubdtype(key.dtype, jnp.integer)
  ):
    key = jax.random.key(key, impl="threefry2x32")
  return jnp.array(key_words(key))


def _step_keys(
  state: CompressState, messages: Sequence[Message], axis_name: AxisName | None
) -> jax.Array | None:
  """``uint32[leaves + codecs, 2]``: a key a leaf, then a key a codec's later stages."""
  layouts = [message.layout for message in messages]
  if not any(codec.needs_key for layout in layouts for codec in layout.codecs):
    return None
  fold = jax.random.fold_in
  step_key = fold(jax.random.wrap_key_data(state.key, impl="threefry2x32"), state.step)
  count = sum(len(layout.slots) + len(layout.codecs) for layout in layouts)
  worker = 0 if axis_name is None else lax.axis_index(axis_name)
  keys = jax.vmap(fold, (None, 0))(step_key, jnp.arange(count))
  return jax.random.key_data(jax.vmap(fold, (0, None))(keys, worker))
