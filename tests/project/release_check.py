"""Builds a release into dist/, and tests both archives as installed from the index."""

import email
import os
import re
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from subprocess import check_call

from tests.support import installs, pages
from tests.support.pages import ROOT

# What the tests of this environment compiled need not be compiled again.
CACHE = {"JAX_COMPILATION_CACHE_DIR": f"{sys.prefix}/xla-cache"}
PYTEST = ("-q", "-n", "2", "-p", "no:cacheprovider", "-m", "not bits")
# Addresses of the package page that lead into the repository.
OURS = re.compile(
  r"https://(?:github|raw\.githubusercontent)\.com/gradcomp/gradcomp/"
  r"(?:blob/)?v(?P<version>[^/]+)/(?P<file>[^#]+)"
)
SITE = re.compile(r"https://gradcomp\.readthedocs\.io/en/stable/([\w/-]*)(?:\.html)?")


def check_versions(folder):
  """A tag is a version, and so is a commit without or behind one; they grow."""
  git = ["git", "-C", folder, "-c", "user.name=release-check", "-c", "user.email="]
  check_call([*git, "clone", "-q", "--no-tags", "--depth", "1", f"file://{ROOT}", "."])
  version = lambda: installs.run("-m", "hatchling", "version", cwd=folder).strip()
  assert re.fullmatch(r"0\.1\.dev\d+\+g\w+", version()), version()
  check_call([*git, "tag", "v0.2.0"])
  assert version() == "0.2.0", version()
  check_call([*git, "commit", "--quiet", "--allow-empty", "-m", "Go on"])
  assert re.fullmatch(r"0\.2\.1\.dev1\+g\w+", version()), version()


def build(folder):
  shutil.rmtree(folder, ignore_errors=True)
  how = ("--quiet", "--installer", "uv", "--outdir", folder, ROOT)
  installs.run("-m", "build", *how, cwd=ROOT)
  (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
  installs.run("-m", "twine", "check", "--strict", source, wheel, cwd=folder)
  return source, wheel


def check_page(wheel):
  """No link of the package page is relative, and ours lead to what is there."""
  from readme_renderer import markdown  # of the group `release`, which tests lack

  archive = zipfile.ZipFile(wheel)
  (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
  metadata = email.message_from_bytes(archive.read(name))
  page = markdown.render(metadata.get_payload(decode=True).decode())
  links = set(re.findall(r'(?:href|src)="([^#"][^"]*)"', page))
  assert any(map(OURS.match, links)) and any(map(SITE.match, links)), links
  for link in links:
    assert link.startswith("https://"), f"{link} is relative on the package page"
    if ours := OURS.match(link):
      assert ours["version"] == metadata["Version"], f"{link} is of another version"
      assert (ROOT / ours["file"]).exists(), f"{link} leads nowhere"
    elif site := SITE.match(link):
      assert [*ROOT.glob(f"docs/{site[1] or 'README'}.*")], f"{link} leads nowhere"
  return metadata["Version"]


def check_release(version):
  for file, line in (
    ("CHANGELOG.md", f"\n## [{version}] - 20"),
    ("CITATION.cff", f"\nversion: {version}\n"),
    (".github/conda/recipe.yaml", f'\n  version: "{version}"\n'),
  ):
    assert line in (ROOT / file).read_text(), f"{file} does not name {version}"


def environment(folder, *packages):
  python, uv = folder / "bin" / "python", ("-m", "uv", "-q")
  installs.run(*uv, "venv", "-p", sys.executable, folder, cwd=ROOT)
  installs.run(*uv, "pip", "install", *packages, "--python", python, cwd=ROOT)
  return python


def tested(*what, **here):
  """The line in which pytest counts, without which no test has run."""
  said = installs.run("-m", "pytest", *PYTEST, *what, **here, **CACHE)
  return re.findall(r"^\d+ passed.*$", said, re.M)[-1]


def check_wheel(wheel, folder):
  """The front page and all doctests run where nothing else is."""
  packages = (wheel, "pytest", "pytest-xdist")
  here = {"cwd": folder / "elsewhere", "python": environment(folder / "env", *packages)}
  # What names doctests may use, and how they are compared, the tests say.
  shutil.copytree(ROOT / "tests" / "plugins", here["cwd"] / "tests" / "plugins")
  (here["cwd"] / "tests" / "project").mkdir()
  for name in ("conftest.py", "pyproject.toml", "tests/project/budgets.toml"):
    shutil.copy(ROOT / name, here["cwd"] / name)
  (block,) = (x for x in pages.read(ROOT / "README.md")[0] if x.language == "python")
  said = installs.run("-W", "error", "-c", block.text, **here, **CACHE)
  assert "0.127 x the bytes of a plain f32 mean" in said
  return tested("--pyargs", "gradcomp", **here)


def check_source(source, folder):
  """Tests run from the archive, as distributions of systems run them."""
  shutil.unpack_archive(source, folder, filter="data")
  (there,) = folder.glob("gradcomp-*")
  group = f"{there}/pyproject.toml:test"
  python = environment(folder / "env", source, "--group", group)
  files = ("tests/project/test_packaging.py", "tests/codecs/test_codecs.py")
  return tested(*files, cwd=there, python=python)


def main():
  os.environ.pop("PYTHONPATH", None)  # each environment finds its own library
  start = time.monotonic()
  ok = lambda what: print(f"ok: {what}, {time.monotonic() - start:.0f} s", flush=True)
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "clone").mkdir()
    check_versions(folder / "clone")
    ok("versions come from tags")
    source, wheel = build(ROOT / "dist")
    sizes = [path.stat().st_size >> 10 for path in (source, wheel)]
    ok("twine takes {}, {} KiB, and its wheel, {} KiB".format(source.name, *sizes))
    version = check_page(wheel)
    if ".dev" not in version:
      check_release(version)
    ok("links of the package page lead somewhere")
    ok(f"front page and doctests of the wheel: {check_wheel(wheel, folder / 'wheel')}")
    ok(f"tests of the sdist: {check_source(source, folder / 'sdist')}")


if __name__ == "__main__":
  main()
