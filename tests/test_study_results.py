"""The pages say what the committed records of the study say."""

import json
import re
from collections import Counter

import cluster_records
import cluster_runs
import cluster_study
import link_results
import pages
import pytest
import study_pages
from cluster_launches import LAUNCHES
from cluster_networks import TEXTS, Source

RESULTS = pages.ROOT / "benchmarks" / "results"
README = pages.ROOT / "README.md"
LENET = "lenet on fashion-mnist/14, N = 8, batch 128, 2 epochs"
# What the front page calls a codec, its name here, and its row of link_speed.json.
FRONT = {
  "QSGD, 8 bits": ("qsgd-8", "qsgd-8 two_shot"),
  "QSGD, 4 bits": ("qsgd-4", "qsgd-4 two_shot"),
  "QSGD, 2 bits": ("qsgd-2", "qsgd-2 two_shot"),
  "1-bit SGD": ("onebit-64", "onebit-64 two_shot"),
  "TernGrad": ("terngrad", "terngrad two_shot"),
  "8 bits, dynamic tree": ("dynamic-tree", "dynamic-tree two_shot"),
  "APS (5, 2)": ("aps-5-2", "aps-8 ring"),
  "RedSync, 1 %": ("redsync-1", "redsync-1% all_gather"),
}


@pytest.fixture(scope="module")
def study():
  return study_pages.study()


@pytest.fixture(scope="module")
def lenet(study):
  (group,) = (x for x in study.groups if x.name == LENET)
  return group


def test_no_two_groups_have_one_name(study):
  """Names are headings, and those of pictures."""
  counts = Counter(x.name for x in study.groups) + Counter(x.name for x in study.cells)
  assert max(counts.values()) == 1, counts.most_common(1)


def test_the_launches_make_the_records_and_no_others(monkeypatch):
  """With the names and sizes of their data, and none of the data."""

  def source(args, network):
    name, epoch = f"fashion-mnist/{args.pixels}", 60_000
    if network in TEXTS:
      name, epoch = args.text, 172_221
    return Source(name, None, (), (), epoch, None, network in TEXTS)

  monkeypatch.setattr(cluster_runs, "_source", source)
  parser = cluster_study.make_parser()
  made = Counter(
    job.setting
    for launch in LAUNCHES
    for job in cluster_runs.jobs(parser.parse_args(["run", *launch.split()]))
  )
  records = cluster_records.read(study_pages.RECORDS)
  kept = {x.setting for x in records if x.setting.way == "emulated"}
  assert set(made) == kept
  assert max(made.values()) == 1  # no run is in two launches


def test_the_page_has_each_table(study):
  page = study_pages.PAGE.read_text()
  for heading, table in study_pages.tables(study):
    part = page.split(heading + "\n")[1].split("\n#")[0]
    assert f"\n{table}\n" in part
  assert f"\n{study_pages.count(study)}\n" in page


@pytest.mark.parametrize("label", FRONT)
def test_the_front_page_has_the_measured_numbers(lenet, label):
  codec, step = FRONT[label]
  runs = json.loads((RESULTS / "link_speed.json").read_text())["runs"]
  steps = link_results.find(runs, hosts=4, rate="1gbit", leaves=1)["steps"]
  found, plain = steps[step], steps["plain f32 mean"]
  sent = found["bytes_wire_report"] / plain["bytes_wire_report"]
  numbers = f"| {sent:.3f} | {link_results.speed_up(found):.1f} |"
  (row,) = re.findall(rf"^\| {re.escape(label)} \|.*", README.read_text(), re.M)
  assert f"| {lenet.difference(codec)} |" in row
  assert row.endswith(numbers)
