"""The runner of quick benchmarks says what ended well, was skipped, or failed."""

import re
from pathlib import Path

import pytest

from benchmarks import quick
from benchmarks.common import cli

GOOD = "pathlib.Path(sys.argv[-1]).write_text('1')"
SCRIPTS = {
  "good": GOOD,
  "bare": "from benchmarks.common import cli; cli.skip('there is no GPU here')",
  "broken": "print('before'); raise ValueError('a bug')",
  "silent": "pass",
  "rude": f"pathlib.Path('benchmarks/results/kept.md').touch(); {GOOD}",
}


def test_runs_end_well_are_skipped_or_fail(tmp_path, monkeypatch, capsys):
  """Benchmarks of one line each."""
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

  def run(*runs, share=()):
    monkeypatch.setattr(quick, "RUNS", runs)
    with pytest.raises(SystemExit) as ended:
      quick.main([*share])
    out = re.sub(r"\b\d+ s\b", "_ s", capsys.readouterr().out)
    return ended.value.code or 0, out.splitlines()

  skipped = "skipped: bare, _ s: there is no GPU here"
  assert run("good", "bare", share=("--share", "1", "2")) == (
    0,
    [skipped, "quick: 0 ok, 1 skipped, 0 FAILED, _ s"],
  )
  status, lines = run("good --option", "broken", "silent", "rude")
  assert status == 1 and "before" in lines
  assert [x for x in lines if x.startswith(("ok", "FAILED", "quick"))] == [
    "ok: good --option, _ s",
    "FAILED: broken, _ s: ValueError: a bug",
    "FAILED: silent, _ s: it wrote nothing to --output",
    "ok: rude, _ s",
    "FAILED: a script wrote kept.md to benchmarks/results",
    "quick: 2 ok, 0 skipped, 3 FAILED, _ s",
  ]


# Those that another one starts, that fetch data, or that write pages.
OTHERS = """
study.hosts links.delay links.probe links.worker links.local_worker
links.activations_worker links.layers_worker links.torch_worker study.queue.start
study.queue.status study.queue.supervisor study.queue.times study.queue.train quick
study.mirrors.prepare compilers.cut pages.records pages.study
"""


def test_all_scripts_are_run():
  folder = quick.ROOT / "benchmarks"
  scripts = {
    ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__main__")
    for path in folder.glob("**/*.py")
    if '__name__ == "__main__"' in path.read_text()
  }
  started = {line.split()[0] for line in quick.RUNS}
  assert started == scripts - set(OTHERS.split())
