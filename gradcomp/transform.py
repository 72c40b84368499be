"""The optax transformation: gradient, residual, encode, exchange, decode."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from gradcomp import _axes
from gradcomp._checks import static_integer
from gradcomp.codecs import Codec
from gradcomp.exchange import Exchange, average, check_exchange
from gradcomp.feedback import correct, remainder, zero_residual
from gradcomp.kernels import key_words
from gradcomp.layout import Layout, plan


class CompressState(NamedTuple):
  """The state of :func:`compress`, in plain arrays that any checkpointer saves."""

  step: jax.Array  # int32[], replicated
  key: jax.Array  # uint32[2], replicated
  residual: Any  # float32, like the parameters but at least 1-d, per worker; or None


def compress(
  codec: Codec,
  *,
  axis_name: str | None = None,
  exchange: Exchange = "auto",
  feedback: Literal["auto", "error"] | None = "auto",
  min_leaf_size: int | None = None,
  key: ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces each worker's gradient by the mean of all workers', sent compressed.

  Put it in front of an optimizer, and give it gradients that no collective has touched
  yet: see :func:`gradcomp.value_and_grad`. With worker :math:`i`'s gradient
  :math:`g_i` and residual :math:`e_i` (zero without feedback), it returns

  .. math:: \frac{1}{N} \sum_i Q(g_i + e_i), \qquad e_i' = g_i + e_i - Q(g_i + e_i)

  where :math:`Q` encodes and decodes. ``two_shot`` encodes the mean once more. Every
  worker gets the same bits.

  A non-finite gradient makes (at least) its bucket NaN on every worker and leaves the
  residual there as it was: guard with ``optax.apply_if_finite`` *after* this.

  Args:
    codec: how leaves are encoded, e.g. :class:`gradcomp.codecs.QSGD`.
    axis_name: the axis of the enclosing shard_map, pmap or vmap to average over. None
      exchanges nothing and applies the codec's noise: ``Q(g + e)``.
    exchange: ``"all_gather"``, ``"two_shot"``, ``"psum"`` (dense float32 only),
      ``"local"`` (nothing is exchanged) or ``"auto"``: see
      :func:`gradcomp.exchange.choose`.
    feedback: ``"error"`` keeps what was not sent and adds it to the next gradient;
      None does not; ``"auto"`` does for biased codecs.
    min_leaf_size: leaves with fewer elements travel in float32, in the same message.
      By default the smallest leaves that together hold less than 0.5 % of all elements.
    key: seed, or a threefry key, of the stochastic rounding; equal on all workers. The
      bits of a step derive from key, step, leaf and worker alone.

  Returns:
    A gradient transformation; its state is a :class:`CompressState`. ``init`` inside
    the map makes the worker's own state; outside, under ``jax.set_mesh(mesh)`` with
    the axis in the mesh, the global one: residuals stacked on their first axis. See
    :func:`gradcomp.state_specs`.

  Raises:
    ValueError: an unknown ``exchange`` or ``feedback``, ``"psum"`` with a codec whose
      codes cannot be added, a bad ``min_leaf_size`` or ``key``; in ``update``, an axis
      that is not bound, manual axes and no ``axis_name``, gradients that are already
      reduced, or a residual of another shape than the gradient.
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
    Communication <https://doi.org/10.3929/ethz-b-000319485>`_, 2018
  """
  if isinstance(codec, type) or not isinstance(codec, Codec):
    raise TypeError(f"`codec` must be an instance of a codec, got {codec!r}.")
  check_exchange(exchange, codec)
  if min_leaf_size is not None:
    rule = "a number of elements, 0 or more, or None"
    min_leaf_size = static_integer("min_leaf_size", rule, min_leaf_size)
    if min_leaf_size < 0:
      raise ValueError(f"`min_leaf_size` must be {rule}, got {min_leaf_size}.")
  if feedback not in ("auto", "error", None):
    raise ValueError(f'`feedback` must be "auto", "error" or None, got {feedback!r}.')
  keeps_residual = feedback == "error" or (feedback == "auto" and not codec.unbiased)

  def init_fn(params: Any) -> CompressState:
    residual = zero_residual(params, axis_name) if keeps_residual else None
    return CompressState(jnp.zeros([], jnp.int32), _seed_words(key), residual)

  def update_fn(
    updates: Any, state: CompressState, params: Any = None, **extra_args: Any
  ) -> tuple[Any, CompressState]:
    del params, extra_args
    _check_gradients(updates, axis_name, exchange)
    if keeps_residual != (state.residual is not None) and jax.tree.leaves(updates):
      raise ValueError(
        f"`state.residual` must {'' if keeps_residual else 'not '}be kept with "
        f"feedback={feedback!r} and {codec}; make the state with this transformation."
      )
    corrected = correct(updates, state.residual)
    layout = plan(corrected, codec, min_leaf_size=min_leaf_size)
    keys = _step_keys(state, layout, axis_name)
    mean, payload = average(layout, corrected, keys, axis_name, exchange)
    residual = state.residual
    if residual is not None:
      sent = corrected if payload is None else layout.decode(payload)
      residual = remainder(corrected, sent, residual)
    step = optax.safe_increment(state.step)
    return optax.tree.cast_like(mean, updates), CompressState(step, state.key, residual)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _seed_words(key: ArrayLike) -> jax.Array:
  """``uint32[2]`` of a seed or of a threefry key."""
  if not isinstance(key, int | jax.Array):
    key = jnp.asarray(key)
  if isinstance(key, int) or (
    key.shape == () and jnp.issubdtype(key.dtype, jnp.integer)
  ):
    key = jax.random.key(key, impl="threefry2x32")
  return key_words(key)


def _step_keys(
  state: CompressState, layout: Layout, axis_name: str | None
) -> jax.Array | None:
  """``uint32[leaves + codecs, 2]``: a key a leaf, then a key a codec's second stage."""
  if not any(codec.needs_key for codec in layout.codecs):
    return None
  fold = jax.random.fold_in
  step_key = fold(jax.random.wrap_key_data(state.key, impl="threefry2x32"), state.step)
  count = len(layout.slots) + len(layout.codecs)
  worker = 0 if axis_name is None else lax.axis_index(axis_name)
  keys = jax.vmap(fold, (None, 0))(step_key, jnp.arange(count))
  return jax.random.key_data(jax.vmap(fold, (0, None))(keys, worker))


def _check_gradients(updates: Any, axis_name: str | None, exchange: Exchange) -> None:
  """What can be wrong with a gradient, said before anything is computed from it."""
  typed = False
  if axis_name is not None:
    _axes.require_size(axis_name)
    typed = _axes.is_typed(axis_name)
  elif _axes.manual_axes() and exchange != "local":
    raise ValueError(
      f"`axis_name` must name the axis to average over inside a map with the axes "
      f'{_axes.manual_axes()}, got None; pass axis_name=, or exchange="local" to '
      "exchange nothing."
    )
  for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
    name = f"`updates`{jax.tree_util.keystr(path)}"
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise TypeError(f"{name} must have a real float dtype, got {leaf.dtype}.")
    if typed and axis_name not in _axes.varying(leaf):
      raise ValueError(
        f"{name} must differ between the workers of {axis_name!r}, but its type says "
        "that it is equal on all: inside jax.shard_map, jax.grad with respect to "
        "replicated parameters has already all-reduced it in full precision. Use "
        "gradcomp.value_and_grad in place of jax.value_and_grad, or "
        "gradcomp.defer_reduction(params, axis_name) before jax.grad."
      )
