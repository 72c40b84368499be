"""The public module, the help, papers and refusals of classes and functions."""

import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import optax

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Options = TypeVar("_Options", bound=typing.Mapping[str, Any])


def publish(names: dict[str, Any]) -> None:
  """Sets ``__module__`` of the classes and functions that no public module has yet.

  So pickles, messages and pages name ``gradcomp.codecs.QSGD``, wherever its file lies.
  ``names`` are the ``globals()`` of the public module. A function that makes a
  transformation names, in its error, all arguments that ``optax.inject_hyperparams``
  must not trace.
  """
  for name in names["__all__"]:
    value = names.get(name)
    public = inspect.isclass(value) or inspect.isfunction(value)
    private = ("gradcomp._src.", "gradcomp.contrib._")
    if public and value.__module__.startswith(private):
      value.__module__ = names["__name__"]
    returned: Any = inspect.isfunction(value) and value.__annotations__.get("return")
    is_class = inspect.isclass(returned)
    if is_class and issubclass(returned, optax.GradientTransformation):
      names[name] = lists_static(value)


def cites(*papers: str) -> Callable[[_Function], _Function]:
  """Names the papers of a transformation at its ``update`` function, by their keys."""

  def mark(function: _Function) -> _Function:
    function.__dict__["papers"] = papers
    return function

  return mark


class StaticError(ValueError):
  """An array in the place of an argument that a trace must know."""

  def __init__(self, name: str, rule: str, cure: str = "", names: tuple[str, ...] = ()):
    super().__init__(
      f"`{name}` must be {rule}, and known when a program is traced, got an array; "
      f"{cure}with optax.inject_hyperparams, name all such arguments: "
      f"static_args={names or (name,)}."
    )
    self.given = name, rule, cure


@functools.cache  # a function that two modules publish stays one
def lists_static(make: Callable[..., Any]) -> Callable[..., Any]:
  """Wraps a factory: its error for one such argument lists all of them."""
  signature = inspect.signature(make)

  @functools.wraps(make)
  def listed(*args: Any, **kwargs: Any) -> Any:
    try:
      return make(*args, **kwargs)
    except StaticError as error:
      names, first = [error.given[0]], error
    given = signature.bind(*args, **kwargs)
    # Each array is replaced by a default, until nothing else is missing.
    while names[-1] in given.arguments:
      default = signature.parameters[names[-1]].default
      given.arguments[names[-1]] = 1 if default is inspect.Parameter.empty else default
      try:
        make(*given.args, **given.kwargs)
      except StaticError as error:
        names.append(error.given[0])
      except (TypeError, ValueError):
        break
      else:
        break
    raise StaticError(*first.given, tuple(names)) from None

  return listed


_BREAK = r"\n\n(?=[A-Z][a-z]+:\n)"  # before a section
_ENTRY = r"^  (\w+): .*\n(?:    .*\n)*"  # the lines of a name in it
_SHARED = ("Returns", "Raises", "References")


def shows_options(
  function: _Function, defaults: Callable[..., Any], *texts: str
) -> _Function:
  """Names each option in a function's help, in the place of ``**options``.

  Their type is a TypedDict, and ``defaults`` a function of them. ``texts`` are
  docstrings: the last with an argument or a section that the function lacks gives it.
  """
  signature = inspect.signature(function)
  shown = dict(signature.parameters)
  name, _ = shown.popitem()
  (options,) = typing.get_args(typing.get_type_hints(function)[name])
  names = typing.get_type_hints(options)
  for name, parameter in inspect.signature(defaults).parameters.items():
    if name in names:  # without types, for a short help
      shown.setdefault(name, parameter.replace(annotation=parameter.empty))
  function.__dict__["__signature__"] = signature.replace(parameters=[*shown.values()])
  text = inspect.getdoc(function) or ""
  titled: dict[str, str] = {}
  entries: dict[str, str] = {}
  for source in (*map(inspect.cleandoc, texts), text):
    for section in re.split(_BREAK, f"\n\n{source}")[1:]:
      title = section.partition(":\n")[0]
      if source is text or title in _SHARED:
        titled[title] = section.rstrip()
      if title in ("Args", "Attributes"):
        found = re.finditer(_ENTRY, f"{section.rstrip()}\n", re.M)
        entries |= {entry[1]: entry[0] for entry in found}
  listed = "".join(entries[name] for name in shown if name in entries)
  titled["Args"] = f"Args:\n{listed}".rstrip()
  order = ("Args", "Returns", "Raises", "Example", "References")
  parts = [re.split(_BREAK, text)[0], *(titled[x] for x in order if x in titled)]
  function.__doc__ = "\n\n".join(parts) + "\n"
  return function


def checked(function: Callable[..., Any], options: _Options) -> _Options:
  """Returns the options that a function was given; TypeError for another name."""
  names = inspect.signature(function).parameters
  for name in options.keys() - names:
    raise TypeError(
      f"`{name}` must be one of the arguments of {function.__name__}, which are "
      f"{', '.join(names)}."
    )
  return options


def arguments(function: Callable[..., Any], given: typing.Mapping[str, Any]) -> Any:
  """Returns a function's arguments and options, by its ``locals()`` at the first line.

  Options that it was not given have their defaults; TypeError for an unknown one.
  """
  shown = inspect.signature(function).parameters.values()
  told = {parameter.name: parameter.default for parameter in shown}
  own = {name: value for name, value in given.items() if name != "options"}
  return told | own | checked(function, given["options"])
