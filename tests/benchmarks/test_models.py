"""The five papers' models give the printed numbers, or show why nobody can."""

import json

import pytest

from benchmarks.models import papers
from benchmarks.models.papers import fang, wen
from gradcomp.cost import Link
from tests.errors import table
from tests.support import pages

LINK = Link(latency=0.0, bytes_per_second=1e9)


def test_numbers_agree_with_the_papers_and_with_those_that_were_kept():
  rows = papers.numbers()
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


def test_a_profile_holds_its_bytes_and_a_crossover_is_one():
  found = wen.strong_scaling_seconds(0.5, 1e6, 4, 1, wen.ETHERNET, profiled_bytes=244e6)
  assert found == pytest.approx((0.5 - 244e6 / 10e9) / 4 + 1e6 / 10e9 * 3, rel=1e-12)
  case = 64, fang.LINK, fang.SPEEDS
  sparse = fang.sparse_seconds(1e6, fang.crossover_density(1e6, *case), *case)
  assert sparse == pytest.approx(fang.dense_seconds(1e6, *case), rel=1e-12)


ROWS = """
papers.dettmers.dense_penalty_seconds(16) -> `bits`
papers.dettmers.single_node_speedup(-1) -> `penalty`
papers.dettmers.cluster_pass(100) -> `sub_batch`
papers.dettmers.cluster_speedup(nan) -> `total`
papers.wen.strong_scaling_seconds(1e-3, 244e6, 1, 1, papers.wen.ETHERNET) -> `profiled
papers.wen.gain(1, 1, 1, 1, papers.wen.ETHERNET, ratio=0) -> `ratio`
papers.wen.pull_bits(0) ; papers.fang.crossover_density(1, 1, LINK) -> `workers`
papers.fang.sparse_seconds(1, 1.1, 2, LINK) -> `density`
papers.fang.dense_seconds(-1, 2, LINK) -> `elements`
papers.han.aps_seconds([0], 2, LINK) -> `elements`
papers.fang.crossover_workers(0.1, entry_bytes=0) -> `entry_bytes`
papers.grubic.fit({32: 1.0, 8: 0.0}) -> `images_per_second`
papers.grubic.cheapest("LeNet") -> `network`
papers.han.three_step_steps(256, 3) -> `group_size`
papers.han.implied_latency_bytes(0.5, [1000], 2) -> `speedup`
"""


test_bad_calls = table.refused(ROWS, globals())
