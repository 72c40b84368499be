"""The pages say what the committed records of the study say."""

import json
import re

import cluster_numbers
import cluster_records
import cluster_report
import link_results
import pages
import pytest
from tables import table

RESULTS = pages.ROOT / "benchmarks" / "results"
PAGE = pages.ROOT / "docs" / "results.md"
README = pages.ROOT / "README.md"
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
  return cluster_numbers.grouped(cluster_records.read(RESULTS / "cluster_study"))


@pytest.fixture(scope="module")
def lenet(study):
  (group,) = (x for x in study.groups if x.setting.network == "lenet")
  return group


def test_the_page_has_each_codec(lenet):
  part = PAGE.read_text().split("### Fashion-MNIST")[1].split("\n## ")[0]
  rows = re.findall(r"^\| `.*", part, re.M)
  expected = []
  for codec in lenet.runs:
    ends = list(lenet.ends(codec).values())
    ratio = next(iter(lenet.runs[codec].values())).results["ratio"]
    difference = "" if codec == "f32" else str(lenet.difference(codec))
    mean = sum(ends) / len(ends)
    expected.append(
      f"| `{codec}` | {mean:.2f} | {difference} | {len(ends)} | {ratio:.4f} |"
    )
  assert sorted(rows) == sorted(expected)


def test_the_page_has_each_verdict(study, lenet):
  """The name of the one group of images is above the table."""
  header, rows = cluster_report.claims(cluster_report.judge(study))
  expected = table(header, rows).replace(f"{lenet.name}: ", "")
  assert expected in PAGE.read_text()


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
