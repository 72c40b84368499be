"""A study of many runs: what is run again, what its numbers say, and its report."""

import json

import cluster_devices
import cluster_findings
import cluster_numbers
import cluster_records
import cluster_report
import cluster_runs
import cluster_study
import numpy as np
import pytest
from cluster_records import Record, Records
from cluster_settings import Setting

SETTING = Setting(
  way="emulated",
  network="lenet",
  dataset="digits",
  codec="f32",
  exchange="auto",
  workers=8,
  rule="fixed",
  batch=64,
  steps=40,
  epoch=1280,
  points=4,
  seed=0,
  optimizer="sgd",
  learning_rate=0.05,
  momentum=0.9,
  max_norm=None,
)
TIMED = SETTING._replace(way="timed", points=0, link="1gbit", workers=2, hosts=2)


def curve(*accuracies):
  return [
    {"step": 10 * (i + 1), "accuracy": x, "test_loss": 1.0, "train_loss": 1.0}
    for i, x in enumerate(accuracies)
  ]


def trained(codec, *ends, early=None, times=3, **changed):
  """Records of a codec, some for each accuracy at the end."""
  return [
    Record(
      SETTING._replace(codec=codec, seed=seed, **changed),
      {"points": curve(end if early is None else early, end)},
    )
    for seed, end in enumerate(times * ends)
  ]


def timed(codec, step, communication=0.0, megabytes=1.0, **changed):
  """A record of a step's seconds, whose codec takes none."""
  results = {
    "step": step,
    "compute": step - communication,
    "codec": 0.0,
    "communication": communication,
    "megabytes": megabytes,
    "gigaflops": 1.0,
    "bytes_a_step": 1,
    "price": 3600.0,
    "cpu": "a processor",
    "cores": 2,
  }
  return [Record(TIMED._replace(codec=codec, **changed), results)]


def line(**seconds):
  """Times of float32 and QSGD on one link, by the bits."""
  names = {32: "f32", 16: "qsgd-16", 8: "qsgd-8", 4: "qsgd-4", 2: "qsgd-2"}
  return [
    record
    for bits, x in seconds.items()
    for record in timed(names[int(bits[1:])], 1 + x, x)
  ]


