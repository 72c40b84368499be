"""The options that every recipe shares with ``compress``, and the help of recipes."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar

import optax
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core import compression, transform
from gradcomp._src.core.feedback import Feedback, FeedbackName
from gradcomp._src.exchange import auto, plan, protocol
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.public import checked, shows_options


class LeafOptions(TypedDict, total=False):
  """The options of methods with axes, an exchange and feedback of their own."""

  min_leaf_size: int | None
  message_bytes: plan.MessageBytes
  key: ArrayLike
  dither: compression.Dither


class MessageOptions(LeafOptions, total=False):
  """The options of methods with axes and feedback of their own."""

  exchange: auto.ExchangeName | auto.Auto | protocol.Exchange


class ExchangeOptions(MessageOptions, total=False):
  """The options of recipes with feedback of their own: no ``feedback`` among them."""

  axis_name: AxisName | None


class CompressOptions(ExchangeOptions, total=False):
  """The options of :func:`gradcomp.compress`, which all recipes take by keyword.

  ``g`` is a worker's gradient, ``e`` its residual, ``Q`` encodes and decodes, and N is
  the number of workers. A function of your own passes options on by
  ``**options: Unpack[gradcomp.CompressOptions]``.

  Attributes:
    axis_name: the axis of the enclosing shard_map, pmap or vmap to average over, or a
      tuple of axes; under Explicit axes, the axes that the gradients are unreduced
      over. None takes these from the type, if no residual is kept. Elsewhere None
      exchanges nothing, and returns ``Q(g + e)``. Default: None.
    exchange: the schedule of sends: ``"auto"``, ``"all_gather"``, ``"two_shot"``,
      ``"ring"``, ``"hierarchical"``, ``"psum"`` (dense float32, and codecs that share
      their scale) or ``"local"``. Objects like
      ``gradcomp.exchange.TwoShot(feedback=False)`` have options. ``"auto"`` chooses by
      codec, sizes and workers: see :class:`gradcomp.exchange.Auto`. ``"local"``
      exchanges nothing: outputs differ between workers, and under Explicit axes stay
      unreduced. Default: ``"auto"``.
    feedback: ``"error"``, or :class:`gradcomp.ErrorFeedback`, keeps the unsent part,
      ``e' = g + e - Q(g + e)``, and adds it to the next gradient. ``"momentum"``, or
      :class:`gradcomp.MomentumFeedback`, keeps the unsent part of each worker's
      momentum. ``"ef21"``, or :class:`gradcomp.contrib.EF21`, sends the difference to
      an estimate. None keeps nothing. ``"auto"`` is ``"error"`` for biased codecs, and
      None for others. All but None need a ``contraction`` above 0. Default: ``"auto"``.
    min_leaf_size: elements, 0 or more: leaves with fewer travel in float32, in the same
      message, or in their own where sums of codes are exact. None takes the smallest
      leaves that together hold less than 0.5 % of all elements, or 0.01 % with a sparse
      codec. Default: None.
    message_bytes: the largest payload in bytes that leaves share, 0 or more; None for
      one message. Several messages can travel before the backward pass is done. A leaf
      is never cut. ``"auto"`` fills messages from the last leaf on, each with at least
      4 MiB, 128 KiB for each worker, and a 16th of the payload. On CPUs, which compute
      nothing while they send, it is one message; :func:`gradcomp.reshard_state` moves a
      state to another platform. Default: ``"auto"``.
    key: a seed of at most 64 bits, or a threefry key, equal on all workers. The random
      bits of a step derive from key, step, the leaf's path and worker alone. Default:
      0.
    dither: ``"shared"``: all workers round by the same random bits, which each changes
      by its own constant, so that their errors cancel. The error of the mean has half
      the variance, at the same bytes, and each worker's rounding stays unbiased: see
      docs/inside/wire-format.md. ``"independent"``: each worker draws its own bits, for
      comparison. Default: ``"shared"``.
  """

  feedback: FeedbackName | Feedback | None


_Recipe = TypeVar("_Recipe", bound=Callable[..., Any])

_AVERAGES = r"""It is :func:`gradcomp.compress` with the codec
:class:`gradcomp.codecs.%s`. With the codec's :math:`Q`, and the gradients :math:`g_i`
and residuals :math:`e_i` of N workers, zero without feedback, it returns

.. math:: \frac{1}{N} \sum_i Q(g_i + e_i), \qquad e_i' = g_i + e_i - Q(g_i + e_i)"""

_SECTIONS = """
Returns:
  A gradient transformation, as :func:`gradcomp.compress` returns it; its state is a
  :class:`gradcomp.state.CompressState`.

Raises:
  ValueError: an argument that the codec or ``compress`` does not allow.
"""


def recipe(*codec: type[LeafCodec]) -> Callable[[_Recipe], _Recipe]:
  """Completes a recipe's signature and docstring, for a codec or for any.

  ``optax.inject_hyperparams`` reads the signature. ``Args`` has the recipe's own
  entries, or else the codec's or the option's. A recipe without a formula gets that of
  ``compress``.
  """
  texts = [inspect.getdoc(x) or "" for x in (CompressOptions, *codec)]

  def completed(make: _Recipe) -> _Recipe:
    text = inspect.getdoc(make) or ""
    if codec and ".. math::" not in text:
      first, rest = text.split("\n\n", 1)
      make.__doc__ = "\n\n".join([first, _AVERAGES % codec[0].__name__, rest])
    return shows_options(make, transform.compress, *texts, _SECTIONS)

  return completed


def of_codec(
  make: Callable[..., Any], codec: Any, given: Mapping[str, Any], **own: Any
) -> optax.GradientTransformationExtraArgs:
  """Returns a recipe's transformation, by its ``locals()`` and options of its own."""
  names = [field.name for field in dataclasses.fields(codec) if field.name in given]
  fitted = codec(**{name: given[name] for name in names})
  return transform.compress(fitted, **own, **checked(make, given["options"]))
