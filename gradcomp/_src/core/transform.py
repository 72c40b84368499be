"""The optax transformation: gradient, residual, encode, exchange, decode."""

import functools
from typing import Any

import optax
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec, is_codec
from gradcomp._src.core.border import on_workers
from gradcomp._src.core.compression import Compression, Dither
from gradcomp._src.core.feedback import Feedback, FeedbackName
from gradcomp._src.core.inputs import not_differentiated
from gradcomp._src.core.state import CompressState
from gradcomp._src.core.step import as_updates, otherwise, take_step
from gradcomp._src.exchange.auto import Auto, ExchangeName
from gradcomp._src.exchange.plan import MessageBytes
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.place import Place

Taken = tuple[Any, CompressState]  # updates, and the next state


def compress(  # noqa: PLR0913 - options of users, by keyword
  codec: LeafCodec,
  *,
  axis_name: AxisName | None = None,
  exchange: ExchangeName | Auto | Exchange = "auto",
  feedback: FeedbackName | Feedback | None = "auto",
  min_leaf_size: int | None = None,
  message_bytes: MessageBytes = "auto",
  key: ArrayLike = 0,
  dither: Dither = "shared",
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces each worker's gradient by the mean of all workers', sent compressed.

  Put it before an optimizer, and give it the gradients of
  :func:`gradcomp.value_and_grad`, which no collective has reduced. With worker
  :math:`i`'s gradient :math:`g_i` and residual :math:`e_i` (zero without feedback), it
  returns

  .. math:: \frac{1}{N} \sum_i Q(g_i + e_i), \qquad e_i' = g_i + e_i - Q(g_i + e_i)

  where :math:`Q` encodes and decodes. Every worker gets the same bits. ``two_shot``
  encodes the mean again, and sends that rounding error in the next step: see
  :class:`gradcomp.exchange.TwoShot`. Up to that error, the result without feedback is
  unbiased if the codec is.

  Under Explicit axes, call ``update`` in plain ``jax.jit``: it takes addends typed
  ``{U:data}`` and returns their sum, replicated, without :math:`1/N`.

  All is computed in float32 and returned in the gradient's dtype; feedback keeps the
  error of that cast. A mean too large for the dtype becomes its largest number.
  ``Dense()`` adds float64 as float64. Complex gradients travel as pairs of reals. Any
  tree will do, such as an ``equinox.Module``; leaves that are not trained have None as
  gradient.

  A non-finite gradient makes at least its bucket NaN on every worker, and residuals
  keep their old values there. Guard with ``optax.apply_if_finite`` *after* this, or put
  :func:`gradcomp.skip_nonfinite` around everything, which keeps every residual.

  Args:
    codec: the codec of the leaves, e.g. :class:`gradcomp.codecs.QSGD`.
    axis_name, exchange, feedback, min_leaf_size, message_bytes, key, dither: as in
      :class:`gradcomp.CompressOptions`.

  Returns:
    A gradient transformation with a :class:`gradcomp.state.CompressState`. Inside the
    map, ``init`` makes the worker's own state; outside, under ``jax.set_mesh(mesh)`` or
    with arrays on a mesh, the global one: see :func:`gradcomp.state_specs`. Elsewhere,
    as in ``jax.jit`` without a mesh, it cannot count the workers, and ``update`` warns
    if a second stage then loses something.

  Raises:
    ValueError: an option is bad; the codec or the axes do not allow the exchange; or
      the residual would grow (``contraction`` of :class:`gradcomp.codecs.Codec`). In
      ``update``: the axis is not bound; gradients are already reduced; parameters are
      sharded over the axis; or the state or another process does not fit.
    TypeError: ``codec`` is not one; in ``update``, a gradient is not floating point, or
      ``jax.grad`` differentiates through it.

  Example:
    >>> tx = compress(gradcomp.codecs.QSGD(bits=8, rounding="nearest"))
    >>> grads = {"w": jnp.linspace(-1.0, 1.0, 512)}
    >>> state = tx.init(grads)
    >>> updates, state = tx.update(grads, state)
    >>> bool(jnp.all(updates["w"] + state.residual["w"] == grads["w"]))
    True

  References:
    Grubic et al., `2018 <https://doi.org/10.3929/ethz-b-000319485>`_, sections 2.4 and
    3.2; Han et al., `2021 <https://arxiv.org/abs/1911.08907>`_, section 4.2
  """
  if not is_codec(codec):
    raise TypeError(f"`codec` must be an instance of a codec, got {codec!r}.")
  return transformation(Compression(**locals()))


def transformation(parts: Compression) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that averages gradients as its parts do."""

  def average(across: Place, updates: Any, state: CompressState) -> Taken:
    updates = not_differentiated(updates)
    parts.check(across, updates, state)
    plan = parts.plan(updates, across)
    parts.warn_of_owners(plan, state)
    rest = updates, state, functools.partial(as_updates, parts, across)
    taken = take_step(parts, parts.step(plan, state), *rest)[:2]
    again = lambda plan: take_step(parts, parts.step(plan, state), *rest)[:2]
    return otherwise(taken, again, plan, across.axes if plan.sends else None)

  unsent = not parts.exchange.sends
  return on_workers(parts.init, average, parts.axis_name, keeps=unsent, local=unsent)