FULL = trained("f32", 90.0, 91.0)
SLOW = {"link": "1gbit"}
FAST = {"link": "loopback"}
# For each claim, what bears it out, and what does not.
CASES = {
  "QSGD with 8 bits": (trained("qsgd-8", 89.9, 91), trained("qsgd-8", 89.0, 90.9)),
  "QSGD with 4 bits in buckets of 512": (
    trained("qsgd-4", 90, 90.7),
    trained("qsgd-4", 89.6, 90.5),
  ),
  "1-bit SGD in buckets of 64 ends": (
    trained("onebit-64", 89.8, 90.8),
    trained("onebit-64", 89.6, 90.6),
  ),
  "1-bit SGD converges later": (
    trained("f32", 90, 91, early=80.0) + trained("onebit-64", 89.9, 90.9, early=75.0),
    trained("f32", 90, 91, early=80.0) + trained("onebit-64", 89.0, 90.0, early=80.0),
  ),
  "1-bit SGD is worse in buckets": (
    trained("onebit-64", 90, 91) + trained("onebit-512", 89.0, 90.1),
    trained("onebit-64", 90, 91) + trained("onebit-512", 89.0, 91.1),
  ),
  "QSGD with 2 bits in buckets": (
    trained("qsgd-2", 89.0, 90.01),
    trained("qsgd-2", 89.0, 91.0),
  ),
  "QSGD with 4 bits is worse": (
    trained("qsgd-4", 90, 91) + trained("qsgd-4-8192", 89.0, 90.01),
    trained("qsgd-4", 90, 91) + trained("qsgd-4-8192", 90.0, 91.0),
  ),
  "QSGD with 1 bit": (
    trained("qsgd-1-uniform", 80.0, 82.0),
    trained("qsgd-1-uniform", 89.5, 90.5),
  ),
  "QSGD with the l2 norm": (
    trained("qsgd-4-l2", 80.0, 82.0) + trained("qsgd-2-l2", 10.0, 10.0),
    trained("qsgd-4-l2", 90.0, 91.0) + trained("qsgd-2-l2", 10.0, 10.0),
  ),
  "QSGD with 2 bits and one": (
    trained("qsgd-2-tensor", 80.0, 82.0),
    trained("qsgd-2-tensor", 90.0, 91.0),
  ),
  "Convolutions": (
    trained("qsgd-2:conv", 89.0, 90.0) + trained("qsgd-2:dense", 90.0, 91.01),
    trained("qsgd-2:conv", 90.0, 91.0) + trained("qsgd-2:dense", 89.0, 90.01),
  ),
  "A recurrent net": tuple(
    trained("f32", 50.0, 51.0, network="lstm")
    + trained("qsgd-2", *ends, network="lstm")
    for ends in ((49.9, 50.9), (49.0, 50.9))
  ),
  "1-bit SGD without": (
    trained("onebit-64-nofeedback", 80.0, 82.0),
    trained("onebit-64-nofeedback", 90.0, 91.0),
  ),
  "TernGrad ends at most 0.22": tuple(
    trained("f32", 90.0, 91.0, workers=2)
    + trained("terngrad", 90.0, 91.0, workers=2)
    + trained("terngrad", *ends)
    for ends in ((89.9, 90.9), (89.7, 90.7))
  ),
  "TernGrad ends at most 2": (
    trained("terngrad", 88.1, 89.1),
    trained("terngrad", 87.9, 88.9),
  ),
  "TernGrad is worse": (
    trained("terngrad", 90, 91) + trained("terngrad-noclip", 87.0, 88.1),
    trained("terngrad", 90, 91) + trained("terngrad-noclip", 90.0, 91.0),
  ),
  "Dettmers": tuple(
    [
      record
      for i, name in enumerate(("dynamic-tree", "linear", "mantissa", "static-tree"))
      for record in trained(name, 90.1 - i * step, 90.9 - i * step)
    ]
    for step in (0.0, 5.0)
  ),
  "APS with 8 bits ends": (
    trained("aps-5-2", 89.8, 90.8) + trained("aps-4-3", 90.0, 91.0),
    trained("aps-5-2", 89.6, 90.6) + trained("aps-4-3", 90.0, 91.0),
  ),
  "Casts": (trained("cast-3-0", 10.0, 10.0), trained("cast-3-0", 90.0, 91.0)),
  "4 bits (3, 0)": (
    trained("aps-3-0", 80.0, 81.0) + trained("aps-3-0:body", 90.0, 91.1),
    trained("aps-3-0", 90.0, 91.0) + trained("aps-3-0:body", 90.0, 91.0),
  ),
  "RedSync with 1 %": (
    trained("redsync-1", 89.1, 90.1) + trained("redsync-0.1", 89.1, 90.1),
    trained("redsync-1", 89.1, 90.1) + trained("redsync-0.1", 88.9, 89.9),
  ),
  "The largest 1 %": (
    trained("topk-1-noresidual", 80.0, 81.0),
    trained("topk-1-noresidual", 90.0, 91.0),
  ),
  "Communication falls": (line(b32=1, b8=0.3, b4=0.2), line(b32=1, b8=0.3, b4=0.4)),
  "The time of a sample": (
    line(b32=1, b8=0.252, b4=0.127, b2=0.07),
    line(b32=1, b8=1.2, b4=0.1, b2=0.07),
  ),
  "Below 4 bits": (line(b8=1, b4=0.5, b2=0.3), line(b8=1, b4=0.9, b2=0.1)),
  "1-bit SGD in buckets of 64 is slower": (
    timed("onebit-64", 2.0) + timed("qsgd-2", 1.0),
    timed("onebit-64", 1.0) + timed("qsgd-2", 2.0),
  ),
  "1-bit SGD by columns": tuple(
    timed("onebit-column", step, network="resnet") + timed("f32", 2, network="resnet")
    for step in (3.0, 1.0)
  ),
  "Float32 on a fast": tuple(
    timed("f32", 9, **SLOW) + timed("qsgd-4", 3, **SLOW) + timed("f32", step, **FAST)
    for step in (2.0, 4.0)
  ),
  "On a fast link": tuple(
    timed("f32", 9, **SLOW)
    + timed("qsgd-4", 3, **SLOW)
    + timed("f32", 2, **FAST)
    + timed("qsgd-4", step, **FAST)
    for step in (1.95, 1.5)
  ),
  "Nets that communicate": tuple(
    timed("f32", 4, 3.0)
    + timed("qsgd-4", first)
    + timed("f32", 4, 1.0, network="resnet")
    + timed("qsgd-4", 3.5, network="resnet")
    for first in (1.0, 3.8)
  ),
  "Twice the workers": tuple(
    timed("f32", 4.0) + timed("f32", step, workers=4, hosts=4) for step in (3.0, 1.9)
  ),
  "The gain rises": tuple(
    timed("f32", 4.0, megabytes=9.0)
    + timed("qsgd-8", first, megabytes=9.0)
    + timed("f32", 4.0, network="resnet")
    + timed("qsgd-8", 3.5, network="resnet")
    for first in (1.5, 0.5)
  ),
}


