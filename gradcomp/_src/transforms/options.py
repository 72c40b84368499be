"""The options that every recipe shares with ``compress``, and the help of recipes."""

import inspect
import re
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core.compression import Dither
from gradcomp._src.core.feedback import Feedback, FeedbackName
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange.auto import Auto, ExchangeName
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh.axes import AxisName


class ExchangeOptions(TypedDict, total=False):
  """The options of recipes with feedback of their own: no ``feedback`` among them."""

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
      gradients are unreduced over. None takes these from the type, if no residual is
      kept. Elsewhere None exchanges nothing, and returns ``Q(g + e)``. Default: None.
    exchange: who sends what to whom: ``"auto"``, ``"all_gather"``, ``"two_shot"``,
      ``"ring"``, ``"hierarchical"``, ``"psum"`` (dense float32, and codecs that share
      their scale) or ``"local"``. An object in its place has options, like
      ``gradcomp.exchange.TwoShot(feedback=False)`` and
      ``gradcomp.exchange.Hierarchical(group_size=8)``. ``"auto"`` chooses by codec,
      sizes and workers: see :func:`gradcomp.exchange.choose`. ``"local"`` exchanges
      nothing: outputs differ between workers, and under Explicit axes stay unreduced.
      Default: ``"auto"``.
    feedback: ``"error"``, or :class:`gradcomp.ErrorFeedback`, keeps what was not sent,
      ``e' = g + e - Q(g + e)``, and adds it to the next gradient. None does not.
      ``"momentum"``, or :class:`gradcomp.MomentumFeedback`, does so with a momentum of
      each worker's gradients in place of the gradient. ``"auto"`` is ``"error"`` for
      biased codecs, and None for others. Default: ``"auto"``.
    min_leaf_size: elements, 0 or more: leaves with fewer travel in float32, in the same
      message, or in one of their own where sums of codes are exact. With None these are
      the smallest leaves that together hold less than 0.5 % of all elements, or 0.01 %
      with a sparse codec. Default: None.
    message_bytes: the largest payload in bytes that leaves share, 0 or more; None for
      one message. Several messages can be on their way before the whole backward pass
      is done. A leaf is never cut. Default: None.
    key: a seed of at most 64 bits, or a threefry key, of random rounding and random
      choices, equal on all workers. The bits of a step derive from key, step, the
      leaf's path in the tree and worker alone. Default: 0.
    dither: ``"shared"``: all workers round by the same random bits, which each changes
      by a constant of its own, so that their errors cancel. The error of the mean then
      has half the variance, at the same bytes, and each worker's rounding stays
      unbiased: see docs/inside/wire-format.md. ``"independent"``: each worker draws
      bits of its own, for comparison. Default: ``"shared"``.
  """

  feedback: FeedbackName | Feedback | None


_Recipe = TypeVar("_Recipe", bound=Callable[..., Any])
_Options = TypeVar("_Options", bound=ExchangeOptions)

_RETURNS = """\
Returns:
  A gradient transformation, as :func:`gradcomp.compress` returns it; its state is a
  :class:`gradcomp.state.CompressState`.
"""


def recipe(codec: type[LeafCodec]) -> Callable[[_Recipe], _Recipe]:
  """Completes the signature and the docstring of a recipe.

  The signature shows options by name in the place of ``**options``:
  ``optax.inject_hyperparams`` reads it, and passes each argument by its name. Types of
  the options are left out, so that ``help`` stays short.

  The docstring gets an entry of ``Args`` for each argument: the recipe's own, or else
  that of the codec's attribute or the option of that name.

  Args:
    codec: the class whose attributes arguments of the recipe set.

  Example:
    >>> @recipe(gradcomp.codecs.QSGD)
    ... def plain(bits=4, *, exchange="ring", **options):
    ...   "Averages gradients."
    >>> inspect.signature(plain)
    <Signature (bits=4, *, exchange='ring', axis_name=None, feedback='auto',
      min_leaf_size=None, message_bytes=None, key=0, dither='shared')>
    >>> print(plain.__doc__[:88])
    Averages gradients.
    <BLANKLINE>
    Args:
      bits: bits of a code, 1 to 8 or 16; with ``sign_magnitude``
  """

  def complete(make: _Recipe) -> _Recipe:
    names = _show_options(make)
    make.__doc__ = _completed(inspect.getdoc(make) or "", names, codec)
    return make

  return complete


def _show_options(make: Callable[..., Any]) -> list[str]:
  """Completes the signature of a recipe, and returns the names of its arguments."""
  signature = inspect.signature(make)
  parameters = dict(signature.parameters)
  del parameters["options"]
  for name, parameter in inspect.signature(compress).parameters.items():
    if parameter.kind is parameter.KEYWORD_ONLY:
      parameters.setdefault(name, parameter.replace(annotation=parameter.empty))
  make.__dict__["__signature__"] = signature.replace(parameters=[*parameters.values()])
  return [*parameters]


def _completed(text: str, names: list[str], codec: type[LeafCodec]) -> str:
  """Returns a docstring with an entry of ``Args`` for each name, and ``Returns``."""
  body, *sections = re.split(r"\n\n(?=[A-Z][a-z]+:\n)", text)
  titled = {section.partition(":\n")[0]: section for section in sections}
  entries = {
    **_entries(inspect.getdoc(CompressOptions) or "", "Attributes"),
    **_entries(inspect.getdoc(codec) or "", "Attributes"),
    **_entries(text, "Args"),
  }
  listed = "".join(entries[name] for name in names if name in entries)
  titled["Args"] = "Args:\n" + listed
  titled.setdefault("Returns", _RETURNS)
  first = ("Args", "Returns")
  order = [*first, *(title for title in titled if title not in first)]
  return "\n\n".join([body, *(titled[title].rstrip() for title in order)]) + "\n"


def _entries(text: str, title: str) -> dict[str, str]:
  r"""Returns the entries of a section of a docstring by name, each with its lines.

  Example:
    >>> _entries("Does.\n\nArgs:\n  a: one.\n    More.\n  b: two.", "Args")
    {'a': '  a: one.\n    More.\n', 'b': '  b: two.\n'}
  """
  _, _, section = f"\n{text}\n".partition(f"\n{title}:\n")
  section = section.partition("\n\n")[0].rstrip("\n") + "\n"
  return {
    entry[1]: entry[0]
    for entry in re.finditer(r"^  (\w+): .*\n(?:    .*\n)*", section, re.M)
  }


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
