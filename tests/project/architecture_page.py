"""Writes the tree of architecture.md: python -m tests.project.architecture_page."""

import ast
import re
import textwrap

from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "inside" / "architecture.md"
TREE = re.compile(r"(?<=<!-- tree -->\n\n```text\n).*?(?=```\n)", re.S)


def first_line(file):
  return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def entries(folder, depth=0):
  """Yields the indented name and the first line of a package and of those inside."""
  yield f"{'  ' * depth}{folder.name}/", first_line(folder / "__init__.py")
  for file in [] if depth else sorted(folder.glob("[!_]*.py")):
    yield f"  {file.name}", first_line(file)
  for inner in sorted(folder.glob("*/__init__.py")) if depth < 3 else ():
    yield from entries(inner.parent, depth + 1)


def written(page):
  """Returns the page with the public modules, and the folders of _src two deep."""
  lines = [*entries(ROOT / "gradcomp")]
  width = max(len(name) for name, _ in lines) + 2
  wrap = textwrap.TextWrapper(88, subsequent_indent=" " * width)
  found = "".join(wrap.fill(f"{x:{width}}{said}") + "\n" for x, said in lines)
  return TREE.sub(lambda _: found, page)


if __name__ == "__main__":
  PAGE.write_text(written(PAGE.read_text()))