def verdict(start, records):
  [finding] = [x for x in cluster_findings.FINDINGS if x.claim.startswith(start)]
  return finding.judge(cluster_numbers.grouped(FULL + list(records)))


@pytest.mark.parametrize("start", CASES)
def test_each_verdict_comes_out_each_way(start):
  good, bad = CASES[start]
  assert verdict(start, good).verdict == "holds"
  assert verdict(start, bad).verdict == "does not"
  nothing = verdict(start, [])
  assert nothing.verdict == "not tested"
  assert nothing.numbers[0].startswith("It needs ")


def test_every_claim_has_a_case_but_those_of_links():
  """Which link_speed.json judges; and what needs GPUs."""
  claims = [x.claim for x in cluster_findings.FINDINGS]
  assert len(set(claims)) == len(claims)
  left = [x for x in claims if not x.startswith(tuple(CASES))]
  assert len(left) == 6


def test_claims_about_links_read_what_link_speed_measured(tmp_path, monkeypatch):
  import cluster_speeds

  judge = cluster_speeds.of_links("a", "b", 1.0, ((2, "1gbit", 1, 64),))
  run = {"hosts": 2, "rate": "1gbit", "leaves": 1, "mib": 64}
  path = tmp_path / "links.json"
  monkeypatch.setattr(cluster_speeds, "LINKS", path)
  assert judge(None).verdict == "not tested"
  for a, b, expected in ((2.0, 1.0, "holds"), (1.0, 2.0, "does not")):
    steps = {"a": {"median_seconds": a}, "b": {"median_seconds": b}}
    path.write_text(json.dumps({"runs": [run | {"steps": steps}]}))
    assert judge(None).verdict == expected


def test_one_seed_is_not_enough():
  found = verdict("QSGD with 8", trained("qsgd-8", 90.0, times=1))
  assert found.verdict == "not tested"


@pytest.mark.parametrize(
  "claim, ends, expected",
  [
    ("QSGD with 8", (89.0, 91.5), "not tested"),
    ("QSGD with 8", (89.91, 90.9), "holds"),
    ("QSGD with 8", (80.0, 81.1), "does not"),
    ("QSGD with 2 bits in buckets", (89.0, 91.0), "not tested"),
    ("QSGD with 2 bits in buckets", (89.0, 90.01), "holds"),
  ],
)
def test_two_seeds_tell_where_their_interval_does(claim, ends, expected):
  """t of one degree of freedom is 12.706."""
  codec = "qsgd-8" if claim.endswith("8") else "qsgd-2"
  found = verdict(claim, trained(codec, *ends, times=1))
  assert found.verdict == expected
  if expected == "not tested":
    assert found.numbers[1].endswith("(2 seeds): too few seeds")


def test_a_claim_must_hold_in_all_groups():
  other = trained("f32", 90, 91, workers=4) + trained("qsgd-8", 80, 81, workers=4)
  found = verdict("QSGD with 8", trained("qsgd-8", 90.0, 91.0) + other)
  assert found.verdict == "does not"
  assert found.numbers[0] == "It holds in 1 of 2."


def test_the_interval_is_that_of_student():
  """By hand: t of 4 degrees of freedom is 2.776."""
  values = [1.0, 2.0, 3.0, 4.0, 5.0]
  found = cluster_numbers.spread(values)
  assert found.mean == 3.0
  np.testing.assert_allclose(found.half, 2.776 * np.std(values, ddof=1) / np.sqrt(5))


