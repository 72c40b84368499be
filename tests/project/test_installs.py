"""The first minute works in the folder itself, however the library was installed."""

import re
import tarfile
import zipfile

import pytest

from tests.support import installs, pages
from tests.support.installs import run
from tests.support.pages import ROOT

PLAN = ("-m", "gradcomp", "plan", "--params", "1e6", "--workers", "2", "--gbit", "1")
# A program of a user, whose types are those of the library and of its kernels.
TYPED = """
import gradcomp
from gradcomp.kernels import pack_planes

reveal_type(gradcomp.qsgd)
reveal_type(pack_planes)
"""


def installed(way, folder):
  """Where a newcomer stands, and where else his Python finds the library."""
  site = folder / "site"
  if way == "editable":  # as the environment of these tests is
    return ROOT, []
  if way == "sdist":
    archive = tarfile.open(installs.source_archive(ROOT, folder / "archives"))
    archive.extractall(folder, filter="data")
    (there,) = folder.glob("gradcomp-*")
    return there, []
  there = installs.tree(folder / "tree") if way == "plain" else folder / "elsewhere"
  there.mkdir(exist_ok=True)
  (folder / "wheels").mkdir()
  source = there if way == "plain" else ROOT
  zipfile.ZipFile(installs.wheel(source, folder / "wheels")).extractall(site)
  return there, [str(site)]


@pytest.fixture(
  scope="module",
  params=[
    "plain",
    *(
      pytest.param(way, marks=pytest.mark.slow)
      for way in ("editable", "wheel", "sdist")
    ),
  ],
)
def place(request, tmp_path_factory):
  """One of the ways to install, as ``run`` takes it."""
  there, path = installed(request.param, tmp_path_factory.mktemp(request.param))
  return {"cwd": there, "PYTHONPATH": ":".join(path)}


def test_the_front_page_runs(place):
  """Pasted, and saved as a file."""
  (block,) = [x for x in pages.read(ROOT / "README.md")[0] if x.language == "python"]
  said = run("-W", "error", "-c", block.text, **place)
  assert "0.127 x the bytes of a plain f32 mean" in said


def test_the_command_line_runs(place):
  assert "QSGD-4" in run(*PLAN, **place)


@pytest.mark.slow
def test_pytest_runs(place):
  """Tests and doctests of what is there, if tests are there."""
  if not (place["cwd"] / "tests").exists():
    pytest.skip("a wheel has no tests")
  # Each finds its own environment, and the wheel of an archive is built of it.
  files = (
    "gradcomp/_src/exchange/layout.py",
    "tests/project/test_packaging.py",
    "tests/exchange/test_layout.py",
  )
  said = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, **place)
  assert re.search(r"\d+ passed", said)
  assert "failed" not in said


@pytest.mark.slow
def test_a_type_checker_resolves_the_kernels(place, tmp_path):
  pytest.importorskip("mypy")
  program = tmp_path / "program.py"
  program.write_text(TYPED)
  said = run(
    "-m",
    "mypy",
    "--cache-dir",
    tmp_path / "cache",
    program,
    **place,
    MYPYPATH=place["PYTHONPATH"],
  )
  assert "Success" in said
  assert said.count("Revealed type") == 2 and 'type is "Any"' not in said
