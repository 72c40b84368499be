"""The five papers' models give the printed numbers, or show why nobody can."""

import json

import pytest

from benchmarks.models import compare
from benchmarks.models.papers import dettmers, fang, grubic, han, wen  # noqa: F401
from gradcomp.cost import Link
from tests.errors import table
from tests.support import pages

LINK = Link(latency=0.0, bytes_per_second=1e9)


def test_numbers_agree_with_the_papers_and_with_those_that_were_kept():
  rows = compare.numbers()
  assert not [row for row in rows if row.missed]
  assert {row.paper for row in rows} == {"Dettmers", "Wen", "Fang", "Grubic", "Han"}
  for row in rows:
    assert row.why or row.verdict == "ours", row
    assert (row.printed is None) <= (row.verdict in ("ours", "open")), row
    if row.verdict == "wrong":  # by more than its digits
      assert abs(row.difference) > 0.02, row
  kept = pages.ROOT / "benchmarks" / "results" / "models" / "paper_models.json"
  entries = json.loads(kept.read_text())
  assert [x["what"] + x["inputs"] for x in entries] == [x.what + x.inputs for x in rows]
  assert [x["ours"] for x in entries] == pytest.approx([x.ours for x in rows], rel=1e-9)
  for entry, row in zip(entries, rows, strict=True):
    assert (entry.get("printed"), entry["verdict"]) == (row.printed, row.verdict)


def test_a_profile_holds_its_bytes():
  found = wen.strong_scaling_seconds(0.5, 1e6, 4, 1, wen.ETHERNET, profiled_bytes=244e6)
  assert found == pytest.approx((0.5 - 244e6 / 10e9) / 4 + 1e6 / 10e9 * 3, rel=1e-12)


ROWS = """
dettmers.dense_penalty_seconds(16) -> `bits`
dettmers.single_node_speedup(-1) -> `penalty`
dettmers.cluster_pass(100) -> `sub_batch`
dettmers.cluster_speedup(nan) -> `total`
wen.strong_scaling_seconds(1e-3, 244e6, 1, 1, wen.ETHERNET) -> `profiled
wen.gain(1, 1, 1, 1, wen.ETHERNET, ratio=0) -> `ratio`
wen.pull_bits(0) -> `workers`
fang.sparse_seconds(1, 1.1, 2, LINK) -> `density`
fang.dense_seconds(-1, 2, LINK) -> `elements`
han.aps_seconds([0], 2, LINK) -> `elements`
fang.crossover_workers(0.1, entry_bytes=0) -> `entry_bytes`
grubic.fit({32: 1.0, 8: 0.0}) -> `images_per_second`
grubic.cheapest("LeNet") -> `network`
han.three_step_steps(256, 3) -> `group_size`
han.implied_latency_bytes(0.5, [1000], 2) -> `speedup`
"""


test_bad_calls = table.refused(ROWS, globals())
