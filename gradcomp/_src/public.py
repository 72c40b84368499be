"""The public module of each public class and function, and refusals of factories."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import optax


def publish(names: dict[str, Any]) -> None:
  """Sets ``__module__`` of the classes and functions that no public module has yet.

  So pickles, messages and pages name ``gradcomp.codecs.QSGD``, wherever its file lies.
  ``names`` are the ``globals()`` of the public module. Errors of those that make a
  transformation list all arguments that ``optax.inject_hyperparams`` must not trace.
  """
  for name in names["__all__"]:
    value = names.get(name)
    public = inspect.isclass(value) or inspect.isfunction(value)
    private = ("gradcomp._src.", "gradcomp.contrib._")
    if public and value.__module__.startswith(private):
      value.__module__ = names["__name__"]
    if inspect.isfunction(value) and _makes(value):
      names[name] = lists_static(value)


def _makes(value: Any) -> bool:
  """Returns True for a function that makes a transformation."""
  returned = value.__annotations__.get("return")
  return inspect.isclass(returned) and issubclass(
    returned, optax.GradientTransformation
  )


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
