"""First lines of docstrings: which words they refuse, and which form they have."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradcomp

PACKAGE = Path(gradcomp.__file__).resolve().parent

# Each stands for a clause without a noun, or for a word that the field does not use.
REFUSED = (
  "what",
  "whose",
  "of which",
  "so many",
  "as many",
  "tells",
  "told",
  "says",
  "waits",
  "alone",
  "alike",
  "besides",
  "shall",
  "the same for",
  "for nobody",
  "those of",
  "that of",
)
_REFUSED = re.compile(rf"(?<![-\w])({'|'.join(REFUSED)})(?![-\w])", re.IGNORECASE)
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
  """Yields the line number and the text of each docstring of a module."""
  for node in ast.walk(tree):
    if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)) is not None:
      yield node.body[0].lineno, text


def defects(first: str) -> list[str]:
  """Lists the rules that the first paragraph of a docstring breaks."""
  found = [f"refuses '{word}'" for word in _REFUSED.findall(first)]
  if "\n" in first:
    found.append("does not fit one line")
  if not first.endswith("."):
    found.append("does not end with a full stop")
  return found


def test_first_lines_name_things_in_the_words_of_the_field() -> None:
  kernels = (PACKAGE / "_src/kernels").resolve()
  assert kernels.is_dir()
  broken = [
    f"{path}:{line}: {', '.join(why)}: {text.splitlines()[0]}"
    for path in sorted({*PACKAGE.rglob("*.py"), *kernels.rglob("*.py")})
    for line, text in documented(ast.parse(path.read_text(encoding="utf-8")))
    if (why := defects(text.split("\n\n")[0]))
  ]
  assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
  ("first", "count"),
  [
    ("Returns the new residual.", 0),
    ("Returns what was not sent.", 1),
    ("Returns the bits.\nOf two lines.", 1),
    ("Returns the bits", 1),
    ("Tells whose bits these are", 3),
    ("A stand-alone network, and somewhat more.", 0),
  ],
)
def test_a_defect_is_named(first: str, count: int) -> None:
  assert len(defects(first)) == count
