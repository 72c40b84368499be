"""A study of many runs: what is run again, what its numbers say, and its report."""

import json

import numpy as np
import pytest

from benchmarks.study import analysis, command, options, report, runner
from benchmarks.study import records as study_records
from benchmarks.study.records import Record, Records
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
  records = Records(tmp_path)
  assert not records.has(SETTING)
  records.append(SETTING, {"points": curve(1.0)})
  assert records.has(SETTING)
  for name, value in SETTING._asdict().items():
    other = 3 if value is None else f"{value}2" if isinstance(value, str) else value + 1
    assert not records.has(SETTING._replace(**{name: other})), name
  later = Records(tmp_path)  # another launch
  records.append(SETTING._replace(seed=1), {"points": curve(1.0)})
  assert later.has(SETTING._replace(seed=1))  # while both run
  # What was left is done, and what failed is run again. Both are shown.
  for seed, how in ((2, "left"), (3, "failed")):
    records.append(SETTING._replace(seed=seed), {how: f"{how} so"})
    assert records.has(SETTING._replace(seed=seed)) is (how == "left")
  study = analysis.grouped(study_records.read(tmp_path))
  shown = str(report.runs(study))
  assert "left so" in shown and "failed so" in shown
  records.append(SETTING._replace(seed=3), {"points": curve(1.0)})
  assert records.has(SETTING._replace(seed=3))
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
  for given, message in {
    "--emulate 8 --steps-only 5": "--steps-only does not go with --emulate",
    "--emulate 3 --batch-size 128": "--batch-size must be a multiple",
    "--emulate 8 --rate 1gbit": "--emulate takes one process",
    "--codecs qsgd-5": "such as qsgd-4 or qsgd-4:conv, got 'qsgd-5'. Methods: f32",
    "--codecs redsync-1:conv": "must have no part where the exchange has",
    "--part 2/2": "must be like 0/2 or 1/2, got '2/2'",
  }.items():
    with pytest.raises(SystemExit):
      command.main(f"run --output unused {given}".split())
    assert message in capsys.readouterr().err
  many = f"run --workers 99 --batch-size 99 --output {tmp_path}".split()
  with pytest.raises(SystemExit, match="must be at most the devices of all .* got 99"):
    runner.run(options.parse(many))
  with pytest.raises(ValueError, match="must have records"):
    report.write([tmp_path], tmp_path)


def jobs(line):
  args = options.parse(["run", *line.split()])
  index, count = args.share
  return [x.setting for x in runner.jobs(args)][index::count]


def test_a_launch_has_each_run_once():
  line = "--emulate 2 4 --networks lenet --codecs f32 qsgd-4 --seeds 3"
  every = jobs(line)
  parts = jobs(f"{line} --part 0/2") + jobs(f"{line} --part 1/2")
  assert len(every) == 2 * 2 * 3 and sorted(parts) == sorted(every)
  assert [x.codec for x in every[:2]] == ["f32", "qsgd-4"]
  line = "--emulate 2 --networks lenet mlp --dropout 0.2 --optimizer adam --codecs f32"
  lenet, mlp = jobs(line)
  assert (lenet.dropout, mlp.dropout) == (None, 0.2)
  assert lenet.learning_rate == mlp.learning_rate == 1e-3
  for rule, batches in (("fixed", [128, 128]), ("per-worker", [256, 512])):
    found = jobs(f"--emulate 2 4 --batch {rule} --codecs f32")
    assert [x.batch for x in found] == batches
    assert [x.steps for x in found] == [1437 // batch for batch in batches]


def test_the_report_needs_nothing_else_and_escapes_what_it_shows(tmp_path):
  times = timed("f32", 4.0) + timed("qsgd-8", 2)
  for record in FULL + trained("qsgd-8", 90.0, 91.0) + times:
    setting = record.setting._replace(dataset="<b>&")
    Records(tmp_path).append(setting, record.results)
  report.write([tmp_path], tmp_path)
  page = (tmp_path / "report.html").read_text()
  assert "<b>&" not in page and "&lt;b&gt;&amp;" in page
  assert "http" not in page and "<script" not in page
  assert page.count("<img ") == len(list((tmp_path / "figures").glob("*.png"))) >= 6
  # Two workers for four seconds, at an hour's price of a dollar a second.
  assert "| f32 | 90.50 | 320 |" in (tmp_path / "report.md").read_text()
