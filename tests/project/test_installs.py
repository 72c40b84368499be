"""The first minute works in the folder itself, after ``pip install .`` there.

``make release-check`` tests both archives of a release, in environments of their own.
"""

import re
import shlex
import zipfile

import pytest

from tests.support import installs, pages
from tests.support.installs import run
from tests.support.pages import ROOT

FRONT_PAGE = pages.read(ROOT / "README.md")[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A copy of the tree, whose wheel is installed elsewhere, as ``run`` takes it."""
  folder = tmp_path_factory.mktemp("plain")
  there = installs.tree(folder / "tree")
  zipfile.ZipFile(installs.wheel(there, folder)).extractall(folder / "site")
  return {"cwd": there, "PYTHONPATH": str(folder / "site")}


def test_the_front_page_runs(place):
  """Pasted, and saved as a file."""
  (block,) = [x for x in FRONT_PAGE if x.language == "python"]
  said = run("-W", "error", "-c", block.text, **place)
  assert "0.127 x the bytes of a plain f32 mean" in said


def test_the_command_line_runs(place):
  """As the front page calls it."""
  (block,) = [x for x in FRONT_PAGE if x.language == "console"]
  (line,) = re.findall(r"^python (-m gradcomp plan .*)$", block.text, re.M)
  assert "QSGD-4" in run(*shlex.split(line, comments=True), **place)


@pytest.mark.slow
def test_pytest_runs(place):
  """Tests and doctests of what is there."""
  files = (
    "gradcomp/_src/exchange/layout.py",
    "tests/project/test_packaging.py",
    "tests/exchange/test_layout.py",
  )
  said = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, **place)
  assert re.search(r"\d+ passed", said)
  assert "failed" not in said
