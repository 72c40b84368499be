"""Runs a study of two codecs, two networks and two seeds, and checks its report."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

from benchmarks.common import cli, quiet
from benchmarks.study import command as study_command
from benchmarks.study.records import read

_ALL = "--networks mlp lenet --codecs f32 qsgd-4 --batch-size 16 --steps 2 --points 1"
_LAUNCHES = (
  "--seeds 2 --emulate 2",
  "--steps-only 2 --workers 1 2 --devices 2",
)
_RUNS = 2 * 2 * 2 + 2 * 2 * 2  # by networks, codecs, and seeds or workers
_TITLES = 10
_EMPTY = ("The line", "Accuracy by workers")  # for which it takes more runs


def run(output: Path | None) -> None:
  """Runs the study, runs it once more, and writes the report.

  Raises:
    RuntimeError: a run or a part of the report is missing, or a run is there twice.
  """
  if output is None:
    with tempfile.TemporaryDirectory() as folder:
      return run(Path(folder))
  for launch in (*_LAUNCHES, _LAUNCHES[0]):  # the second time, all is there
    line = f"{_ALL} {launch}".split()
    command = cli.module("benchmarks.study", "run", *line)
    own = {"JAX_COMPILATION_CACHE_DIR": str(output / "programs"), quiet.VARIABLE: ""}
    subprocess.run(
      [*command, "--output", str(output)],
      env=os.environ | cli.path() | own,
      check=True,
    )
  lines = [x for path in output.glob("*.jsonl") for x in path.read_text().splitlines()]
  if not len(lines) == len(read(output)) == _RUNS:
    raise RuntimeError(f"there are {len(lines)} runs, and not {_RUNS}")
  study_command.main(["report", str(output)])
  check(output)


def check(folder: Path) -> None:
  """Checks that a report has all parts, each with a picture or a table."""
  page = (folder / "report.html").read_text()
  titles = re.findall("<h2>", page)
  if len(titles) != _TITLES:
    raise RuntimeError(f"the page has {len(titles)} parts, and not {_TITLES}")
  pictures = len(list((folder / "figures").glob("*.png")))
  if (
    page.count("<img ") != pictures or page.count("data:image/png;base64,") != pictures
  ):
    raise RuntimeError(f"the page does not have the {pictures} pictures")
  for link in re.findall(r'(?:src|href)="(?!data:)([^"]*)"', page):
    raise RuntimeError(f"the page needs {link}")
  text = (folder / "report.md").read_text()
  for empty in re.findall(
    r"^## (.*)\n\n(?:.*\n\n)?Nothing was run", text, re.MULTILINE
  ):
    if not empty.startswith(_EMPTY):
      raise RuntimeError(f"the report has nothing about {empty}")
  for name in re.findall(r"\]\((figures/.*?)\)", text):
    if not (folder / name).exists():
      raise RuntimeError(f"{name} is missing")
