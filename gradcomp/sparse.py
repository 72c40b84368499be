"""RedSync: residual gradient compression with momentum."""

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from gradcomp._axes import AxisName
from gradcomp.clipping import clip_by_local_norm
from gradcomp.codecs import Quantize, Selection, TopK
from gradcomp.exchange import Exchange
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
  exchange: Exchange = "auto",
  group_size: int | None = None,
  second_stage_feedback: bool = True,
  min_leaf_size: int | None = None,
  message_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """RedSync: averages the largest elements of momentum and residuals over workers.

  :func:`gradcomp.compress` with the codec :class:`gradcomp.codecs.TopK` and
  ``feedback="momentum"``; the two say what the other arguments mean. Each worker adds
  up its momentum until an element is among the largest, and sends it then. Momentum is
  in here, so put plain ``optax.sgd(learning_rate)`` behind it, and what is no part of
  the loss's gradient, too::

    optimizer = optax.chain(
      gradcomp.redsync(density=0.001, axis_name="data"),
      optax.add_decayed_weights(1e-4),
      optax.sgd(0.1),
    )

  Weight decay in front of it would wait in residuals for hundreds of steps, and
  optimizers that divide by a mean of squares see gradients of many steps at once.
  The first steps are best dense, or dense enough: :func:`gradcomp.switch`.

  Sends about 6 bytes for each of ``density * n`` elements (up to twice as many of large
  leaves, see ``selection``), 2 with ``quantize="asq"``.

  Args:
    density: the share of the elements to send; 1 for the dense exchange.
    momentum: m; None for residuals of plain gradients.
    nesterov: whether momentum is Nesterov's.
    max_norm: clips gradients, see :func:`gradcomp.clip_by_local_norm`; None does not.
    selection: of the elements to send.
    quantize: None, ``"asq"`` or ``"mean"``.
    value_dtype: of values on the wire.
    slack: room for each element to send.
    interval: steps that a ``sampled`` threshold is used for.
    axis_name: the axis to average over.
    exchange: ``"auto"`` is ``"all_gather"`` until that sends more than a plain mean.
    group_size: workers in a group of ``"hierarchical"`` over one axis.
    second_stage_feedback: whether owners keep what they do not send.
    min_leaf_size: leaves with fewer elements travel whole. By default the smallest
      leaves that together hold less than 0.01 % of all elements.
    message_bytes: the largest payload in bytes that leaves share.

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
    Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_, 2018; Lin et al., `Deep
    Gradient Compression <https://arxiv.org/abs/1712.01887>`_, 2018, section 3
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
