"""Deliberate breaks of the library, each with the test that must catch it.

`make breaks`, or `python -m tests.breaks.run`, copies the tracked files to a temporary
folder, where it applies one break after the other and runs its test alone: a test of
plain `make test`. It ends with 1 if one passes in spite of its break. The lists beside
this file have one break for a law or promise, which is its name.
"""

import argparse
import ast
import contextlib
import dataclasses
import itertools
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
Ran = tuple[Literal["passed", "failed", "no verdict"], str]
Failing = dict[tuple[str, str, bool], str]  # what pytest printed of tests

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
    nodes = [child for child in children if name in names(child)]
  ends = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
  first = lambda x: min(y.lineno for y in (x, *getattr(x, "decorator_list", ())))
  return [(ends[first(node) - 1], ends[node.end_lineno]) for node in nodes]


def names(statement: ast.stmt) -> list[str]:
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
  """The breaks that have a text in their law, place or catcher."""
  lists = [tomllib.loads(path.read_text()) for path in sorted(LISTS.glob("*.toml"))]
  breaks = [Break(law=law, **entry) for x in lists for law, entry in x.items()]
  if len({x.law for x in breaks}) < len(breaks):
    raise ValueError("A law must have one break.")
  return tuple(x for x in breaks if only in f"{x.law}\n{x.at}\n{x.catcher}")


def git(*arguments: str) -> str:
  command = ["git", "-C", str(ROOT), *arguments]
  return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Copy:
  """The tracked files as they are in the checkout, in a folder where tests can run."""

  def __init__(self, folder: Path, longest: float = _LONGEST):
    self.root, self.longest = folder, longest
    for name in git("ls-files", "-z").split("\0"):
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

  def test(self, catchers: Sequence[str], cases: str, optimize: bool) -> Ran:
    """Runs tests: what came of it, and what was printed."""
    report = self.root / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--junitxml={report}"]
    options += ["-k", cases] * bool(cases) + ["--optimize"] * optimize
    command = [sys.executable, "-m", "pytest", *options, *catchers]
    code, text = self._run(command, self.longest * len(catchers))
    if not report.exists():  # as after an error of usage, or in time
      return "no verdict", text
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    of = lambda kind: int(suite.attrib[kind])
    if of("failures"):
      return "failed", text
    ran = of("tests") > of("skipped") and not of("errors")
    return "passed" if code == pytest.ExitCode.OK and ran else "no verdict", text

  def _run(self, command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """The exit code, None where the time was up, and all that was printed."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    place = dict(cwd=self.root, env=self._env, start_new_session=True)
    process = subprocess.Popen(command, **place, **pipes)
    try:
      text, _ = process.communicate(timeout=seconds)
      return process.returncode, text
    except subprocess.TimeoutExpired:
      return None, f"stopped after {seconds} seconds"
    finally:
      if process.poll() is None:  # with what the tests have started
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def unbroken(copy: Copy, breaks: Sequence[Break]) -> Failing:
  """The tests that do not pass without a break; those of one way share a process."""
  wrong: Failing = {}
  for how in sorted({(case.cases, case.optimize) for case in breaks}):
    catchers = {x.catcher for x in breaks if (x.cases, x.optimize) == how}
    if copy.test(sorted(catchers), *how)[0] != "passed":
      each = {(catcher, *how): copy.test([catcher], *how) for catcher in catchers}
      wrong |= {x: text for x, (verdict, text) in each.items() if verdict != "passed"}
  return wrong


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  add = parser.add_argument
  add("--only", default="", metavar="TEXT", help="those with this in law or catcher")
  add("--share", nargs=2, type=int, default=(0, 1), metavar=("K", "N"))
  add("--verbose", action="store_true", help="show what pytest prints")
  return parser.parse_args()


def main() -> int:
  options = arguments()
  first, step = options.share
  breaks = read(options.only)[first::step]
  problems = {}
  with tempfile.TemporaryDirectory(prefix="gradcomp-breaks-") as folder:
    copy = Copy(Path(folder).resolve())
    failing = unbroken(copy, breaks)
    for number, case in enumerate(breaks, start=1):
      start = time.monotonic()
      wrong, text = tried(copy, case, failing)
      if wrong:
        problems[case] = wrong
      spent = f"{time.monotonic() - start:.0f} s"
      told = f"{wrong or 'ok'}: {case.law}, {spent}"
      print(f"[{number}/{len(breaks)}] {told}", flush=True)
      if options.verbose or wrong:
        print(text)
  for case, wrong in problems.items():
    print(f"{wrong}: {case.law}: {case.catcher} {case.cases}")
  print(f"{len(breaks) - len(problems)} of {len(breaks)} breaks were caught.")
  return 0 if breaks and not problems else 1


def tried(copy: Copy, case: Break, failing: Failing) -> tuple[str, str]:
  """Applies a break: what is wrong, "" if it was caught, and what pytest printed."""
  tested = case.catcher, case.cases, case.optimize
  if tested in failing:
    return "does not pass without a break", failing[tested]
  try:
    text = case.applied(copy.root)
  except (OSError, SyntaxError, ValueError) as error:
    return f"does not apply: {error}", ""
  with copy.changed(case.path(copy.root), text):
    verdict, text = copy.test([case.catcher], case.cases, case.optimize)
  return {"failed": "", "passed": "SURVIVED"}.get(verdict, verdict), text


if __name__ == "__main__":
  sys.exit(main())
