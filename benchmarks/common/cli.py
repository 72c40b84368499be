"""Lets a script run quickly, write its results, and say why it cannot run here."""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).parents[2]  # of the tree that the script belongs to
RESULTS = ROOT / "benchmarks" / "results"
SKIPPED = 77  # the exit status of a skipped test for Automake and Meson


def parser(
  doc: str, quick: str = "", output: str | Path = ""
) -> argparse.ArgumentParser:
  """Makes a script's parser, with ``--quick`` and ``--output`` where they have help.

  The help of ``--output`` may be the path that it has by default.
  """
  made = argparse.ArgumentParser(
    description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  if quick:
    text = f"{quick}: a test of seconds, whose results go only where --output says"
    made.add_argument("--quick", action="store_true", help=text)
  if isinstance(output, Path):
    output = f"default: {output.relative_to(ROOT)}{', if not --quick' * bool(quick)}"
  if output:
    made.add_argument("--output", type=Path, help=output)
  return made


class Option(NamedTuple):
  """An option of a script: by default, with ``--quick``, and in ``--help``.

  Without a quick value it stays as it is. A list takes several values.
  """

  default: Any
  quick: Any = None
  help: str = ""
  choices: Iterable[str] | None = None


def options(
  doc: str, quick: str, output: str, *, argv: list[str] | None = None, **named: Option
) -> argparse.Namespace:
  """Parses the command line of a script; a quick run compiles fast."""
  made = parser(doc, quick, output)
  for name, x in named.items():
    several = isinstance(x.default, list)
    kind = type(x.default[0] if several else x.default)
    given: dict[str, Any] = {"type": kind, "choices": x.choices}
    given |= {"nargs": "+"} if several else {}
    if x.default is False:
      given = {"action": "store_true"}
    shown = "all" if several and x.choices else "%(default)s"
    text = "; ".join(filter(None, [x.help, x.default and f"default: {shown}"]))
    flag = f"--{name.replace('_', '-')}"
    made.add_argument(flag, default=x.default, help=text, **given)
  found = made.parse_args(argv)
  if found.quick:
    vars(found).update({k: x.quick for k, x in named.items() if x.quick is not None})
    compile_fast()
  return found


def compile_fast() -> None:
  """Leaves optimizations out, here and in processes that this one starts."""
  os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
  if jax := sys.modules.get("jax"):
    jax.config.update("jax_disable_most_optimizations", True)


def module(name: str, *options: str) -> list[str]:
  """Returns the command line that runs a module of this tree, see ``path``."""
  return [sys.executable, "-W", "ignore", "-m", name, *options]


def path() -> dict[str, str]:
  """Returns the variable with which other processes find this tree's modules."""
  found = os.environ.get("PYTHONPATH")
  return {"PYTHONPATH": f"{ROOT}{os.pathsep}{found}" if found else str(ROOT)}


def commit() -> str:
  """Returns the commit of this file's tree, or ``"unknown"`` where it is not git's."""
  command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
  found = subprocess.run(command, capture_output=True, text=True, check=False)
  return found.stdout.strip() or "unknown"


def code() -> str:
  """Returns twelve digits of what trainings run: library, examples and scripts."""
  scripts = sorted(ROOT.glob("benchmarks/**/*.py"))
  parts = ["gradcomp", "kernels", "examples", *scripts]
  command = ["git", "-C", str(ROOT), "ls-files", "--stage", "--", *map(str, parts)]
  found = subprocess.run(command, capture_output=True, check=False)
  return hashlib.sha256(found.stdout).hexdigest()[:12]


def write_json(path: Path | None, results: Any) -> None:
  """Writes results as JSON, in a folder that is made, or nothing without a path."""
  if path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def replace(path: Path, text: str) -> None:
  """Writes a text in place of a file's, so that nobody reads a half."""
  new = path.with_suffix(".new")
  new.write_text(text)
  new.replace(path)


def rows_of(folder: Path | None, name: str, about: dict[str, Any]) -> list[Any]:
  """Returns the rows that ``write`` wrote to a folder, if they are about the same."""
  path = folder and folder / f"{name}.json"
  found = json.loads(path.read_text()) if path and path.exists() else {}
  rows = found.pop("rows", [])
  return rows if found == about else []


def write(folder: Path | None, name: str, results: Any, page: str) -> None:
  """Writes results as JSON, and the page about them as Markdown, if to anywhere."""
  if folder:
    write_json(folder / f"{name}.json", results)
    (folder / f"{name}.md").write_text(page)


def skip(missing: str) -> NoReturn:
  """Prints what this machine lacks, and ends the script as a skipped test ends."""
  print(f"skipped: {missing}", file=sys.stderr)
  sys.exit(SKIPPED)
