"""The public module of each public class and function."""

import inspect
from typing import Any

import optax

from gradcomp._src.checks import lists_static


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
