"""Runs the code blocks of a Markdown page."""

import doctest
import pathlib
import re
import textwrap
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
_FENCE = re.compile(r" *```(.*)")


class Block(NamedTuple):
  """A fenced block: its first line, counted from 1, its language, and its code."""

  line: int
  language: str
  text: str


def read(page: pathlib.Path) -> tuple[list[Block], list[tuple[int, str]]]:
  """The fenced blocks of a page, and its other lines with their numbers."""
  blocks: list[Block] = []
  prose: list[tuple[int, str]] = []
  code: list[str] | None = None
  language, start = "", 0
  for number, line in enumerate(page.read_text().splitlines(), 1):
    fence = _FENCE.fullmatch(line)
    if code is None and fence:
      code, language, start = [], fence[1], number + 1
    elif code is None:
      prose.append((number, line))
    elif fence and not fence[1]:
      text = textwrap.dedent("".join(f"{line}\n" for line in code))
      blocks.append(Block(start, language, text))
      code = None
    else:
      code.append(line)
  if code is not None:
    raise ValueError(f"{page}:{start - 1}: nothing closes this fence")
  return blocks, prose


def run(page: pathlib.Path) -> dict[str, Any]:
  """Runs the Python blocks and doctests of a page in one namespace, and returns it."""
  names: dict[str, Any] = {"__name__": "__main__"}
  for block in read(page)[0]:
    if block.language == "python":
      code = "\n" * (block.line - 1) + block.text
      exec(compile(code, str(page), "exec"), names)
    elif block.language == "pycon":
      _check(page, block, names)
  return names


def _check(page: pathlib.Path, block: Block, names: dict[str, Any]) -> None:
  parser = doctest.DocTestParser()
  test = parser.get_doctest(block.text, names, page.name, str(page), block.line - 1)
  failures: list[str] = []
  runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
  runner.run(test, out=failures.append, clear_globs=False)
  if failures:
    raise AssertionError("".join(failures))
  names.update(test.globs)
