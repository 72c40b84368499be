"""Programs of users pass a type checker, however the library was installed."""

import shutil
import zipfile

import pytest

from tests.support import installs, pages

PROGRAMS = pages.ROOT / "tests" / "project" / "typing"
# optax is no typed package: mypy takes what comes from it for Any.
OPTIONS = ("--check-untyped-defs", "--warn-unused-ignores", "--disable-error-code")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wheel", "editable"])
def test_programs_of_users_pass(way, tmp_path):
  """And each of their mistakes is found; the front page has none."""
  pytest.importorskip("mypy")
  folder, place = tmp_path / "programs", tmp_path / "site"
  shutil.copytree(PROGRAMS, folder, ignore=shutil.ignore_patterns("__*"))
  blocks = {x.language: x.text for x in pages.read(pages.ROOT / "README.md")[0]}
  (folder / "readme.py").write_text(blocks["python"])
  if way == "wheel":
    zipfile.ZipFile(installs.wheel(pages.ROOT, tmp_path)).extractall(place)
  else:
    place = pages.ROOT  # which an editable install adds to the path
  options = (*OPTIONS, "import-untyped", "--cache-dir", tmp_path / "cache")
  given = {"cwd": folder, "PYTHONPATH": str(place)}
  said = installs.run("-m", "mypy", *options, *sorted(folder.iterdir()), **given)
  assert "no issues found in 4 source files" in said
