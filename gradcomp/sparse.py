"""Builds RedSync: residual gradient compression with momentum."""

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from gradcomp._axes import AxisName
from gradcomp.clipping import clip_by_local_norm
from gradcomp.codecs import Quantize, Selection, TopK
from gradcomp.exchange import Auto, Exchange, ExchangeName
from gradcomp.transform import compress


def redsync(
  density: float = 0.001,
  momentum: float | None = 0.9,
  *,
  nesterov: bool = True,
  max_norm: float | None = None,
  selection: Selection = "auto",
  quantize: Quantize | None = None,
  value_dtype: DTypeLike = jnp.float32,
  slack: float = 2.0,
  interval: int = 5,
  axis_name: AxisName | None = None,
  exchange: ExchangeName | Auto | Exchange = "auto",
  group_size: int | None = None,
  second_stage_feedback: bool = True,
  min_leaf_size: int | None = None,
  message_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""RedSync: averages the largest elements of momentum and residuals over workers.

  It is :func:`gradcomp.compress` with the codec :class:`gradcomp.codecs.TopK` and
  ``feedback="momentum"``. The two say more about the arguments. Each worker adds up its
  momentum until an element is among the largest, and sends it then. With worker
  :math:`i`'s gradient :math:`g_i`, momentum :math:`u_i` and residual :math:`v_i`, and
  with the codec's :math:`Q`, it returns

  .. math:: \frac{1}{N} \sum_i Q(v_i + p_i), \qquad u_i' = m u_i + g_i, \qquad
     v_i' = v_i + p_i - Q(v_i + p_i)

  where :math:`p_i` is :math:`u_i'`, or :math:`m u_i' + g_i` with Nesterov's momentum,
  or :math:`g_i` with ``momentum=None``. Where an element is sent, :math:`u_i'` becomes
  zero. The codec is biased; residuals keep what it does not send.

  Momentum is in here, so put plain ``optax.sgd(learning_rate)`` behind it. Put what is
  no part of the loss's gradient behind it, too::

    optimizer = optax.chain(
      gradcomp.redsync(density=0.001, axis_name="data"),
      optax.add_decayed_weights(1e-4),
      optax.sgd(0.1),
    )

  Weight decay in front of it would wait in residuals for hundreds of steps. Optimizers
  that divide by a mean of squares see gradients of many steps at once. The first steps
  are best dense, or dense enough: see :func:`gradcomp.switch`.

  A payload has about 6 bytes for each of ``density * n`` elements (up to twice as many
  elements of large leaves, see ``selection``), and 2 with ``quantize="asq"``.

  Args:
    density: the share of the elements to send; 1 for the dense exchange.
    momentum: m, at least 0 and below 1; None for residuals of plain gradients.
    nesterov: whether momentum is Nesterov's.
    max_norm: the norm to clip gradients to, see :func:`gradcomp.clip_by_local_norm`;
      None clips nothing.
    selection: the way in which the elements to send are selected.
    quantize: None, ``"asq"`` or ``"mean"``.
    value_dtype: the dtype of values on the wire.
    slack: slots for each element to send, from 1 to 2.
    interval: steps that a ``sampled`` threshold is used for.
    axis_name: the axis to average over.
    exchange: ``"auto"`` is ``"all_gather"`` until that sends more than a plain mean.
    group_size: workers in a group of ``"hierarchical"`` over one axis.
    second_stage_feedback: whether owners keep what they do not send.
    min_leaf_size: leaves with fewer elements travel whole. By default the smallest
      leaves that together hold less than 0.01 % of all elements.
    message_bytes: the largest payload in bytes that leaves share.

  Returns:
    A gradient transformation, as :func:`gradcomp.compress` returns it; with
    ``max_norm`` a chain of clipping and that.

  Raises:
    ValueError: an argument that the codec, ``compress`` or ``clip_by_local_norm`` does
      not allow.

  Example:
    >>> tx = gradcomp.redsync(density=0.25, momentum=0.5, nesterov=False)
    >>> gradient = jnp.array([4.0, 1.0, -2.0, 1.0] * 64)
    >>> state = tx.init(gradient)
    >>> for _ in range(3):
    ...   update, state = tx.update(gradient, state)
    ...   print(update[:4])
    [4. 0. 0. 0.]
    [ 0.  0. -5.  0.]
    [10.  0.  0.  0.]

  References:
    Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_, 2018, section 2; Lin
    et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_, 2018,
    section 3
  """
  codec = TopK(
    density=density,
    selection=selection,
    quantize=quantize,
    value_dtype=value_dtype,
    slack=slack,
    interval=interval,
  )
  exchanged = compress(
    codec,
    axis_name=axis_name,
    exchange=exchange,
    group_size=group_size,
    feedback="error" if momentum is None else "momentum",
    momentum=0.0 if momentum is None else momentum,
    nesterov=nesterov,
    second_stage_feedback=second_stage_feedback,
    min_leaf_size=min_leaf_size,
    message_bytes=message_bytes,
  )
  if max_norm is None:
    return exchanged
  clip = clip_by_local_norm(max_norm, axis_name=axis_name)
  return optax.chain(clip, exchanged)
