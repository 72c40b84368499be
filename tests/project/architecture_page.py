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


def folders(folder):
  """The packages in a folder, in alphabetical order."""
  return [x for x in sorted(folder.iterdir()) if (x / "__init__.py").exists()]


def entries(folder, depth, most):
  """Yields the indented name and the first line of each package in a folder."""
  for inner in folders(folder):
    yield f"{'  ' * depth}{inner.name}/", first_line(inner / "__init__.py")
    if depth < most:
      yield from entries(inner, depth + 1, most)


def tree(package=ROOT / "gradcomp"):
  """The public modules, and the folders of _src two levels deep."""
  files = [x for x in sorted(package.glob("*.py")) if not x.name.startswith("_")]
  lines = [(f"{package.name}/", first_line(package / "__init__.py"))]
  lines += [(f"  {file.name}", first_line(file)) for file in files]
  lines += entries(package, 1, 3)
  width = max(len(name) for name, _ in lines) + 2
  return "".join(f"{name:{width}}{said}".rstrip() + "\n" for name, said in lines)


def written(page):
  """Returns the page with the tree as it is."""
  found = tree()
  return TREE.sub(lambda _: found, page)


if __name__ == "__main__":
  PAGE.write_text(written(PAGE.read_text()))
