"""The benchmark of links: what it chooses to measure, and what it makes of it."""

import argparse
import doctest
import json
import math
import re

import pytest

from benchmarks.common import shapes as common_shapes
from benchmarks.links import cells, front_picture, methods, results, tables
from tests.support import pages

CELL = {
  "hosts": 2,
  "rate": "1gbit",
  "bits_per_second": 1e9,
  "mib": 64,
  "leaves": 1,
  "repeats": 2,
}
MACHINE = {"jax": "1", "cpu": "a", "cores": 2}


def reported(seconds, sent=(8, 8), crc32=1):
  """A step in the report of one host."""
  return {
    "seconds": seconds,
    "cpu_seconds": [0.5, 0.5],
    "sent": list(sent),
    "arithmetic": None,
    "wire_report": 8,
    "error": 0.0,
    "crc32": crc32,
  }


def step(milliseconds, baseline=100.0, sent=8e6):
  return {
    "median_seconds": milliseconds / 1e3,
    "baseline_seconds": baseline / 1e3,
    "bytes_sent": sent,
  }


def run(steps, rate="1gbit", **others):
  speed = {"1gbit": 1e9, "100mbit": 1e8, "loopback": None}[rate]
  kinds = {"probe": [1.2e8, 1.1e8], "parts": {}, "failed": {}} | others
  return CELL | {"rate": rate, "bits_per_second": speed, "steps": steps} | kinds


def options(**chosen):
  empty = {"rates": None, "leaves": None, "codecs": None, "hosts": [2, 4]}
  return argparse.Namespace(**(empty | {"buckets": False} | chosen))


@pytest.mark.parametrize("module", [methods, cells, results, tables], ids=str)
def test_the_examples_run(module):
  found = doctest.testmod(module)
  assert found.attempted and not found.failed


def test_the_slowest_host_takes_the_time():
  reports = [
    {"steps": {"plain": reported([4.0, 6.0]), "x": reported([1.0, 5.0])}},
    {"steps": {"plain": reported([5.0, 5.0]), "x": reported([3.0, 2.0], crc32=2)}},
  ]
  found = results.combine(reports, "steps", shared=False)
  assert found["plain"]["seconds"] == [5.0, 6.0]
  assert found["x"]["seconds"] == [3.0, 5.0]
  assert results.speed_up(found["x"]) == 5.5 / 4.0
  assert [entry["same_bits"] for entry in found.values()] == [True, False]
  assert found["x"]["bytes_sent"] == 8
  shared = results.combine(reports, "steps", shared=True)
  assert shared["x"]["bytes_sent"] == 4


def test_cells_stay_apart_and_steps_join():
  runs = results.merge([], run({"a": step(1), "b": step(2)}))
  runs = results.merge(runs, run({"a": step(3)}, rate="100mbit"))
  again = run({"b": step(4)}, probe=[], failed={"c": "hung after 60 s"})
  runs = results.merge(runs, again)
  assert [len(run["steps"]) for run in runs] == [2, 1]
  first = results.find(runs, hosts=2, rate="1gbit", leaves=1)
  assert first["steps"] == {"a": step(1), "b": step(4)}
  assert first["probe"] == [1.2e8, 1.1e8] and first["failed"]
  runs = results.merge(runs, run({"c": step(5)}))
  assert not runs[0]["failed"]
  with pytest.raises(KeyError):
    results.find(runs, hosts=4, rate="1gbit", leaves=1)


def test_results_of_another_machine_are_not_joined(tmp_path):
  path = tmp_path / "link_speed.json"
  assert results.read(path, MACHINE) == {"machine": MACHINE, "runs": []}
  path.write_text(json.dumps({"machine": MACHINE | {"kernel": "old"}, "runs": [1]}))
  assert results.read(path, MACHINE)["runs"] == [1]
  with pytest.raises(ValueError, match="`cores` is 2, and here it is 4"):
    results.read(path, MACHINE | {"cores": 4})


