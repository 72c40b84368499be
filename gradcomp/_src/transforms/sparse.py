"""Builds sparse methods: RedSync, top-k, random-k, and the largest of blocks."""

from typing import Literal, Unpack

import optax
from jax.typing import DTypeLike

from gradcomp._src.checks import BELOW_1, flag, one_of
from gradcomp._src.codecs import block_top, random_k, sparse, top_k
from gradcomp._src.core.feedback import ErrorFeedback, MomentumFeedback
from gradcomp._src.kernels.gpu.dispatch import Implementation
from gradcomp._src.transforms.each_worker import ClipRule, clip_by_local_norm
from gradcomp._src.transforms.options import (
  CompressOptions,
  ExchangeOptions,
  of_codec,
  recipe,
)


@recipe(top_k.TopK)
def redsync(  # noqa: PLR0913 - the options of the codec and of the momentum
  density: float = top_k.TopK.density,
  momentum: float | None = 0.9,
  *,
  nesterov: bool = True,
  max_norm: float | None = None,
  clip_rule: ClipRule = "own",
  selection: sparse.Selection = top_k.TopK.selection,
  quantize: sparse.Quantize | None = top_k.TopK.quantize,
  dtype: DTypeLike = top_k.TopK.dtype,
  slack: float = top_k.TopK.slack,
  search_every: int = top_k.TopK.search_every,
  implementation: Implementation | None = top_k.TopK.implementation,
  feedback: Literal["auto", "error", "momentum"] = "auto",
  **options: Unpack[ExchangeOptions],
) -> optax.GradientTransformationExtraArgs:
  r"""RedSync: averages the largest elements of momentum and residuals over workers.

  It is :func:`gradcomp.compress` with the codec :class:`gradcomp.codecs.TopK` and
  ``feedback="momentum"``. With worker :math:`i`'s gradient :math:`g_i`, momentum
  :math:`u_i` and residual :math:`v_i`, and with the codec's :math:`Q`, it returns

  .. math:: \frac{1}{N} \sum_i Q(v_i + p_i), \qquad u_i' = m u_i + g_i, \qquad
     v_i' = v_i + p_i - Q(v_i + p_i)

  where :math:`p_i` is :math:`u_i'`, or :math:`m u_i' + g_i` with Nesterov's momentum,
  or :math:`g_i` with ``momentum=None``. Where an element is sent, :math:`u_i'` becomes
  zero. The codec is biased; residuals keep the unsent part.

  The momentum is in here, so plain ``optax.sgd(learning_rate)`` follows it. Weight
  decay comes after it, too, because residuals would delay it for hundreds of steps::

    optimizer = optax.chain(
      gradcomp.redsync(density=0.001, axis_name="data"),
      optax.add_decayed_weights(1e-4),
      optax.sgd(0.1),
    )

  Optimizers that divide by a mean of squares see gradients of many steps at once. Begin
  with dense steps, or with a high density: see :func:`gradcomp.wrappers.switch`. A
  payload has about 6 bytes for each of ``density * n`` elements (up to twice that
  number in large leaves, see ``selection``), and 2 with ``quantize="asq"``.
  ``exchange="auto"`` is ``"all_gather"`` as long as that sends less than a plain mean.

  Args:
    momentum: m, at least 0 and below 1; None for residuals of plain gradients. Default:
      0.9.
    nesterov: whether momentum is Nesterov's; True or False. Default: True.
    max_norm: the norm to clip gradients to, above 0, see
      :func:`gradcomp.wrappers.clip_by_local_norm`; None clips nothing. Default: None.
    clip_rule: the ``rule`` of clipping; ``"share"`` is the paper's. Default: ``"own"``.
    feedback: ``"momentum"``, ``"error"`` with ``momentum=None``, or ``"auto"``, which
      follows ``momentum``. Default: ``"auto"``.

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
    Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_, 2018, section 2; Lin et
    al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_, 2018, section
    3
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
    momentum = BELOW_1.check("momentum", momentum)
    keeper = MomentumFeedback(decay=momentum, nesterov=nesterov)
  exchanged = of_codec(redsync, top_k.TopK, locals(), feedback=keeper)
  if max_norm is None:
    return exchanged
  axis_name = options.get("axis_name")
  clip = clip_by_local_norm(max_norm, axis_name=axis_name, rule=clip_rule)
  return optax.chain(clip, exchanged)


@recipe(top_k.TopK)
def topk(  # noqa: PLR0913 - options of users, by keyword
  density: float = top_k.TopK.density,
  *,
  selection: sparse.Selection = top_k.TopK.selection,
  quantize: sparse.Quantize | None = top_k.TopK.quantize,
  dtype: DTypeLike = top_k.TopK.dtype,
  slack: float = top_k.TopK.slack,
  search_every: int = top_k.TopK.search_every,
  implementation: Implementation | None = top_k.TopK.implementation,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  """Top-k with error feedback: averages the largest elements of each worker.

  A worker sends the ``density * n`` largest of n elements. It is biased. Error feedback
  is the default: an unsent element grows until it is sent. Stich et al. prove that SGD
  then converges as fast as without compression, for smooth and strongly convex
  functions. :func:`redsync` corrects momentum, too. Begin with dense steps by
  :func:`gradcomp.wrappers.switch`. Payload and ``exchange="auto"`` are as in
  :func:`redsync`.

  Example:
    >>> tx = gradcomp.topk(density=0.25)
    >>> gradient = jnp.array([5.0, 1.0, -2.0, 1.0] * 64)
    >>> update, state = tx.update(gradient, tx.init(gradient))
    >>> update[:4].tolist(), state.residual[:4].tolist()
    ([5.0, 0.0, 0.0, 0.0], [0.0, 1.0, -2.0, 1.0])

  References:
    Stich et al., `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_,
    2018, section 2; Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_, 2018,
    section 2.1, for the selection
  """
  return of_codec(topk, top_k.TopK, locals())


@recipe(random_k.RandomK)
def randomk(
  density: float = random_k.RandomK.density, **options: Unpack[CompressOptions]
) -> optax.GradientTransformationExtraArgs:
  """Random-k with error feedback: averages the same random elements of all workers.

  A worker sends a random one of every ``1 / density`` consecutive elements. It is
  biased, and has error feedback by default: without it the mean is ``density`` times
  the gradient on average. It is the control experiment for :func:`topk`: equally many
  elements, chosen at random.

  A payload has 32 bits for each of ``density * n`` elements, and 64 a row for the key
  that positions follow from. ``exchange="psum"`` sends the values alone.

  Example:
    >>> tx = gradcomp.randomk(density=0.25)
    >>> gradient = jnp.ones(256)
    >>> update, state = tx.update(gradient, tx.init(gradient))
    >>> int((update != 0).sum()), bool(jnp.all(update + state.residual == gradient))
    (64, True)
  """
  return of_codec(randomk, random_k.RandomK, locals())


@recipe(block_top.BlockTop)
def blocktop(
  block_size: int = block_top.BlockTop.block_size,
  *,
  count: int = block_top.BlockTop.count,
  bits: Literal[2, 8, 32] = block_top.BlockTop.bits,
  implementation: Implementation | None = block_top.BlockTop.implementation,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  """Averages the largest of every ``block_size`` consecutive elements over workers.

  It is biased, and has error feedback by default. An element is sent about every
  ``block_size / count`` steps. A payload has about
  ``count * (log2(block_size) + bits) / block_size`` bits an element: 0.129 at the
  defaults, with the scales.

  Example:
    >>> tx = gradcomp.blocktop(8, bits=32)
    >>> gradient = jnp.array([4.0, 1.0, -2.0, 1.0, 0.0, 0.0, 0.0, 0.0] * 200)
    >>> update, state = tx.update(gradient, tx.init(gradient))
    >>> update[:4].tolist(), state.residual[:4].tolist()
    ([4.0, 0.0, 0.0, 0.0], [0.0, 1.0, -2.0, 1.0])
  """
  return of_codec(blocktop, block_top.BlockTop, locals())
