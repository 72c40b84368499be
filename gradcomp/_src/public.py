"""The public module of each public class and function."""

import inspect
from typing import Any


def publish(names: dict[str, Any]) -> None:
  """Sets ``__module__`` of the classes and functions that no public module has yet.

  So pickles, messages and pages name ``gradcomp.codecs.QSGD``, wherever its file lies.
  ``names`` are the ``globals()`` of the public module.
  """
  for name in names["__all__"]:
    value = names.get(name)
    public = inspect.isclass(value) or inspect.isfunction(value)
    private = ("gradcomp._src.", "gradcomp.contrib._")
    if public and value.__module__.startswith(private):
      value.__module__ = names["__name__"]
