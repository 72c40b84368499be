"""The public module of each public class."""

import inspect
from typing import Any


def publish(names: dict[str, Any]) -> None:
  """Sets ``__module__`` of the classes that a public module hands out first.

  So pickles and messages name ``gradcomp.codecs.QSGD``, wherever its file lies.

  Args:
    names: the ``globals()`` of the public module.
  """
  for name in names["__all__"]:
    value = names.get(name)
    if inspect.isclass(value) and value.__module__.startswith("gradcomp._src."):
      value.__module__ = names["__name__"]