def test_the_table_compares_within_a_framework():
  fast = run(
    {
      "ddp f32": step(110, 110),
      "plain f32 mean": step(100),
      "qsgd-4 two_shot": step(25, sent=1e6),
    },
    parts={"encode": {"median_seconds": 0.0025}},
    failed={"ddp powersgd-1 in buckets": "hung after 60 s"},
  )
  slow = run({"qsgd-4 two_shot": step(200, 1000)}, rate="100mbit")
  lines = tables.markdown([fast, slow]).splitlines()
  table = lines[lines.index("|  | MB | 100mbit | 1gbit |") + 2 :]
  assert table == [
    "| qsgd-4 two_shot | 1.00 | 200 (5.0) | 25 (4.0) |",
    "| plain f32 mean | 8.00 |  | 100 (1.0) |",
    "| ddp f32 | 8.00 |  | 110 (1.0) |",
    "| ddp powersgd-1 in buckets |  |  | hung after 60 s |",
    "| *part:* encode |  |  | 2.5 |",
  ]


def test_a_rate_that_is_not_reached_has_no_column():
  runs = [run({"a": step(1)}), run({}, rate="100mbit", probe=[1e6])]
  text = tables.markdown(runs)
  assert "|  | MB | 1gbit |" in text
  assert "* 100mbit: raw TCP carries 8 Mbit/s or more. This machine does not" in text


def test_default_cells():
  """All rates with one leaf, and one cell with ResNet-50, which shows the hang."""
  found = cells.cells(options())
  assert len(found) == 2 * 5 + 1
  assert [cell[:3] for cell in found if not cell.brief] == [
    ("1gbit", 2, 1),
    ("1gbit", 4, 1),
  ]
  assert [cell[:3] for cell in found if cell.hangs] == [("1gbit", 2, "resnet50")]


def test_options_choose_cells():
  chosen = options(hosts=[4], leaves=[8, "resnet50"], codecs=["f16"])
  assert [cell[:3] for cell in cells.cells(chosen)] == [
    ("1gbit", 4, 8),
    ("1gbit", 4, "resnet50"),
  ]


def test_leaves_have_the_sizes_that_are_told():
  assert sum(map(math.prod, cells.shapes_of(8, mib=64))) == 2**24
  shapes = cells.shapes_of("resnet50", mib=64)
  assert shapes == common_shapes.resnet50_shapes()
  assert (len(shapes), sum(map(math.prod, shapes))) == (161, 25_557_032)


def test_brief_choices_are_of_steps_that_exist():
  everything = methods.chosen(None, brief=False, merged=False)
  assert len(set(everything)) == len(everything)
  for merged in (True, False):
    brief = methods.chosen(None, brief=True, merged=merged)
    assert set(brief) <= set(methods.chosen(None, brief=False, merged=merged))


def test_what_splits_messages_needs_several_leaves():
  one = methods.chosen(None, brief=False, merged=True)
  several = methods.chosen(None, brief=False, merged=False)
  assert {name.rsplit(" ", 1)[0] for name in set(several) - set(one)} == {
    name for name, case in methods.CASES.items() if case.message_bytes
  }


def test_steps_are_compared_with_what_their_bytes_need():
  full = {"seconds": [0.09, 0.12], "cpu_seconds_a_host": 0.05, "error": 0.1}
  known = {"bytes_arithmetic": 8e6, "bytes_wire_report": 4e6}
  one = run({"f16 ring": step(100, 200) | full | known})
  row = tables.frame(one).loc["f16 ring"]
  assert row["x f32"] == 2.0 and row["wire ms"] == pytest.approx(32.0)
  assert (row["least"], row["most"]) == (90.0, 120.0)
  assert (row["/ formula"], row["/ HLO"]) == (1.0, 2.0)
  theirs = {"bytes_arithmetic": None, "bytes_wire_report": None}
  alone = run({"ddp f32": step(100) | full | theirs}, rate="loopback")
  assert tables.frame(alone).loc["ddp f32"].isna()[["wire ms", "/ HLO"]].all()


@pytest.mark.parametrize("page", ["README.md", "docs/results/speed.md"])
def test_the_picture_is_of_these_times(page, tmp_path):
  """Its words for those who do not see it hold the times that the script draws."""
  times = front_picture.milliseconds()
  (words,) = re.findall(r"!\[(.*)\]\(.*speed\.png\)", (pages.ROOT / page).read_text())
  numbers = re.findall(r"(?:f32|bf16|bits) (\d+)", words)
  assert numbers == [f"{time:.0f}" for time in times.values()]
  front_picture.draw(times, tmp_path / "speed.png")
  assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
