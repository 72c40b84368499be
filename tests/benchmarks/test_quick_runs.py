"""The runner of quick benchmarks tells what ended well, was skipped, or failed."""

import re
from pathlib import Path

import pytest
import quick
import running

SCRIPTS = {
  "good": "pathlib.Path(sys.argv[-1]).write_text('1')",
  "bare": "import running; running.skip('there is no GPU here')",
  "broken": "print('before'); raise ValueError('a bug')",
  "silent": "pass",
  "rude": "pathlib.Path('results/kept.md').touch(); " * 2
  + "pathlib.Path(sys.argv[-1]).write_text('1')",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Benchmarks of one line each, in place of our own."""
  source = Path(running.__file__).parent
  (tmp_path / "running.py").write_text((source / "running.py").read_text())
  (tmp_path / "results").mkdir()
  for name, code in SCRIPTS.items():
    lines = ["import os, pathlib, sys", "os.chdir(pathlib.Path(__file__).parent)"]
    lines += ['assert "--quick" in sys.argv and "--output" in sys.argv', code]
    (tmp_path / f"{name}.py").write_text("\n".join(lines))
  monkeypatch.setattr(quick, "HERE", tmp_path)
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
  """All but those that another one starts."""
  scripts = {
    path.stem
    for path in quick.HERE.glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
  }
  started = {line.split()[0] for line in quick.RUNS}
  started_by_others = {
    "cluster_host",
    "evidence_queue",
    "evidence_training",
    "link_delay",
    "link_probe",
    "link_worker",
    "local_worker",
    "parallel_worker",
    "torch_worker",
  }
  of_trainings = {f"evidence_{x}" for x in ("start", "status", "times")}
  assert started == scripts - started_by_others - of_trainings - {"quick"}
