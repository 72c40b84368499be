"""A study of many runs: what is run again, what its numbers say, and its report."""

import json

import jax
import numpy as np
import pytest

from benchmarks.study import (
  analysis,
  command,
  devices,
  methods,
  options,
  report,
  runner,
)
from benchmarks.study import records as study_records
from benchmarks.study.figures import accuracy, speed
from benchmarks.study.records import Record, Records
from tests.benchmarks.study_records import FULL, SETTING, curve, line, timed, trained


def test_the_interval_is_that_of_student():
  """By hand: t of 4 degrees of freedom is 2.776445."""
  values = [1.0, 2.0, 3.0, 4.0, 5.0]
  found = analysis.spread(values)
  assert found.mean == 3.0
  np.testing.assert_allclose(found.half, 2.776445 * np.std(values, ddof=1) / np.sqrt(5))


def test_the_fit_finds_the_line():
  """Of times that are on one: w is (b + 32 / bucket) / 32."""
  shares = {"b32": 1, "b16": 0.500122, "b8": 0.251953, "b4": 0.126953, "b2": 0.070312}
  times = line(**{bits: 2 * w for bits, w in shares.items()})
  [cell] = analysis.grouped(times).cells
  found = cell.fit()
  batch = SETTING.batch
  np.testing.assert_allclose(found.computation * batch, 1.0, rtol=1e-3)
  np.testing.assert_allclose(found.communication * batch, 2.0, rtol=1e-3)
  assert found.error < 1e-3
  [cell] = analysis.grouped(line(b32=1, b8=0.3, b4=0.2)).cells
  assert cell.fit() is None  # three points say little of a line


def test_steps_until_a_codec_is_as_good():
  records = trained("f32", 90.0, 91.0) + trained("qsgd-8", 90.2, 90.5, early=90.4)
  [group] = analysis.grouped(records).groups
  assert group.steps_to("qsgd-8") == 10
  records = trained("f32", 90.0, 91.0) + trained("qsgd-8", 90.2, 90.3, early=80.4)
  [group] = analysis.grouped(records).groups
  assert group.steps_to("qsgd-8") is None


def test_runs_that_are_there_are_known_by_all_of_their_settings(tmp_path):
  records = Records(tmp_path)
  assert not records.has(SETTING)
  records.append(SETTING, {"points": curve(1.0)})
  assert records.has(SETTING)
  for name, value in SETTING._asdict().items():
    other = 3 if value is None else f"{value}2" if isinstance(value, str) else value + 1
    assert not records.has(SETTING._replace(**{name: other})), name
  later = Records(tmp_path)  # another launch
  assert later.has(SETTING)
  records.append(SETTING._replace(seed=1), {"points": curve(1.0)})
  assert later.has(SETTING._replace(seed=1))  # while both run


def test_half_a_line_and_old_settings_are_read(tmp_path):
  old = {k: v for k, v in SETTING._asdict().items() if k != "dropout"}
  text = json.dumps({"run": old, "points": []})
  (tmp_path / "a.jsonl").write_text(f"{text}\n{text[:40]}")
  assert study_records.read(tmp_path) == [Record(SETTING, {"points": []})]


