"""The runner of quick benchmarks says what ended well, was skipped, or failed."""

import re
from pathlib import Path

import pytest

from benchmarks import quick
from benchmarks.common import cli

SCRIPTS = {
  "good": "pathlib.Path(sys.argv[-1]).write_text('1')",
  "bare": "from benchmarks.common import cli; cli.skip('there is no GPU here')",
  "broken": "print('before'); raise ValueError('a bug')",
  "silent": "pass",
  "rude": "pathlib.Path('benchmarks/results/kept.md').touch(); " * 2
  + "pathlib.Path(sys.argv[-1]).write_text('1')",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Benchmarks of one line each, in place of our own."""
  folder = tmp_path / "benchmarks"
  (folder / "common").mkdir(parents=True)
  (folder / "common" / "cli.py").write_text(Path(cli.__file__).read_text())
  (folder / "results").mkdir()
  for path in (folder, folder / "common"):
    (path / "__init__.py").touch()
  for name, code in SCRIPTS.items():
    lines = ["import os, pathlib, sys"]
    lines += ['assert "--quick" in sys.argv and "--output" in sys.argv', code]
    (folder / f"{name}.py").write_text("\n".join(lines))
  monkeypatch.setattr(quick, "ROOT", tmp_path)
  monkeypatch.setattr(quick, "RUNS", ("good", "bare", "good --option"))
  return tmp_path


def printed(capsys):
  """The lines, without the seconds."""
  return re.sub(r"\b\d+ s\b", "_ s", capsys.readouterr().out).splitlines()


def test_runs_that_end_well_or_are_skipped(folder, capsys):
  with pytest.raises(SystemExit) as ended:
    quick.main([])
  assert not ended.value.code
  assert printed(capsys) == [
    "ok: good, _ s",
    "skipped: bare, _ s: there is no GPU here",
    "ok: good --option, _ s",
    "quick: 2 ok, 1 skipped, 0 FAILED, _ s",
  ]


def test_a_share_of_the_runs(folder, capsys):
  with pytest.raises(SystemExit):
    quick.main(["--share", "1", "2"])
  assert printed(capsys) == [
    "skipped: bare, _ s: there is no GPU here",
    "quick: 0 ok, 1 skipped, 0 FAILED, _ s",
  ]


def test_runs_that_fail(folder, capsys, monkeypatch):
  monkeypatch.setattr(quick, "RUNS", ("broken", "silent", "rude"))
  with pytest.raises(SystemExit) as ended:
    quick.main([])
  assert ended.value.code == 1
  lines = printed(capsys)
  assert "before" in lines
  assert [line for line in lines if line.startswith(("FAILED", "quick"))] == [
    "FAILED: broken, _ s: ValueError: a bug",
    "FAILED: silent, _ s: it wrote nothing to --output",
    "FAILED: a script wrote kept.md to benchmarks/results",
    "quick: 1 ok, 0 skipped, 3 FAILED, _ s",
  ]


def test_all_scripts_are_run():
  """All but those that another one starts, that fetch data, or that write pages."""
  folder = quick.ROOT / "benchmarks"
  scripts = {
    ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__main__")
    for path in folder.glob("**/*.py")
    if '__name__ == "__main__"' in path.read_text()
  }
  started = {line.split()[0] for line in quick.RUNS}
  started_by_others = {"study.hosts"} | {
    f"links.{name}"
    for name in ("delay", "probe", "worker", "local_worker", "activations_worker")
    + ("layers_worker", "torch_worker")
  }
  of_trainings = {
    f"study.queue.{x}" for x in ("start", "status", "supervisor", "times", "train")
  }
  others = {"quick", "study.mirrors.prepare", "compilers.cut"}
  others |= {"pages.records", "pages.study"}
  assert started == scripts - started_by_others - of_trainings - others
