"""The five papers' models give the printed numbers, or show why nobody can."""

import doctest
import json

import pytest

from benchmarks.models import papers
from benchmarks.models.papers import dettmers, fang, grubic, han, wen
from gradcomp.cost import Link
from tests.support import pages

LINK = Link(latency=0.0, bytes_per_second=1e9)


@pytest.mark.parametrize("paper", [dettmers, fang, grubic, han, wen])
def test_the_examples_of_a_model_run(paper):
  found = doctest.testmod(paper)
  assert found.attempted and not found.failed


def test_numbers_agree_with_the_papers_and_with_those_that_were_kept():
  """With a tolerance and its reason beside each, and a reason for all that cannot."""
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
  ours = [x["ours"] for x in entries]
  assert ours == pytest.approx([x.ours for x in rows], rel=1e-9)
  for entry, row in zip(entries, rows, strict=True):
    assert (entry.get("printed"), entry["verdict"]) == (row.printed, row.verdict)


def test_a_profile_holds_the_bytes_that_it_names():
  found = wen.strong_scaling_seconds(0.5, 1e6, 4, 1, wen.ETHERNET, profiled_bytes=244e6)
  expected = (0.5 - 244e6 / 10e9) / 4 + 1e6 / 10e9 * 3
  assert found == pytest.approx(expected, rel=1e-12)


def test_at_the_crossover_both_exchanges_take_as_long():
  case = 64, fang.LINK, fang.SPEEDS
  density = fang.crossover_density(1e6, *case)
  sparse = fang.sparse_seconds(1e6, density, *case)
  assert sparse == pytest.approx(fang.dense_seconds(1e6, *case), rel=1e-12)


WRONG = [
  ("bits", lambda: dettmers.dense_penalty_seconds(16)),
  ("penalty", lambda: dettmers.single_node_speedup(-1)),
  ("sub_batch", lambda: dettmers.cluster_pass(100)),
  ("total", lambda: dettmers.cluster_speedup(float("nan"))),
  ("profiled", lambda: wen.strong_scaling_seconds(1e-3, 244e6, 1, 1, wen.ETHERNET)),
  ("ratio", lambda: wen.gain(1, 1, 1, 1, wen.ETHERNET, ratio=0)),
  ("workers", lambda: wen.pull_bits(0)),
  ("density", lambda: fang.sparse_seconds(1, 1.1, 2, LINK)),
  ("workers", lambda: fang.crossover_density(1, 1, LINK)),
  ("elements", lambda: fang.dense_seconds(-1, 2, LINK)),
  ("entry_bytes", lambda: fang.crossover_workers(0.1, entry_bytes=0)),
  ("images_per_second", lambda: grubic.fit({32: 1.0, 8: 0.0})),
  ("network", lambda: grubic.cheapest("LeNet")),
  ("group_size", lambda: han.three_step_steps(256, 3)),
  ("elements", lambda: han.aps_seconds([0], 2, LINK)),
  ("speedup", lambda: han.implied_latency_bytes(0.5, [1000], 2)),
]


def test_bad_input_is_refused_by_its_name():
  for name, call in WRONG:
    with pytest.raises(ValueError, match=f"`{name}`"):
      call()
