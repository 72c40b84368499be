"""The tree of gradcomp/ in docs/inside/architecture.md, from the docstrings of folders.

``python -m tests.project.architecture_page`` writes it anew.
"""

import ast
import re

from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "inside" / "architecture.md"
TREE = re.compile(r"(?<=<!-- tree -->\n\n```text\n).*?(?=```\n)", re.S)


def first_line(file):
  return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def entries(folder, depth):
  """Yields the indented name and the first line of each package in a folder."""
  for inner in sorted(x.parent for x in folder.glob("*/__init__.py")):
    yield f"{'  ' * depth}{inner.name}/", first_line(inner / "__init__.py")
    if depth < 3:
      yield from entries(inner, depth + 1)


def written(page):
  """Returns the page with the public modules, and the folders of _src two deep."""
  package = ROOT / "gradcomp"
  files = [x for x in sorted(package.glob("*.py")) if not x.name.startswith("_")]
  lines = [(f"{package.name}/", first_line(package / "__init__.py"))]
  lines += [(f"  {file.name}", first_line(file)) for file in files]
  lines += entries(package, 1)
  width = max(len(name) for name, _ in lines) + 2
  found = "".join(f"{name:{width}}{said}".rstrip() + "\n" for name, said in lines)
  return TREE.sub(lambda _: found, page)


if __name__ == "__main__":
  PAGE.write_text(written(PAGE.read_text()))
