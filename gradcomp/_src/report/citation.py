"""BibTeX entries of the methods that a transformation consists of."""

import contextlib
import dataclasses
import functools
import importlib.resources
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Any

import optax

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core.feedback import Feedback
from gradcomp._src.exchange.auto import Auto
from gradcomp._src.exchange.protocol import Exchange


def citation(optimizer: optax.GradientTransformation) -> str:
  r"""Returns BibTeX entries of the papers that the parts of an optimizer are from.

  Comments before each entry name the part, and where it departs from the paper. It
  finds parts in all that optimizers are built of, except factories in
  ``optax.inject_hyperparams``, and the choice of ``exchange="auto"``, which
  :func:`gradcomp.explain` names.

  A codec, an exchange or feedback of your own may have an attribute ``citations``, a
  tuple of pairs of a BibTeX entry and a text.

  Args:
    optimizer: an optax transformation with gradcomp's in it.

  Raises:
    ValueError: nothing of gradcomp's is found in ``optimizer``.

  Example:
    >>> tx = gradcomp.natural(axis_name="data", exchange="all_gather")
    >>> print(citation(tx))  # doctest: +ELLIPSIS
    % Without a paper: AllGather, NoFeedback.
    <BLANKLINE>
    % Natural. The exponent has 7 bits, and not 8: magnitudes go from 2**-62 to 2**63. A
    % probability of rounding up is a multiple of 2**-16.
    @misc{horvath2019natural,
      author = {Horv{\'a}th, Samuel and others},
      ...
  """
  lines: dict[str, list[str]] = {}
  without = []
  for part in _parts(optimizer):
    found = [*getattr(part, "citations", ())]
    names = [_name(part), *(kind.__name__ for kind in type(part).__mro__)]
    for paper in getattr(part, "papers", ()):
      key, slash, variant = paper.partition("/")
      bibtex, departures = _papers()[key]
      each = (departures.get(name + slash + variant) for name in names)
      found.append((bibtex, next(filter(None, each))))
    for bibtex, departure in found:
      lines.setdefault(bibtex, []).append(f"{_name(part)}. {departure}")
    if not found and isinstance(part, LeafCodec | Exchange | Auto | Feedback):
      without.append(_name(part))
  if not lines and not without:
    raise ValueError(
      "`optimizer` must hold a transformation of gradcomp's that can be found in it, "
      f"got {optimizer!r}; in place of optax.inject_hyperparams give the result of its "
      "factory, as gradcomp.qsgd(...)."
    )
  none = ", ".join(dict.fromkeys(without))
  first = {"": [f"Without a paper: {none}."]} if without else {}
  blocks = []
  for bibtex, texts in (first | lines).items():
    # Each text once, as comments. An @ would begin an entry.
    wrapped = (textwrap.wrap(x.replace("@", " at "), 86) for x in dict.fromkeys(texts))
    comments = "".join(f"% {line}\n" for part in wrapped for line in part)
    blocks.append(f"{comments}{bibtex}".rstrip("\n") + "\n")
  return "\n".join(blocks)


def _name(part: Any) -> str:
  """Returns the type of an object, or the function that has made an inner function."""
  return getattr(part, "__qualname__", type(part).__name__).partition(".")[0]


@functools.cache
def _papers() -> dict[str, tuple[str, dict[str, str]]]:
  """Returns BibTeX entries by their keys, each with the departures of our parts."""
  file = importlib.resources.files(__package__) / "papers.bib"
  text, papers = file.read_text("utf-8").replace("\n%   ", " "), {}
  for block in text.split("\n\n"):
    comments, _, entry = block.partition("@misc{")
    departures = dict(line[2:].split(": ", 1) for line in comments.splitlines())
    papers[entry.partition(",")[0]] = f"@misc{{{entry.rstrip()}", departures
  return papers


def _parts(optimizer: Any) -> Iterator[Any]:
  """Yields the objects and functions that a transformation holds, each of them once."""
  seen: dict[int, Any] = {}  # holds the objects, so that no other gets their number
  waiting = [optimizer]
  while waiting:
    part, held = waiting.pop(), list[Any]()
    if id(part) in seen:
      continue
    seen[id(part)] = part
    yield part
    if isinstance(part, types.FunctionType):
      for cell in part.__closure__ or ():
        # A name that its function has not set yet has no contents.
        with contextlib.suppress(ValueError):
          held.append(cell.cell_contents)
    elif isinstance(part, types.MethodType):
      held = [part.__func__, *getattr(part.__self__, "__dict__", {}).values()]
    elif isinstance(part, functools.partial):
      held = [part.func, part.args, part.keywords]
    elif isinstance(part, tuple | list | set | frozenset):
      held = [*part]
    elif isinstance(part, Mapping):
      held = [*part.values()]
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
      held = [getattr(part, field.name) for field in dataclasses.fields(part)]
    elif callable(part) and hasattr(part, "__wrapped__"):
      held = [part.__wrapped__]
    waiting += reversed(held)