def test_a_run_is_appended_behind_half_a_line(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"run": {"way"')
  for seed in range(2):
    study_records.append(path, SETTING._replace(seed=seed), {"points": []})
  assert [x.setting.seed for x in study_records.read(tmp_path)] == [0, 1]
  assert len(path.read_text().splitlines()) == 3


def test_a_run_that_was_left_counts_as_done_and_has_no_results(tmp_path):
  records = Records(tmp_path)
  records.append(SETTING, {"left": "a reason"})
  assert records.has(SETTING)
  study = analysis.grouped(study_records.read(tmp_path))
  assert study.groups == study.cells == []
  _, [row] = report.runs(study)
  assert "a reason" in row[0] and row[1] == "f32"


def test_failed_runs_are_shown_and_run_again(tmp_path):
  records = Records(tmp_path)
  records.append(SETTING, {"failed": "a reason"})
  assert not records.has(SETTING)
  study = analysis.grouped(study_records.read(tmp_path))
  assert study.groups == study.cells == []
  _, [row] = report.runs(study)
  assert "a reason" in row[0] and row[1] == "f32"
  records.append(SETTING, {"points": curve(1.0)})
  assert records.has(SETTING)
  assert not analysis.grouped(study_records.read(tmp_path)).failed


@pytest.mark.parametrize(
  "line, message",
  [
    ("--emulate 8 --steps-only 5", "--steps-only does not go with --emulate"),
    ("--emulate 3 --batch-size 128", "--batch-size must be a multiple"),
    ("--emulate 8 --rate 1gbit", "--emulate takes one process"),
    ("--codecs qsgd-5", "such as qsgd-4 or qsgd-4:conv, got 'qsgd-5'. Methods: f32"),
    ("--codecs qsgd-4:head", "Parts: conv, dense, body"),
    ("--codecs redsync-1:conv", "must have no part where the exchange has"),
    ("--part 2/2", "must be like 0/2 or 1/2, got '2/2'"),
  ],
)
def test_launches_that_cannot_run_say_why(line, message, capsys):
  with pytest.raises(SystemExit):
    command.main(f"run --output unused {line}".split())
  assert message in capsys.readouterr().err


def test_more_workers_than_devices_are_refused(tmp_path):
  line = f"run --workers 99 --batch-size 99 --output {tmp_path}".split()
  with pytest.raises(SystemExit, match="must be at most the devices of all .* got 99"):
    runner.run(options.parse(line))


def test_a_part_has_the_leaves_that_the_whole_compresses():
  """The first convolution and the biases are small, in all parts of a network."""
  like = jax.ShapeDtypeStruct
  params = {
    "conv1": {"kernel": like((5, 5, 1, 32), float), "bias": like((32,), float)},
    "conv2": {"kernel": like((5, 5, 32, 64), float)},
    "dense": {"kernel": like((576, 1024), float)},
    "head": {"kernel": like((1024, 10), float)},
  }
  parts = {"conv": ["conv2"], "dense": ["dense", "head"], "body": ["conv2", "dense"]}
  for part, expected in parts.items():
    found = methods.labels(part, None, params)
    low = [name for name, leaves in found.items() if "low" in leaves.values()]
    assert low == expected
    assert found["conv1"] == {"kernel": "full", "bias": "full"}
  found = methods.labels("body", 0, params)  # APS has all leaves
  assert found["conv1"] == {"kernel": "low", "bias": "low"}
  assert found["head"] == {"kernel": "full"}


def test_dollars_are_those_of_one_group():
  """And of the one that has most of the codecs, not of as many workers."""
  wide = trained("f32", 90, 91) + trained("qsgd-4", 90, 91)
  near = trained("f32", 80, 81, workers=2)
  times = timed("f32", 4.0) + timed("qsgd-4", 2.0) + timed("qsgd-2", 1.0)
  study = analysis.grouped(near + wide + times)
  [cell] = study.cells
  assert study.matching(cell).setting.workers == 8
  [shown] = speed.prices(study, None)
  assert [row[:2] for row in shown.rows] == [["f32", "90.50"], ["qsgd-4", "90.50"]]
  assert shown.caption.endswith("trained as lenet on digits, N = 8, batch 64, 2 epochs")
  assert analysis.grouped(times).matching(cell) is None


def test_trainings_that_differ_in_their_workers_are_one_picture():
  few = trained("f32", 90.0, 91.0, workers=2) + trained("qsgd-4", 89.0, 90.1, workers=2)
  other = trained("f32", 50.0, 51.0, workers=4, batch=32)
  many = FULL + trained("qsgd-4", 88.0, 89.1)
  [shown] = accuracy.sweeps(analysis.grouped(few + other + many))
  assert shown.caption == "lenet on digits, batch 64, 2 epochs"
  assert [row[:2] for row in shown.rows] == [
    ["2", "f32"],
    ["2", "qsgd-4"],
    ["8", "f32"],
    ["8", "qsgd-4"],
  ]
  [bars] = shown.figure.axes[0].containers
  np.testing.assert_allclose(list(bars.lines[0].get_ydata()), [-0.95, -1.95])


def test_a_diverged_text_is_a_number():
  [group] = analysis.grouped(
    trained("f32", 90.0, 91.0) + trained("qsgd-4", 1.0, 1.0, loss=900.0)
  ).groups
  assert group.perplexity("qsgd-4").mean > 1e290


def test_rates_and_dropout_are_those_of_the_optimizer_and_the_network():
  line = "run --emulate 2 --networks lenet mlp --dropout 0.2 --optimizer adam"
  args = options.parse([*line.split(), "--codecs", "f32"])
  lenet, mlp = (x.setting for x in runner.jobs(args))
  assert (lenet.dropout, mlp.dropout) == (None, 0.2)
  assert lenet.learning_rate == mlp.learning_rate == 1e-3


def test_parts_of_a_launch_have_each_run_once(tmp_path):
  line = "run --emulate 2 4 --networks lenet --codecs f32 qsgd-4 --seeds 3".split()
  everything, found = [], []
  for part in (None, "0/2", "1/2"):
    own = ["--part", part] if part else []
    args = options.parse([*line, *own])
    index, count = args.share
    jobs = [x.setting for i, x in enumerate(runner.jobs(args)) if i % count == index]
    (found if part else everything).extend(jobs)
  assert len(everything) == 2 * 2 * 3
  assert sorted(found) == sorted(everything)
  assert everything[0].codec == "f32" and everything[1].codec == "qsgd-4"


def test_a_batch_is_of_all_workers_or_of_each():
  for rule, batches in (("fixed", [128, 128]), ("per-worker", [256, 512])):
    line = f"run --emulate 2 4 --batch {rule} --codecs f32".split()
    args = options.parse(line)
    found = [x.setting for x in runner.jobs(args)]
    assert [x.batch for x in found] == batches
    assert [x.steps for x in found] == [1437 // batch for batch in batches]


def test_the_time_left_is_that_of_runs_that_are_alike():
  runs = [SETTING, SETTING._replace(seed=1), SETTING._replace(seed=1, codec="qsgd-4")]
  clock = runner.Clock(runs)
  assert clock.after(runs[0], 60.0) == "2 left, about 2 min"
  assert clock.after(runs[2], 240.0) == "1 left, about 1 min"


def test_points_are_at_equal_distances_and_at_the_end():
  assert sorted(SETTING.evaluated) == [10, 20, 30, 40]
  assert sorted(SETTING._replace(steps=3, points=8).evaluated) == [1, 2, 3]


def test_the_parts_of_a_step_add_up():
  seconds = {"step": [9.0, 11.0], "codec": [5.0, 7.0], "compute": [3.0, 4.0]}
  found = devices.split(seconds)
  assert sum(found[name] for name in devices.PARTS) == found["step"] == 10.0
  assert found["codec"] == 2.5


def test_the_report_needs_nothing_else_and_escapes_what_it_shows(tmp_path):
  records = (
    FULL + trained("qsgd-8", 90.0, 91.0) + timed("f32", 4.0) + timed("qsgd-8", 2)
  )
  for record in records:
    setting = record.setting._replace(dataset="<b>&")
    Records(tmp_path).append(setting, record.results)
  report.write([tmp_path], tmp_path)
  page = (tmp_path / "report.html").read_text()
  assert "<b>&" not in page and "&lt;b&gt;&amp;" in page
  assert "http" not in page and "<script" not in page
  assert page.count("<img ") == len(list((tmp_path / "figures").glob("*.png"))) >= 6
  # Two workers for four seconds, at an hour's price of a dollar a second.
  assert "| f32 | 90.50 | 320 |" in (tmp_path / "report.md").read_text()


def test_a_folder_without_runs_is_no_study(tmp_path):
  with pytest.raises(ValueError, match="must have records"):
    report.write([tmp_path], tmp_path)
