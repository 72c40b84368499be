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

BLOCKS = {block.language: block.text for block in pages.read(ROOT / "README.md")[0]}
# Behind the program of the front page: its loss before and after.
LOSSES = """
untrained = {"w": 0 * params["w"]}
print("losses", loss_fn(untrained, batch), loss)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A copy of the tree, whose wheel is installed elsewhere, as ``run`` takes it."""
  folder = tmp_path_factory.mktemp("plain")
  there = installs.tree(folder / "tree")
  zipfile.ZipFile(installs.wheel(there, folder)).extractall(folder / "site")
  return {"cwd": there, "PYTHONPATH": str(folder / "site")}


def test_the_front_page_runs_as_a_newcomer_pastes_it(place):
  """Its loss falls, and the table that it prints is the wire's: words, and a total."""
  said = run("-W", "error", "-c", BLOCKS["python"] + LOSSES, **place)
  before, after = map(float, re.search(r"^losses (\S+) (\S+)$", said, re.M).groups())
  assert after < 0.1 * before
  for stage in ("all-to-all", "all-gather"):
    assert re.search(rf"^{stage} +u32 .* 116,480 ", said, re.M), said
  assert "Sends 0.127 x the bytes of a plain f32 mean." in said
  assert "# 0.127 x the bytes of f32" in BLOCKS["python"]


def test_the_command_line_runs(place):
  """As the front page calls it."""
  line = re.search(r"^python (-m gradcomp plan .*)$", BLOCKS["console"], re.M)[1]
  assert "QSGD-4" in run(*shlex.split(line, comments=True), **place)
