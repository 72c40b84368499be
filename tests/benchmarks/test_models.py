"""The five papers' models give the printed numbers, or show why nobody can."""

import doctest
import json

import pytest

from benchmarks.models import papers
from benchmarks.models.papers import dettmers, fang, grubic, han, wen
from gradcomp.cost import Link
from tests.support import pages

MS = 1e-3
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


def test_dettmers_hidden_transfers_cost_one_transfer():
  """Up to 1.3 ms, the length of the matrix product that hides them."""
  for penalty in ("nodes", "passes"):
    found = dettmers.cluster_pass(512, bits=8, penalty=penalty)
    assert found.exposed == found.single < 1.3 * MS
    assert found.total == pytest.approx(24 * 6.5 * MS + found.single, rel=1e-12)
  by_hand = (13.8, 24.3, 35.9, 37.6, 31.3, 5.5)  # of right sizes, within 0.3 %
  for row, expected in zip(dettmers.ROWS, by_hand, strict=True):
    found = dettmers.cluster_pass(row.sub_batch, bits=8, sizes="derived")
    speedup = dettmers.cluster_speedup(found.total)
    assert speedup == pytest.approx(expected, abs=max(0.003 * expected, 0.05))


def test_wen_takes_the_profile_s_own_transfer_off():
  """T holds a transfer of ``float32``, also where less is sent."""
  links = wen.ETHERNET
  found = wen.strong_scaling_seconds(0.5, 244e6, 4, 2, links)
  assert found == pytest.approx(2.0847, abs=1e-9)
  found = wen.weak_scaling_seconds(0.5, 244e6, 4, 2, links)
  assert found == pytest.approx(2.50085, abs=1e-9)
  found = wen.strong_scaling_seconds(0.5, 1e6, 4, 1, links, profiled_bytes=244e6)
  expected = (0.5 - 244e6 / 10e9) / 4 + 1e6 / 10e9 * 3
  assert found == pytest.approx(expected, rel=1e-12)
  case = (4 * wen.ALEXNET.parameters, 4, 2, links)
  profiled = wen.implied_profile(3.04, *case)
  assert wen.gain(profiled, *case) == pytest.approx(3.04, rel=1e-12)


def test_fang_crossovers():
  """Bandwidth alone gives ``8 / (e p)``; and at the crossover both take as long."""
  for workers, percent in ((8, 16.7), (64, 2.08), (128, 1.04)):
    found = fang.crossover_density(1e6, workers, LINK, entry_bytes=6)
    assert 100 * found == pytest.approx(percent, abs=0.05)
    assert fang.bandwidth_ratio(found, workers, entry_bytes=6) == pytest.approx(1)
  link, speeds = fang.LINK, fang.SPEEDS
  density = fang.crossover_density(1e6, 64, link, speeds)
  sparse = fang.sparse_seconds(1e6, density, 64, link, speeds)
  dense = fang.dense_seconds(1e6, 64, link, speeds)
  assert sparse == pytest.approx(dense, rel=1e-12)
  for entry_bytes, workers in ((8, 1000), (4, 2000), (6, 1333)):
    found = fang.crossover_workers(0.001, entry_bytes=entry_bytes)
    assert found == pytest.approx(workers, abs=0.5)


def test_grubic_fit_of_a_line_is_that_line():
  speeds = {b: 1 / (0.002 + 0.003 * grubic.wire_share(b)) for b in (32, 8, 2)}
  found = grubic.fit(speeds)
  assert found[:2] == pytest.approx((0.002, 0.003), rel=1e-9)
  assert found.error < 1e-12
  assert found.seconds(16) == pytest.approx(0.002 + 0.003 * 0.5001220703125, rel=1e-9)


def test_han_counts_steps():
  assert han.three_step_steps(128, 16) == 74  # what the paper prints for 256
  best = {64: ((4, 8), 42), 256: ((8, 16), 90), 1024: ((16, 32), 186)}
  for workers, (sizes, steps) in best.items():
    assert han.best_group_sizes(workers) == sizes
    assert {han.three_step_steps(workers, k) for k in sizes} == {steps}
  link = Link(latency=1e-5, bytes_per_second=1e9)
  ring = 2 * 7 * (1e-5 + 1e6 / 8 / 1e9)
  assert han.three_step_seconds(1e6, 8, 1, link) == pytest.approx(ring, rel=1e-12)
  master = 2 * 7 * (1e-5 + 1e6 / 1e9)
  assert han.three_step_seconds(1e6, 8, 8, link) == pytest.approx(master, rel=1e-12)


def test_han_aps_against_half_precision():
  """The speed-up that was solved for comes back; latency alone halves, bytes double."""
  ratio = han.implied_latency_bytes(1.33, han.RES5C, 32)

  def speedup(latency, merged=True):
    link = Link(latency=latency, bytes_per_second=10e9)
    half = han.half_seconds(han.RES5C, 32, link, merged=merged)
    return half / han.aps_seconds(han.RES5C, 32, link, merged=merged)

  assert speedup(ratio / 10e9) == pytest.approx(1.33, rel=1e-12)
  assert speedup(1.0) == pytest.approx(0.5, rel=1e-4)
  assert speedup(0.0) == pytest.approx(2, rel=1e-5)
  assert speedup(ratio / 10e9, merged=False) < 1.33


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
