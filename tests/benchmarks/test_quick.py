"""The runner of quick benchmarks says how they ended, and docstrings' examples run."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

from benchmarks import quick
from benchmarks.common import cli

DOCTESTS = [
  ".".join(path.relative_to(quick.ROOT).with_suffix("").parts)
  for folder in ("benchmarks", "examples")
  for path in sorted((quick.ROOT / folder).rglob("*.py"))
  if ">>> " in path.read_text()
]
GOOD = "pathlib.Path(sys.argv[-1]).write_text('1')"
# Benchmarks of one line each, and what is said of them.
SCRIPTS = {
  "good": (GOOD, "ok: good, _ s"),
  "bare": (
    "from benchmarks.common import cli; cli.skip('there is no GPU here')",
    "skipped: bare, _ s: there is no GPU here",
  ),
  "broken": ("raise ValueError('a bug')", "FAILED: broken, _ s: ValueError: a bug"),
  "silent": ("pass", "FAILED: silent, _ s: it wrote nothing to --output"),
  "rude": (
    f"pathlib.Path('benchmarks/results/kept.md').touch(); {GOOD}",
    "FAILED: a script wrote kept.md to benchmarks/results",
  ),
}


def test_runs_end_well_are_skipped_or_fail(tmp_path, monkeypatch, capsys):
  folder = tmp_path / "benchmarks"
  for part in (folder, folder / "common", folder / "results"):
    part.mkdir()
    (part / "__init__.py").touch()
  (folder / "common" / "cli.py").write_text(Path(cli.__file__).read_text())
  checked = 'assert "--quick" in sys.argv and "--output" in sys.argv'
  for name, (code, _) in SCRIPTS.items():
    (folder / f"{name}.py").write_text(f"import os, pathlib, sys\n{checked}\n{code}")
  monkeypatch.setattr(quick, "ROOT", tmp_path)

  def run(runs, *share):
    monkeypatch.setattr(quick, "RUNS", runs)
    with pytest.raises(SystemExit) as ended:
      quick.main([*share])
    said = re.sub(r"\b\d+ s\b", "_ s", capsys.readouterr().out)
    return ended.value.code or 0, said.splitlines()

  skipped = [SCRIPTS["bare"][1], "quick: 0 ok, 1 skipped, 0 FAILED, _ s"]
  assert run(("good", "bare"), "--share", "1", "2") == (0, skipped)
  code, said = run(tuple(SCRIPTS))
  assert {line for _, line in SCRIPTS.values()} <= {*said}
  assert (code, said[-1]) == (1, "quick: 2 ok, 1 skipped, 3 FAILED, _ s")


# Those that another one starts, that fetch data, or that write pages.
OTHERS = """
links.delay links.hosts links.process links.torch_worker study.queue.run
study.queue.status study.queue.train quick
study.mirrors compilers.cut gpu.served pages.records pages.study
"""


@pytest.mark.parametrize("name", DOCTESTS)
def test_the_examples_run(name, doctest_namespace):
  found = doctest.testmod(importlib.import_module(name), extraglobs=doctest_namespace)
  assert found.attempted and not found.failed


def test_all_scripts_are_run():
  folder = quick.ROOT / "benchmarks"
  scripts = {
    ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__main__")
    for path in folder.glob("**/*.py")
    if '__name__ == "__main__"' in path.read_text()
  }
  assert {line.split()[0] for line in quick.RUNS} == scripts - set(OTHERS.split())
