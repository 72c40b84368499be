"""Deliberate breaks of the library, each with the test that must catch it.

`make breaks`, or `python -m tests.breaks.run`, proves that the tests still see what
they should. The lists beside this file have one break for a law or promise, which is
its name. Each break is one edit of a definition and one test of plain `make test`. The
script copies the tracked files to a temporary folder, where it applies one edit after
the other and runs that test alone; the checkout stays as it is. It ends with 1 if a
test passes in spite of its break.
"""

import argparse
import ast
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent

_LONGEST = 240  # seconds that one break may take

# Of a run of tests. Without a verdict no test failed, and not all passed: an error of
# the collection or of a fixture, no test at all, or no time left.
Verdict = Literal["passed", "failed", "no verdict"]

_STRING = r"""[rbfu]{0,2}(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
_TOKEN = re.compile(rf"{_STRING}|\w+|\S", re.IGNORECASE)
_CLOSING = (")", "]", "}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Break:
  """One deliberate mistake.

  Attributes:
    law: the law or promise that no longer holds.
    at: the module and the definition that is edited, as "module:Class.method",
      "module:function" or "module:CONSTANT"; "module" alone for text outside of them.
    old: code that occurs in it exactly once, however its lines are broken.
    new: what takes its place. Its lines are indented as the first line of `old` is.
    catcher: the test that must fail, as pytest names it.
    cases: which of its cases, as for pytest's -k; all by default.
    optimize: whether it is compiled as users compile, as tests of `bits` are.
  """

  law: str
  at: str
  old: str
  new: str
  catcher: str
  cases: str = ""
  optimize: bool = False

  def path(self, root: Path) -> Path:
    """The file of the module below a folder."""
    path = root.joinpath(*self.at.partition(":")[0].split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

  def applied(self, root: Path) -> str:
    """The text of the edited file; ValueError where the edit does not fit."""
    text = self.path(root).read_text()
    found = [
      (start + match.start(), start + match.end())
      for start, stop in _spans(text, self.at.partition(":")[2])
      for match in re.finditer(_pattern(self.old), text[start:stop])
    ]
    if len(found) != 1:
      raise ValueError(f"`old` must occur once in {self.at}, got {len(found)} times.")
    [(start, stop)] = found
    line = text[text.rfind("\n", 0, start) + 1 : start]
    indent = line[: len(line) - len(line.lstrip())]
    edited = text[:start] + self.new.replace("\n", "\n" + indent) + text[stop:]
    if ast.dump(ast.parse(edited)) == ast.dump(ast.parse(text)):
      raise ValueError(f"`new` must change what {self.at} does.")
    return edited


def _spans(text: str, definition: str) -> list[tuple[int, int]]:
  """Finds where the definitions of a name begin and end; no name is the whole text."""
  if not definition:
    return [(0, len(text))]
  nodes: list[ast.AST] = [ast.parse(text)]
  for name in definition.split("."):
    children = [child for node in nodes for child in getattr(node, "body", [])]
    nodes = [child for child in children if name in _names(child)]
  lines = text.splitlines(keepends=True)
  place = lambda number: sum(map(len, lines[:number]))  # of the end of a line
  spans = []
  for node in nodes:
    decorators = getattr(node, "decorator_list", [])
    first = min(part.lineno for part in (node, *decorators))
    spans.append((place(first - 1), place(node.end_lineno)))
  return spans


def _names(statement: ast.stmt) -> list[str]:
  """The names that a statement defines: of a function, a class or constants."""
  targets = getattr(statement, "targets", [getattr(statement, "target", statement)])
  return [getattr(x, "id", getattr(x, "name", "")) for x in targets]


def _pattern(code: str) -> str:
  """A regular expression for code, however its lines are broken."""
  tokens = _TOKEN.findall(code)
  parts = []
  for token, after in zip(tokens, [*tokens[1:], ""], strict=True):
    if token == "," and after in _CLOSING:
      continue  # a comma that comes and goes with a line break
    part = re.sub(r"^\w+$", r"\\b\g<0>\\b", re.escape(token))
    parts.append(rf"(?:,\s*)?{part}" if token in _CLOSING else part)
  return r"\s*".join(parts)


def read(only: str = "") -> tuple[Break, ...]:
  """The breaks that have a text in their law, place or catcher.

  ValueError for a law that has two.
  """
  entries = [
    entry
    for path in sorted(LISTS.glob("*.toml"))
    for entry in tomllib.loads(path.read_text()).items()
  ]
  if len(dict(entries)) < len(entries):
    raise ValueError("A law must have one break.")
  breaks = (Break(law=law, **entry) for law, entry in entries)
  return tuple(x for x in breaks if any(only in y for y in (x.law, x.at, x.catcher)))


class Copy:
  """The tracked files as they are in the checkout, in a folder where tests can run."""

  def __init__(self, folder: Path, longest: float = _LONGEST):
    self.root, self.longest = folder, longest
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0"):
      if name and (ROOT / name).exists():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    # An edit may leave a file's size and second as they were: Python would take the
    # bytecode that it has kept for that of the edited file.
    own = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    self._env = {**os.environ, **own}
    code = "import gradcomp; print(gradcomp.__file__)"
    _, text = self._run([sys.executable, "-c", code], longest)
    if not text.startswith(str(folder)):
      raise RuntimeError(f"The tests would not import the copy, but {text}")

  @contextlib.contextmanager
  def changed(self, path: Path, text: str) -> Iterator[None]:
    """Gives a file another text for as long as a body runs."""
    whole = path.read_text()
    path.write_text(text)
    try:
      yield
    finally:
      path.write_text(whole)

  def test(
    self, catchers: Sequence[str], cases: str, optimize: bool
  ) -> tuple[Verdict, str]:
    """Runs tests: what came of it, and what was printed."""
    report = self.root / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--junitxml={report}"]
    options += [*catchers, *(["-k", cases] if cases else [])]
    command = [sys.executable, "-m", "pytest", *options, *["--optimize"] * optimize]
    code, text = self._run(command, self.longest * len(catchers))
    if not report.exists():  # as after an error of usage, or in time
      return "no verdict", text
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    kinds = ("tests", "skipped", "errors", "failures")
    tests, skipped, errors, failures = (int(suite.attrib[kind]) for kind in kinds)
    if failures:
      return "failed", text
    ran = tests > skipped and not errors
    return "passed" if code == pytest.ExitCode.OK and ran else "no verdict", text

  def _run(self, command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """The exit code, None where the time was up, and all that was printed."""
    process = subprocess.Popen(
      command,
      cwd=self.root,
      env=self._env,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
    )
    try:
      text, _ = process.communicate(timeout=seconds)
      return process.returncode, text
    except subprocess.TimeoutExpired:
      return None, f"stopped after {seconds} seconds"
    finally:
      if process.poll() is None:  # with what the tests have started
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def unbroken(copy: Copy, breaks: Sequence[Break]) -> dict[tuple[str, str, bool], str]:
  """The tests that do not pass without a break, and what pytest printed.

  Tests of which all cases are run share a process, which spares the imports.
  """
  wrong = {}
  for how in sorted({(case.cases, case.optimize) for case in breaks}):
    same = [case for case in breaks if (case.cases, case.optimize) == how]
    catchers = sorted({case.catcher for case in same})
    if copy.test(catchers, *how)[0] == "passed":
      continue
    for catcher in catchers:
      verdict, text = copy.test([catcher], *how)
      if verdict != "passed":
        wrong[catcher, *how] = text
  return wrong


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  add = parser.add_argument
  add(
    "--only",
    default="",
    metavar="TEXT",
    help="those with this in law, place or catcher",
  )
  add("--share", nargs=2, type=int, default=(0, 1), metavar=("K", "N"))
  add("--list", action="store_true", help="run nothing, but look whether edits apply")
  add("--verbose", action="store_true", help="show what pytest prints")
  return parser.parse_args()


def main() -> int:
  options = arguments()
  first, step = options.share
  breaks = read(options.only)[first::step]
  problems = {}
  for case in breaks:
    try:
      case.applied(ROOT)
    except (OSError, SyntaxError, ValueError) as error:
      problems[case] = f"does not apply: {error}"
  if not options.list:
    with tempfile.TemporaryDirectory(prefix="gradcomp-breaks-") as folder:
      run(Path(folder).resolve(), breaks, problems, options.verbose)
  for case, wrong in problems.items():
    print(f"{wrong}: {case.law}: {case.catcher} {case.cases}")
  what = "apply" if options.list else "were caught"
  print(f"{len(breaks) - len(problems)} of {len(breaks)} breaks {what}.")
  return 0 if breaks and not problems else 1


def run(
  folder: Path, breaks: Sequence[Break], problems: dict[Break, str], verbose: bool
) -> None:
  """Applies one break after the other, and adds what is wrong."""
  copy = Copy(folder)
  failing = unbroken(copy, breaks)
  for number, case in enumerate(breaks, start=1):
    start, text = time.monotonic(), ""
    tested = case.catcher, case.cases, case.optimize
    if tested in failing:
      problems[case] = "does not pass without a break"
      text = failing[tested]
    elif case not in problems:
      with copy.changed(case.path(copy.root), case.applied(copy.root)):
        verdict, text = copy.test([case.catcher], case.cases, case.optimize)
      if verdict != "failed":
        problems[case] = "SURVIVED" if verdict == "passed" else verdict
    wrong = problems.get(case, "ok")
    spent = f"{time.monotonic() - start:.0f} s"
    print(f"[{number}/{len(breaks)}] {wrong}: {case.law}, {spent}", flush=True)
    if verbose or case in problems:
      print(text)


if __name__ == "__main__":
  sys.exit(main())
