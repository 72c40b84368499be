"""Builds methods that send some elements: RedSync, and the largest of blocks."""

from typing import Literal, Unpack

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from gradcomp._src.checks import flag, one_of, share_below_1
from gradcomp._src.codecs.block_top import BlockTop
from gradcomp._src.codecs.entry_values import Quantize
from gradcomp._src.codecs.selection_methods import Selection
from gradcomp._src.codecs.top_k import TopK
from gradcomp._src.core.feedback import ErrorFeedback, MomentumFeedback
from gradcomp._src.core.transform import compress
from gradcomp._src.kernels.gpu.dispatch import Implementation
from gradcomp._src.transforms.clip import ClipRule, clip_by_local_norm
from gradcomp._src.transforms.options import (
  CompressOptions,
  ExchangeOptions,
  checked,
  recipe,
)


@recipe
def redsync(
  density: float = 0.001,
  momentum: float | None = 0.9,
  *,
  nesterov: bool = True,
  max_norm: float | None = None,
  clip_rule: ClipRule = "own",
  selection: Selection = "auto",
  quantize: Quantize | None = None,
  value_dtype: DTypeLike = jnp.float32,
  slack: float = 2.0,
  interval: int = 5,
  implementation: Implementation | None = None,
  feedback: Literal["auto", "error", "momentum"] = "auto",
  **options: Unpack[ExchangeOptions],
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
  are best dense, or dense enough: see :func:`gradcomp.wrappers.switch`.

  A payload has about 6 bytes for each of ``density * n`` elements (up to twice as many
  elements of large leaves, see ``selection``), and 2 with ``quantize="asq"``.

  Args:
    density: the share of the elements to send; 1 for the dense exchange.
    momentum: m, at least 0 and below 1; None for residuals of plain gradients.
    nesterov: whether momentum is Nesterov's.
    max_norm: the norm to clip gradients to, see
      :func:`gradcomp.wrappers.clip_by_local_norm`; None clips nothing.
    clip_rule: the ``rule`` of that: ``"own"`` clips each worker's gradient at
      ``max_norm``; ``"share"`` is the paper's.
    selection: the way in which the elements to send are selected.
    quantize: None, ``"asq"`` or ``"mean"``.
    value_dtype: the dtype of values on the wire.
    slack: slots for each element to send, from 1 to 2.
    interval: steps that a ``sampled`` threshold is used for.
    implementation: how elements are counted and listed, see the codec.
    feedback: ``"auto"``: ``"momentum"``, or ``"error"`` with ``momentum=None``.
    **options: all others of :class:`gradcomp.CompressOptions`. Here ``exchange="auto"``
      is ``"all_gather"`` until that sends more than a plain mean.

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
  kept: Literal["error", "momentum"] = "error" if momentum is None else "momentum"
  if feedback not in ("auto", kept):
    raise ValueError(
      f'`feedback` must be "auto" or "{kept}" in RedSync with momentum={momentum!r}, '
      f"got {feedback!r}; momentum=None keeps residuals of plain gradients."
    )
  flag("nesterov", nesterov)
  one_of("clip_rule", ClipRule, clip_rule)
  keeper = ErrorFeedback()
  if momentum is not None:
    momentum = share_below_1("momentum", momentum)
    keeper = MomentumFeedback(decay=momentum, nesterov=nesterov)
  codec = TopK(
    density=density,
    selection=selection,
    quantize=quantize,
    value_dtype=value_dtype,
    slack=slack,
    interval=interval,
    implementation=implementation,
  )
  exchanged = compress(
    codec,
    feedback=keeper,
    **checked(redsync, options),
  )
  if max_norm is None:
    return exchanged
  axis_name = options.get("axis_name")
  clip = clip_by_local_norm(max_norm, axis_name=axis_name, rule=clip_rule)
  return optax.chain(clip, exchanged)


@recipe
def blocktop(
  block_size: int = 64,
  *,
  count: int = 1,
  value_bits: Literal[2, 8, 32] = 2,
  implementation: Implementation | None = None,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  r"""Averages the largest of every ``block_size`` consecutive elements over workers.

  It is :func:`gradcomp.compress` with the codec :class:`gradcomp.codecs.BlockTop`. The
  two say what the arguments mean. It is biased, and has error feedback by default: with
  the codec's :math:`Q`, and the gradients :math:`g_i` and residuals :math:`e_i` of N
  workers, it returns

  .. math:: \frac{1}{N} \sum_i Q(g_i + e_i), \qquad e_i' = g_i + e_i - Q(g_i + e_i)

  An element waits for about ``block_size / count`` steps until it is sent.

  A payload has about ``count * (log2(block_size) + value_bits) / block_size`` bits an
  element: 0.129 at the defaults, with the scales.

  Raises:
    ValueError: an argument that the codec or ``compress`` does not allow.

  Example:
    >>> tx = gradcomp.blocktop(8, value_bits=32)
    >>> gradient = jnp.array([4.0, 1.0, -2.0, 1.0, 0.0, 0.0, 0.0, 0.0] * 200)
    >>> state = tx.init(gradient)
    >>> for _ in range(3):
    ...   update, state = tx.update(gradient, state)
    ...   print(update[:4])
    [4. 0. 0. 0.]
    [4. 0. 0. 0.]
    [ 0.  0. -6.  0.]

  References:
    Chen et al., `ScaleCom <https://arxiv.org/abs/2104.11125>`_, 2020; Sarfi et al.,
    `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025
  """
  codec = BlockTop(
    block_size=block_size,
    count=count,
    value_bits=value_bits,
    implementation=implementation,
  )
  return compress(codec, **checked(blocktop, options))
