"""``adam``: AdamW of workers that exchange compressed momenta in place of gradients."""

from typing import Any, Unpack

import optax

from gradcomp._src import checks
from gradcomp._src.codecs import one_bit, protocol
from gradcomp._src.core import border, transform
from gradcomp._src.core.feedback import Feedback, FeedbackName
from gradcomp._src.exchange.auto import Auto, ExchangeName
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh import axes, types
from gradcomp._src.optimizers import local_adam, moments
from gradcomp._src.public import arguments, cites
from gradcomp._src.transforms.options import LeafOptions, recipe

_ONE_BIT, _STABLE = one_bit.OneBit(), moments.Stable()


@recipe()
def adam(  # noqa: PLR0913 - options of users, by keyword
  learning_rate: optax.ScalarOrSchedule,
  *,
  axis_name: axes.AxisName | None = None,
  codec: protocol.LeafCodec = _ONE_BIT,
  warmup: int | moments.Warmup = _STABLE,
  variance: moments.Variance = "frozen",
  local: int | local_adam.Gaps | None = None,
  floor: float = 0.1,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: Any = 0.0,
  mask: Any = None,
  exchange: ExchangeName | Auto | Exchange = "two_shot",
  feedback: FeedbackName | Feedback | None = "error",
  **options: Unpack[LeafOptions],
) -> optax.GradientTransformationExtraArgs:
  r"""AdamW of N workers that send compressed momenta, as in 1-bit Adam.

  It replaces an optimizer, with nothing before it, and takes each worker's own gradient
  :math:`g_i`, as :func:`gradcomp.compress` does. During the warm-up it is
  ``optax.adamw`` of the mean gradient, sent in float32. Then the variance :math:`v`
  stays as it is, and a step is

  .. math::
     m_i = \beta_1 m + (1 - \beta_1) g_i, \qquad
     m \leftarrow \frac{1}{N} \sum_i Q(m_i + e_i), \qquad
     x \leftarrow x - \gamma \Bigl(\frac{\hat m}{\sqrt{\hat v} + \epsilon}
     + \lambda x\Bigr)

  where :math:`Q` encodes and decodes, and :math:`e_i` is the worker's residual. The
  error of a gradient would enter the square of :math:`v`; the error of a momentum does
  not. All workers have bit-identical parameters after each step.

  The default is 1-bit Adam. 0/1 Adam has ``variance="doubling"`` and
  ``local=DoublingGaps()``. With ``local`` workers exchange in the last step of a gap,
  and send nothing in others. Each has its own parameters :math:`x_i`, at which its
  gradients are computed: see :func:`gradcomp.local.local_params`, which
  :func:`gradcomp.make_train_step` calls. Updates are zeros in its steps

  .. math::
     m_i \leftarrow \beta_1 m_i + (1 - \beta_1) g_i, \qquad
     u_i \leftarrow u_i + \gamma m_i, \qquad
     x_i = x - \frac{\hat u_i}{\sqrt{\hat v} + \epsilon}

  and with the sum :math:`\Gamma` of the rates of a gap, all move in its last one

  .. math::
     m \leftarrow \frac{1}{N} \sum_i Q\Bigl(\frac{u_i}{\Gamma} + e_i\Bigr), \qquad
     x \leftarrow x - \Gamma \Bigl(\frac{\hat m}{\sqrt{\hat v} + \epsilon}
     + \lambda x\Bigr), \qquad m_i \leftarrow m, \qquad u_i \leftarrow 0

  Both moments are corrected for their first value of zero: :math:`\hat m` by the number
  of steps, and :math:`\hat v` by the number of its updates.

  It departs from the papers in four ways:

  - A step that averages gradients sends no momenta: the mean updates :math:`m`, and
    residuals are kept. With ``local`` such a step follows an exchange, and may end a
    gap early.
  - Workers send :math:`u_i / \Gamma`, not :math:`u_i`, so that gaps of one step equal
    steps without ``local``. Weights decay where all move.
  - An element with :math:`v = 0` has had no gradient and stays. Its first momentum sets
    :math:`\hat v` to the square of the gradient that it implies,
    :math:`m / (1 - \beta_1^h)` after a gap of h steps. A sparse codec sums many steps,
    and so implies too large a gradient. A codec without a zero sends noise to such
    elements, which error feedback takes back.
  - A variance far below the codec's noise makes leaps. So the root in all formulas is

  .. math:: \max\Bigl(\sqrt{\hat v}, \frac{f}{n} \sum_k \sqrt{\hat v_k}\Bigr)

  over the n elements k of the leaf, with ``floor`` for :math:`f`. The papers have
  ``floor=0``: with that LeNet on images was NaN some steps after the warm-up. If
  gradients grow after the warm-up, warm up for longer, or take ``"doubling"``.

  The warm-up sends 32 bits an element, later steps the codec's, in one program. Leaves
  with rare gradients, such as embeddings, have small variances, which amplify noise:
  give them ``Dense()`` by a policy, or more bits. Local steps keep two more float32
  numbers an element in each worker. Moments are float32 or wider. Their last bit may
  differ in ``jax.vmap`` and under Explicit axes. A map with further manual mesh axes
  that shard parameters must check types.

  Args:
    learning_rate: :math:`\gamma`, a number or a schedule of optax.
    axis_name: see :class:`gradcomp.CompressOptions`.
    codec: the codec of the momenta.
    warmup: a number of steps, 1 or more, or :class:`gradcomp.optimizers.Stable`. It
      should last for as long as the rate rises.
    variance: after the warm-up ``"frozen"``, or ``"doubling"``: some steps still
      average gradients in float32, and update :math:`v`, 16 with a gap of 1 step, 16
      with a gap of 2, and so on.
    local: the steps from one exchange to the next, after the warm-up: a number, or
      :class:`gradcomp.optimizers.DoublingGaps`. None exchanges in every step. It needs
      ``axis_name``.
    floor: :math:`f`, at least 0 and below 1. Default: 0.1.
    b1: :math:`\beta_1`, at least 0 and below 1.
    b2: :math:`\beta_2`, at least 0 and below 1.
    eps: :math:`\epsilon`.
    weight_decay: :math:`\lambda`, decoupled. Above 0, ``update`` needs the parameters.
    mask: the leaves that decay, a tree of bools or a function of the parameters.
    exchange: the exchange of the momenta, see :class:`gradcomp.CompressOptions`.
    feedback: the feedback of the momenta, likewise.

  Returns:
    A gradient transformation, an ``optax.chain``. The first of its states has ``mu``,
    the mean momentum, ``nu``, the variance, ``count``, the steps so far, and
    ``exchange``, the residuals of the momenta. With ``local`` these are ``moments`` of
    the state, beside each worker's steps since an exchange; call ``init`` inside the
    map then, or under ``jax.set_mesh(mesh)``.

  Raises:
    ValueError: an option is bad, or as in :func:`gradcomp.compress`.
    TypeError: ``codec`` is not one.

  Example:
    >>> tx = gradcomp.optimizers.adam(0.1, axis_name="data", warmup=2)
    >>> def worker(target):
    ...   params = jnp.float32(0.0)
    ...   state = tx.init(params)
    ...   for _ in range(4):
    ...     update, state = tx.update(params - target, state)
    ...     params = optax.apply_updates(params, update)
    ...   return params
    >>> print(jax.vmap(worker, axis_name="data")(jnp.array([1.0, 3.0])).round(1))
    [0.4 0.4]

  References:
    Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, 2021, algorithm 1; Lu
    et al., `0/1 Adam <https://arxiv.org/abs/2202.06009>`_, 2022, algorithm 1
  """
  told = arguments(adam, locals())
  end: Any = warmup
  if not hasattr(end, "ended"):
    end = moments.Steps(checks.step_count("warmup", end))
  shared = moments.Moments(
    b1=b1,
    b2=b2,
    eps=eps,
    warmup=end,
    variance=variance,
    compressed=transform.compress(
      codec, axis_name=axis_name, exchange=exchange, feedback=feedback, **options
    ),
    axis_name=axis_name,
    floor=floor,
  )
  parts: Any = shared
  if local is not None:
    if axis_name is None:
      raise ValueError(
        "`axis_name` must name the axis of the workers that move alone with `local`, "
        "got None; leave `local` out for one worker, which moves alone anyway."
      )
    gaps: Any = local
    if not hasattr(gaps, "gap"):
      gaps = local_adam.EqualGaps(checks.step_count("local", gaps))
    parts = local_adam.LocalAdam(
      moments=shared,
      gaps=gaps,
      names=axes.axis_names(axis_name),
      learning_rate=learning_rate,
      decay=moments.decoupled(weight_decay, mask) or optax.identity(),
    )
  is_later = variance == "doubling" or local is not None  # as 0/1 Adam has it

  @cites("tang2021onebitadam", *["lu2022zeroone"] * is_later)
  def core(
    across: types.Place, updates: Any, state: Any, params: Any, extra_args: Any
  ) -> tuple[Any, Any]:
    grads = border.not_differentiated(updates)
    moments.require_agreement("gradcomp.optimizers.adam", told, grads, params)
    like = grads if params is None else params
    return parts.update(across, grads, state, params, like)

  # It enters maps itself, where it has decided whether to send gradients or momenta.
  facts: Any = {"reads": True, "whole": True, "enters": False}
  first = border.on_workers(parts.init, core, axis_name, **facts)
  if local is not None:
    return first
  return moments.with_decay(first, learning_rate, weight_decay, mask)
