"""``adaptive``: codecs that replace one another by their measured errors."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from gradcomp._src.bibliography import AGARWAL_2021, MARKOV_2024, Citation, cites
from gradcomp._src.checks import share_below_1, step_count
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core import agreement
from gradcomp._src.core.compression import Dither
from gradcomp._src.core.feedback import Feedback, FeedbackName, as_feedback
from gradcomp._src.core.inputs import not_differentiated, on_real_pairs
from gradcomp._src.core.residual_storage import add_residual
from gradcomp._src.core.state import CompressState, with_measures
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange.auto import Auto, ExchangeName
from gradcomp._src.exchange.collectives import STAGE, psum
from gradcomp._src.exchange.message_size import MessageBytes
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.exchange.two_shot import TwoShot
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.reduction import reduction
from gradcomp._src.mesh.shard_maps import per_device
from gradcomp._src.mesh.study import is_study
from gradcomp._src.mesh.types import other_axes
from gradcomp._src.transforms.switch import largest_state

__all__ = ["AdaptiveState", "adaptive"]


class AdaptiveState(NamedTuple):
  """The state of :func:`gradcomp.contrib.adaptive`.

  Attributes:
    count: steps so far, ``int32[]``, replicated.
    index: the number of the codec of the last step, ``int32[]``, replicated.
    errors: the relative squared error of each codec when it was last measured,
      ``float32[codecs]``, replicated.
    inner: the residuals, which the codecs share.

  Example:
    >>> codecs = [gradcomp.codecs.QSGD(bits=bits) for bits in (2, 4, 8)]
    >>> tx = gradcomp.contrib.adaptive(codecs, tolerance=0.02, every=100)
    >>> tx.init({"w": jnp.ones(4096)}).errors
    Array([0., 0., 0.], dtype=float32)
  """

  count: jax.Array  # type: ignore[assignment]
  index: jax.Array  # type: ignore[assignment]
  errors: jax.Array
  inner: CompressState


_TWO_SHOT = TwoShot(feedback=False)
_L_GRECO = "One codec, or policy, of a fixed list is chosen, and by one bound in time."
_ACCORDION = "Errors of codecs are measured, in place of changes of gradients' norms."


def adaptive(  # noqa: PLR0913 - options of users, by keyword
  codecs: Sequence[LeafCodec],
  *,
  axis_name: AxisName | None = None,
  tolerance: float,
  every: int,
  exchange: ExchangeName | Auto | Exchange = _TWO_SHOT,
  feedback: FeedbackName | Feedback | None = "auto",
  min_leaf_size: int | None = None,
  message_bytes: MessageBytes = "auto",
  key: ArrayLike = 0,
  dither: Dither = "shared",
) -> optax.GradientTransformationExtraArgs:
  r"""Exchanges gradients by the first codec of a list that loses little enough.

  It takes the place of :func:`gradcomp.compress`. In the first step, and in each
  ``every``-th after it, all N workers encode what they are about to send,
  :math:`c_i = g_i + e_i`, by each codec :math:`Q_k`, which shows its relative error

  .. math:: \epsilon_k = \frac{\sum_i \lVert Q_k(c_i) - c_i \rVert^2}
     {\sum_i \lVert c_i \rVert^2}

  over all leaves. Until the next measurement they use the first codec with
  :math:`\epsilon_k` at most ``tolerance``, or else the last. So give the cheapest
  first. A codec may be a policy: those of :func:`gradcomp.cost.allocate`, at several
  widths of its uniform codec, have bits for each leaf as well.

  All codecs are branches of one program: nothing is compiled again, and a step runs one
  of them. They share residuals as those of :func:`gradcomp.wrappers.switch` do.
  A gradient that is not finite changes no choice.

  A measurement encodes once by each codec, and adds a float for each, and one more,
  over the workers. :func:`gradcomp.wire_report` lists these, and
  :func:`gradcomp.explain` does not. Its table is that of the last codec, the most that
  a step may send. Errors are of each worker's encoding. Those of their mean are smaller
  where they are independent, and what owners lose of a mean is not in them.

  Args:
    codecs: codecs or policies, the cheapest first.
    axis_name: as of :class:`gradcomp.CompressOptions`.
    tolerance: the largest relative squared error, at least 0 and below 1.
    every: the steps from one measurement to the next.
    exchange: the same for all codecs. Sparse ones need ``"all_gather"``. Only codecs
      with rows of one shape can share the owner residuals of ``"two_shot"``. Nor do
      codecs go together that keep different things of their own, like ``PowerSGD`` and
      ``TopK``.
    feedback: ``"auto"``, ``"error"``, an :class:`gradcomp.ErrorFeedback` or None.
    min_leaf_size, message_bytes, key, dither: as of :class:`gradcomp.CompressOptions`.

  Returns:
    A gradient transformation; its state is a :class:`gradcomp.contrib.AdaptiveState`.

  Raises:
    ValueError: there is no codec, an option is bad, or as of :func:`gradcomp.compress`;
      in ``init``, the states of the codecs do not fit together.
    TypeError: one of ``codecs`` is none.

  Example:
    >>> codecs = [gradcomp.codecs.QSGD(bits=bits) for bits in (2, 4, 8)]
    >>> tx = gradcomp.contrib.adaptive(codecs, tolerance=0.05, every=2)
    >>> grads = jax.random.normal(jax.random.key(0), (4096,))
    >>> state = tx.init(grads)
    >>> for scale in (1, 1, 0, 0):
    ...   _, state = tx.update(scale * grads, state)
    ...   print(state.index)
    1
    1
    0
    0

  References:
    Markov et al., `L-GreCo <https://arxiv.org/abs/2210.17357>`_, 2024, section 4;
    Agarwal et al., `Accordion: Adaptive Gradient Communication via Critical Learning
    Regime Identification <https://arxiv.org/abs/2010.16248>`_, 2021
  """
  most, steps = share_below_1("tolerance", tolerance), step_count("every", every)
  if not isinstance(codecs, Sequence) or isinstance(codecs, str) or not codecs:
    raise ValueError(
      f"`codecs` must be a sequence of one codec or more, got {codecs!r}; put the "
      "cheapest first."
    )
  own: dict[str, Any] = {"min_leaf_size": min_leaf_size, "dither": dither}
  more: dict[str, Any] = {"message_bytes": message_bytes, "key": key}
  over: dict[str, Any] = {"axis_name": axis_name, "exchange": exchange}
  choices = [compress(x, feedback=feedback, **own, **more, **over) for x in codecs]
  for codec in codecs:
    rule = as_feedback(feedback, codec)
    if rule.moves or rule.estimates:
      raise ValueError(
        f"`feedback` must add nothing but a residual to gradients, got {feedback!r}; "
        'take "error", and a momentum behind the exchange.'
      )
  measure = functools.partial(_measured, tuple(codecs), own)

  def init_fn(params: Any) -> AdaptiveState:
    inner: Any = largest_state("codecs", [tx.init(params) for tx in choices])
    zero = jnp.zeros([], jnp.int32)
    errors = jnp.zeros(len(choices), jnp.float32)
    return AdaptiveState(zero, jnp.copy(zero), errors, inner)

  @cites(Citation(MARKOV_2024, _L_GRECO), Citation(AGARWAL_2021, _ACCORDION))
  def update_fn(
    updates: Any, state: AdaptiveState, params: Any = None, **extra_args: Any
  ) -> tuple[Any, AdaptiveState]:
    del extra_args
    updates = not_differentiated(updates)
    axes = reduction(updates, axis_name, local=False).axis_name
    told = {"tolerance": most, "every": steps, "codecs": len(choices)}
    agreement.require_agreement("gradcomp.contrib.adaptive", told, updates, axes)
    errors = state.errors
    # A study's tables are of the exchange alone.
    if jax.tree.leaves(updates) and not is_study():
      due = state.count % steps == 0
      keep = lambda updates, errors, inner: errors
      given = updates, errors, state.inner
      errors = lax.cond(due, functools.partial(measure, axes), keep, *given)
    index = jnp.int32(len(choices) - 1)
    for number in reversed(range(len(choices) - 1)):
      index = jnp.where(errors[number] <= most, jnp.int32(number), index)
    branch = lambda tx: lambda g, inner: tx.update(g, inner, params)
    new, inner = lax.switch(index, [*map(branch, choices)], updates, state.inner)
    count: Any = optax.safe_increment(state.count)
    return new, AdaptiveState(count, index, errors, inner)

  return on_real_pairs(init_fn, update_fn, axis_name)


def _measured(
  codecs: Sequence[LeafCodec],
  options: dict[str, Any],
  axes: AxisName | None,
  updates: Any,
  errors: jax.Array,
  inner: CompressState,
) -> jax.Array:
  """Returns the error of each codec over all workers, and the old ones of a NaN."""
  others = {x for leaf in jax.tree.leaves(updates) for x in other_axes(leaf, axes)}
  own = () if axes is None else axis_names(axes)
  over = (*own, *sorted(others))

  def on_device(
    updates: Any, errors: jax.Array, inner: CompressState
  ) -> tuple[Any, jax.Array]:
    plain = with_measures(inner._replace(residual=None, server_residual=None), None)
    given = add_residual(updates, inner.residual, codecs[-1])
    sums = []
    for codec in codecs:
      alone: dict[str, Any] = {"axis_name": axes, "exchange": "local", "feedback": None}
      tx = compress(codec, **alone, **options)
      sent, _ = tx.update(given, cast(Any, plain))
      sums.append(_squares(jax.tree.map(jnp.subtract, sent, given)))
    total = jnp.stack([*sums, _squares(given)])
    if over:
      with jax.named_scope(STAGE):
        total = psum(total, over)
    energy = total[-1]
    found = total[:-1] / jnp.where(energy > 0, energy, 1.0)
    return updates, jnp.where(jnp.isfinite(energy), found, errors)

  args: Any = {"keeps_addends": True, "given": (inner,)}
  return per_device(on_device, updates, errors, axes, **args)[1]


def _squares(tree: Any) -> jax.Array:
  """Returns the sum of all squares, ``float32[]``."""
  sums = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
  return functools.reduce(jnp.add, sums)
