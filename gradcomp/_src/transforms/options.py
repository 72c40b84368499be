"""The options that every recipe shares with ``compress``, typed and told once."""

import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

from jax.typing import ArrayLike

from gradcomp._src.core.compression import Dither
from gradcomp._src.core.feedback import Feedback, FeedbackName
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange.auto import Auto, ExchangeName
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh.axes import AxisName


class ExchangeOptions(TypedDict, total=False):
  """Those of :class:`CompressOptions` that a recipe with feedback of its own takes."""

  axis_name: AxisName | None
  exchange: ExchangeName | Auto | Exchange
  min_leaf_size: int | None
  message_bytes: int | None
  key: ArrayLike
  dither: Dither


class CompressOptions(ExchangeOptions, total=False):
  """The options of :func:`gradcomp.compress`, which all recipes take by keyword.

  A recipe names a method and builds its codec, as :func:`gradcomp.qsgd` does. Here
  ``g`` is a worker's gradient, ``e`` its residual, ``Q`` encodes and decodes, and N is
  the number of workers. A function of your own passes options on by
  ``**options: Unpack[gradcomp.CompressOptions]``.

  Attributes:
    axis_name: the axis of the enclosing shard_map, pmap or vmap to average over, or a
      tuple of axes to average over together; under Explicit axes, the axes that the
      gradients are unreduced over. None, the default, takes these from the type, if no
      residual is kept. Elsewhere None exchanges nothing, and returns ``Q(g + e)``.
    exchange: ``"all_gather"``, ``"two_shot"``, ``"ring"``, ``"hierarchical"``,
      ``"psum"`` (dense float32, and codecs that share their scale), ``"local"`` or, by
      default, ``"auto"``: see :func:`gradcomp.exchange.choose`. ``"local"`` exchanges
      nothing: outputs differ between workers, and under Explicit axes stay unreduced.
      An object in its place has options, like ``gradcomp.exchange.TwoShot(feedback=
      False)`` and ``gradcomp.exchange.Hierarchical(group_size=8)``.
    feedback: ``"error"``, or :class:`gradcomp.ErrorFeedback`, keeps what was not sent,
      ``e' = g + e - Q(g + e)``, and adds it to the next gradient. None does not.
      ``"auto"``, the default, does for biased codecs. ``"momentum"``, or
      :class:`gradcomp.MomentumFeedback`, does so with a momentum of each worker's
      gradients in place of the gradient.
    min_leaf_size: leaves with fewer elements travel in float32, in the same message, or
      in one of their own where sums of codes are exact. By default these are the
      smallest leaves that together hold less than 0.5 % of all elements, or 0.01 % with
      a sparse codec.
    message_bytes: the largest payload in bytes that leaves share; None, the default,
      for one message. Several messages can be on their way before the whole backward
      pass is done. A leaf is never cut.
    key: a seed, 0 by default, or a threefry key, of the stochastic rounding, equal on
      all workers. The bits of a step derive from key, step, the leaf's path in the tree
      and worker alone.
    dither: ``"shared"``, the default: all workers round by the same random bits, which
      each changes by a constant of its own, so that their errors cancel. The error of
      the mean then has half the variance, at the same bytes, and each worker's rounding
      stays unbiased: see docs/wire-format.md. ``"independent"``: each worker draws bits
      of its own, for comparison.
  """

  feedback: FeedbackName | Feedback | None


_Recipe = TypeVar("_Recipe", bound=Callable[..., Any])
_Options = TypeVar("_Options", bound=ExchangeOptions)


def recipe(make: _Recipe) -> _Recipe:
  """Shows options by name in the signature of a recipe, in the place of ``**options``.

  ``optax.inject_hyperparams`` reads the signature, and passes each argument by its
  name. Types of the options are left out, so that ``help`` stays short.

  Example:
    >>> inspect.signature(recipe(lambda codec="qsgd", *, exchange="ring", **options: 0))
    <Signature (codec='qsgd', *, exchange='ring', axis_name=None, feedback='auto',
      min_leaf_size=None, message_bytes=None, key=0, dither='shared')>
  """
  signature = inspect.signature(make)
  parameters = dict(signature.parameters)
  del parameters["options"]
  for name, parameter in inspect.signature(compress).parameters.items():
    if parameter.kind is parameter.KEYWORD_ONLY:
      parameters.setdefault(name, parameter.replace(annotation=parameter.empty))
  make.__dict__["__signature__"] = signature.replace(parameters=[*parameters.values()])
  return make


def checked(make: Callable[..., Any], options: _Options) -> _Options:
  """Returns the options that a recipe was given.

  Raises:
    TypeError: the recipe has no option of such a name.
  """
  names = inspect.signature(make).parameters
  for name in options.keys() - names:
    raise TypeError(
      f"`{name}` must be one of the arguments of {make.__name__}, which are "
      f"{', '.join(names)}."
    )
  return options