def test_the_fit_finds_the_line():
  """Of times that are on one: w is (b + 32 / bucket) / 32."""
  shares = {"b32": 1, "b16": 0.500122, "b8": 0.251953, "b4": 0.126953, "b2": 0.070312}
  times = line(**{bits: 2 * w for bits, w in shares.items()})
  [cell] = cluster_numbers.grouped(times).cells
  found = cell.fit()
  batch = SETTING.batch
  np.testing.assert_allclose(found.computation * batch, 1.0, rtol=1e-3)
  np.testing.assert_allclose(found.communication * batch, 2.0, rtol=1e-3)
  assert found.error < 1e-3
  [cell] = cluster_numbers.grouped(line(b32=1, b8=0.3)).cells
  assert cell.fit() is None  # two points are always on a line


def test_steps_until_a_codec_is_as_good():
  records = trained("f32", 90.0, 91.0) + trained("qsgd-8", 90.2, 90.5, early=90.4)
  [group] = cluster_numbers.grouped(records).groups
  assert group.steps_to("qsgd-8") == 10
  records = trained("f32", 90.0, 91.0) + trained("qsgd-8", 90.2, 90.3, early=80.4)
  [group] = cluster_numbers.grouped(records).groups
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
  assert cluster_records.read(tmp_path) == [Record(SETTING, {"points": []})]


def test_failed_runs_are_known_but_are_in_no_figure():
  failed = [Record(SETTING, {"failed": "a reason"})]
  assert cluster_numbers.grouped(failed) == cluster_numbers.Study([], [])


def test_parts_of_a_launch_have_each_run_once(tmp_path):
  line = "run --emulate 2 4 --networks lenet --codecs f32 qsgd-4 --seeds 3".split()
  everything, found = [], []
  for part in (None, "0/2", "1/2"):
    own = ["--part", part] if part else []
    args = cluster_study.make_parser().parse_args([*line, *own])
    index, count = args.part
    jobs = [
      x.setting for i, x in enumerate(cluster_runs.jobs(args)) if i % count == index
    ]
    (found if part else everything).extend(jobs)
  assert len(everything) == 2 * 2 * 3
  assert sorted(found) == sorted(everything)
  assert everything[0].codec == "f32" and everything[1].codec == "qsgd-4"


def test_a_batch_is_of_all_workers_or_of_each():
  for rule, batches in (("fixed", [128, 128]), ("per-worker", [256, 512])):
    line = f"run --emulate 2 4 --batch {rule} --codecs f32".split()
    args = cluster_study.make_parser().parse_args(line)
    found = [x.setting for x in cluster_runs.jobs(args)]
    assert [x.batch for x in found] == batches
    assert [x.steps for x in found] == [1437 // batch for batch in batches]


def test_the_time_left_is_that_of_runs_that_are_alike():
  runs = [SETTING, SETTING._replace(seed=1), SETTING._replace(seed=1, codec="qsgd-4")]
  clock = cluster_runs.Clock(runs)
  assert clock.after(runs[0], 60.0) == "2 left, about 2 min"
  assert clock.after(runs[2], 240.0) == "1 left, about 1 min"


def test_points_are_at_equal_distances_and_at_the_end():
  assert sorted(SETTING.evaluated) == [10, 20, 30, 40]
  assert sorted(SETTING._replace(steps=3, points=8).evaluated) == [1, 2, 3]


def test_the_parts_of_a_step_add_up():
  seconds = {"step": [9.0, 11.0], "codec": [5.0, 7.0], "compute": [3.0, 4.0]}
  found = cluster_devices.split(seconds)
  assert sum(found[name] for name in cluster_devices.PARTS) == found["step"] == 10.0
  assert found["codec"] == 2.5


def test_the_report_needs_nothing_else_and_escapes_what_it_shows(tmp_path):
  records = (
    FULL + trained("qsgd-8", 90.0, 91.0) + timed("f32", 4.0) + timed("qsgd-8", 2)
  )
  for record in records:
    setting = record.setting._replace(dataset="<b>&")
    Records(tmp_path).append(setting, record.results)
  cluster_report.write(tmp_path, tmp_path)
  page = (tmp_path / "report.html").read_text()
  assert "<b>&" not in page and "&lt;b&gt;&amp;" in page
  assert "http" not in page and "<script" not in page
  assert page.count("<img ") == len(list((tmp_path / "figures").glob("*.png"))) >= 6
  # Two workers for four seconds, at an hour's price of a dollar a second.
  assert "| f32 | 90.50 | 320 |" in (tmp_path / "report.md").read_text()


def test_a_folder_without_runs_is_no_study(tmp_path):
  with pytest.raises(ValueError, match="must have records"):
    cluster_report.write(tmp_path, tmp_path)
