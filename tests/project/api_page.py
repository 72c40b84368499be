"""The page of all public names, docs/api/README.md, from the package.

``python -m tests.project.api_page`` writes it anew. A name is public if neither it nor
the way to it begins with an underscore. The first sentence of its docstring says what
it is.
"""

import importlib
import inspect
import pkgutil
import re
from types import ModuleType
from typing import Literal, get_args, get_origin

import gradcomp
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "api" / "README.md"
INTRODUCTION = """\
# Public names

All other names begin with an underscore, or lie in a folder whose name does, and may
change. `help(gradcomp.qsgd)` explains the arguments of a name.
`python -m tests.project.api_page` writes this page from the package."""


def line(value):
  """The first sentence of a docstring, the choices of a type, or that of a constant."""
  if get_origin(value) is Literal:
    text = f"One of {', '.join(map(repr, get_args(value)))}."
  elif inspect.isclass(value):
    text = vars(value).get("__doc__")
  elif isinstance(value, ModuleType) or callable(value):
    text = inspect.getdoc(value)
  else:
    text = f"A constant: {type(value).__name__}."
  text = (text or "").strip().partition("\n\n")[0].replace("\n", " ")
  return re.sub(r":\w+:`([^`]+)`", r"`\1`", text).replace("|", r"\|")


def names(module):
  """The names that a namespace hands out, in alphabetical order."""
  public = getattr(module, "__all__", None)
  if public is None:  # what the module, or the folder, defines
    here = {x: getattr(y, "__module__", None) or "" for x, y in vars(module).items()}
    public = [x for x, home in here.items() if home.startswith(module.__name__)]
  found = {x: getattr(module, x) for x in public if not x.startswith("_")}
  return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def namespaces(path="gradcomp", module=gradcomp):
  """Yields the paths of public modules, and the modules."""
  yield path, module
  if module is gradcomp:
    for found in pkgutil.iter_modules(gradcomp.__path__, "gradcomp."):
      if not found.name.startswith("gradcomp._"):
        yield from namespaces(found.name, importlib.import_module(found.name))
  else:
    for name in getattr(module, "__all__", ()):
      if isinstance(inner := getattr(module, name), ModuleType):
        yield from namespaces(f"{path}.{name}", inner)


def page():
  lines = [INTRODUCTION]
  for path, module in namespaces():
    lines += ["", f"## {path}", "", line(module)]
    found = {x: y for x, y in names(module).items() if not isinstance(y, ModuleType)}
    if found:
      lines += ["", "| name | |", "| --- | --- |"]
      lines += [f"| `{name}` | {line(value)} |" for name, value in found.items()]
  return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
  PAGE.write_text(page())
