"""A study of many runs: what is run again, what its numbers say, and its report."""

import functools
import json

import numpy as np
import pytest

from benchmarks.study import __main__ as command
from benchmarks.study import analysis, items, report, runner
from benchmarks.study import records as study_records
from benchmarks.study.records import Record
from tests.benchmarks.study.records import FULL, SETTING, curve, line, timed, trained


def group_of(records):
  [group] = analysis.grouped(FULL + records).groups
  return group


def test_the_numbers_of_groups_and_cells():
  """t of 4 degrees of freedom is 2.776445; w is (b + 32 / bucket) / 32."""
  values = [1.0, 2.0, 3.0, 4.0, 5.0]
  found = analysis.spread(values)
  assert found.mean == 3.0
  np.testing.assert_allclose(found.half, 2.776445 * np.std(values, ddof=1) / np.sqrt(5))
  shares = {"b32": 1, "b16": 0.500122, "b8": 0.251953, "b4": 0.126953, "b2": 0.070312}
  [cell] = analysis.grouped(line(**{x: 2 * w for x, w in shares.items()})).cells
  fit, batch = cell.fit(), SETTING.batch
  np.testing.assert_allclose(fit.computation * batch, 1.0, rtol=1e-3)
  np.testing.assert_allclose(fit.communication * batch, 2.0, rtol=1e-3)
  assert fit.error < 1e-3
  [cell] = analysis.grouped(line(b32=1, b8=0.3, b4=0.2)).cells
  assert cell.fit() is None  # three points say little of a line
  early = group_of(trained("qsgd-8", 90.2, 90.5, early=90.4))
  late = group_of(trained("qsgd-8", 90.2, 90.3, early=80.4))
  assert (early.steps_to("qsgd-8"), late.steps_to("qsgd-8")) == (10, None)
  diverged = group_of(trained("qsgd-4", 1.0, 1.0, loss=900.0))
  assert diverged.perplexity("qsgd-4").mean > 1e290


def test_runs_that_are_there_are_known_by_all_of_their_settings(tmp_path):
  append = functools.partial(study_records.append, tmp_path / "a.jsonl")
  done = functools.partial(study_records.done, tmp_path)
  assert not done()
  append(SETTING, {"points": curve(1.0)})
  for name, value in SETTING._asdict().items():
    other = 3 if value is None else f"{value}2" if isinstance(value, str) else value + 1
    assert SETTING._replace(**{name: other}) not in done(), name
  study_records.append(tmp_path / "b.jsonl", SETTING._replace(seed=1), {"points": []})
  assert done() == {SETTING, SETTING._replace(seed=1)}  # of two launches
  # What was left is done, and what failed is run again. Both are shown.
  for seed, how in ((2, "left"), (3, "failed")):
    append(SETTING._replace(seed=seed), {how: f"{how} so"})
    assert (SETTING._replace(seed=seed) in done()) is (how == "left")
  shown = str(report.runs(analysis.grouped(study_records.read(tmp_path))))
  assert "left so" in shown and "failed so" in shown
  append(SETTING._replace(seed=3), {"points": curve(1.0)})
  assert SETTING._replace(seed=3) in done()
  study = analysis.grouped(study_records.read(tmp_path))
  assert [x.setting.seed for x in study.failed] == [2]


def test_half_a_line_and_old_settings_are_read(tmp_path):
  old = {k: v for k, v in SETTING._asdict().items() if k != "dropout"}
  text, path = json.dumps({"run": old, "points": []}), tmp_path / "a.jsonl"
  path.write_text(f"{text}\n{text[:40]}")
  assert study_records.read(tmp_path) == [Record(SETTING, {"points": []})]
  study_records.append(path, SETTING._replace(seed=1), {"points": []})
  assert [x.setting.seed for x in study_records.read(tmp_path)] == [0, 1]
  assert len(path.read_text().splitlines()) == 3


def test_launches_that_cannot_run_say_why(capsys, tmp_path):
  mine = tmp_path / "mine.toml"
  text = (items.LAUNCHES / "quick.toml").read_text()
  mine.write_text(text.replace("qsgd-4", "qsgd-5"))
  for given, message in {
    "paper --output unused": "must be a file or one of digits, optimizers, papers",
    "quick --part 2/2 --output unused": "must be like 0/2 or 1/2, got '2/2'",
    f"{mine} --output unused": "such as qsgd-4 or qsgd-4:conv, got 'qsgd-5'. Methods",
    "quick": "`--output` must be the folder of the records",
  }.items():
    with pytest.raises(SystemExit):
      command.main(f"run {given}".split())
    assert message in capsys.readouterr().err
  many = items.Item("a", SETTING._replace(way="timed", workers=99), 0.0)
  with pytest.raises(SystemExit, match="N = 99.* at most the devices of all"):
    runner.run([many], tmp_path)
  with pytest.raises(SystemExit, match="`folders` must be those of the records"):
    command.main(["report"])
  with pytest.raises(ValueError, match="must have records"):
    report.write([tmp_path], tmp_path)


def test_parts_have_each_run_once():
  found = lambda **own: command.Run(launches="quick", **own).items()
  parts = [x for i in range(3) for x in found(part=f"{i}/3")]
  assert len(parts) == len(set(parts)) and set(parts) == set(found())
  assert {x.setting.way for x in found(ways=("timed",))} == {"timed"}


def test_the_report_needs_nothing_else_and_escapes_what_it_shows(tmp_path):
  times = timed("f32", 4.0) + timed("qsgd-8", 2)
  for record in FULL + trained("qsgd-8", 90.0, 91.0) + times:
    setting = record.setting._replace(dataset="<b>&")
    study_records.append(tmp_path / "a.jsonl", setting, record.results)
  report.write([tmp_path], tmp_path, price=3600.0)
  page = (tmp_path / "report.html").read_text()
  assert "<b>&" not in page and "&lt;b&gt;&amp;" in page
  assert "http" not in page and "<script" not in page
  assert page.count("<img ") == len(list((tmp_path / "figures").glob("*.png"))) >= 6
  # Two workers for four seconds, at an hour's price of a dollar a second.
  assert "| f32 | 90.50 | 320 |" in (tmp_path / "report.md").read_text()
