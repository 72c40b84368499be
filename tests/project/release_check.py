"""Builds a release into dist/, and tests both archives in environments of their own.

``make release-check`` runs it. It installs from the package index, as no test does.
"""

import email
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from subprocess import check_call

from tests.support import installs, pages
from tests.support.pages import ROOT

# What the tests of this environment compiled need not be compiled again.
CACHE = {"JAX_COMPILATION_CACHE_DIR": f"{sys.prefix}/xla-cache"}
PYTEST = ("-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-m", "not bits")
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
  """The archive of sources, and the wheel that is built of it."""
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
  """The files that name a release name this one."""
  number = re.escape(version)
  for file, line in (
    ("CHANGELOG.md", rf"## \[{number}\] - \d{{4}}-\d\d-\d\d"),
    ("CITATION.cff", f"version: {number}"),
    (".github/conda/recipe.yaml", f'  version: "{number}"'),
  ):
    text = (ROOT / file).read_text()
    assert re.search(f"^{line}$", text, re.M), f"{file} does not name {version}"


def environment(folder, *packages):
  """The Python of a new environment with some packages of the index."""
  python = folder / "bin" / "python"
  for how in (("venv", "-p", sys.executable, folder), ("pip", "install", *packages)):
    where = () if how[0] == "venv" else ("--python", python)
    installs.run("-m", "uv", "-q", *how, *where, cwd=ROOT)
  return python


def check_wheel(wheel, folder):
  """The front page and all doctests run where nothing else is."""
  packages = (wheel, "pytest", "pytest-xdist")
  here = {"cwd": folder / "elsewhere", "python": environment(folder / "env", *packages)}
  (block,) = (x for x in pages.read(ROOT / "README.md")[0] if x.language == "python")
  # What names doctests may use, and how they are compared, the tests say.
  names = ("conftest.py", "pyproject.toml", "tests/project/budgets.toml")
  for name in (*names, *(x.relative_to(ROOT) for x in ROOT.glob("tests/plugins/*.py"))):
    (here["cwd"] / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / name, here["cwd"] / name)
  said = installs.run("-W", "error", "-c", block.text, **here, **CACHE)
  assert "0.127 x the bytes of a plain f32 mean" in said
  return last(installs.run(*PYTEST, "--pyargs", "gradcomp", **here, **CACHE))


def check_source(source, folder):
  """Tests run from the archive, as distributions of systems run them."""
  with tarfile.open(source) as archive:
    archive.extractall(folder, filter="data")
  (there,) = folder.glob("gradcomp-*")
  group = f"{there}/pyproject.toml:test"
  python = environment(folder / "env", source, "--group", group)
  files = ("tests/project/test_packaging.py", "tests/codecs/test_codecs.py")
  return last(installs.run(*PYTEST, *files, cwd=there, python=python, **CACHE))


def last(said):
  """The line in which pytest counts, without which no test has run."""
  return re.findall(r"^\d+ passed.*$", said, re.M)[-1]


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
