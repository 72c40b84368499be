"""Methods that are not proven yet.

A method enters with one file in this folder, one test that calls
``gradcomp.testing.check_codec`` or ``check_transformation``, and a docstring that names
its paper.
"""

import importlib
import pkgutil
from types import ModuleType

# The files of this folder, each imported at its first use.
__all__ = sorted(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> ModuleType:
  if name in __all__:
    return importlib.import_module(f"{__name__}.{name}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return __all__
