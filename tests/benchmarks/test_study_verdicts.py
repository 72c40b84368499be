"""What a study says of each finding of the papers."""

import json

import pytest

from benchmarks.study import analysis, findings
from benchmarks.study.judges import speed
from tests.benchmarks.study_records import CASES, FULL, timed, trained


def verdict(start, records):
  [finding] = [x for x in findings.FINDINGS if x.claim.startswith(start)]
  return finding.judge(analysis.grouped(FULL + list(records)))


@pytest.mark.parametrize("start", CASES)
def test_each_verdict_comes_out_each_way(start):
  good, bad = CASES[start]
  assert verdict(start, good).verdict == "holds"
  assert verdict(start, bad).verdict == "does not"
  nothing = verdict(start, [])
  assert nothing.verdict == "not tested"
  assert nothing.numbers[0].startswith("It needs ")


def test_every_claim_has_a_case_but_those_of_other_benchmarks():
  """Which test_study_elsewhere.py has, and the next test; and what needs GPUs."""
  claims = [x.claim for x in findings.FINDINGS]
  assert len(set(claims)) == len(claims)
  left = {x for x in claims if not x.startswith(tuple(CASES))}
  assert len(left - {x.claim for x in findings.ELSEWHERE}) == 6


def test_claims_about_links_read_what_link_speed_measured(tmp_path, monkeypatch):
  judge = speed.of_links("a", "b", ((2, "1gbit", 1, 64),))
  run = {"hosts": 2, "rate": "1gbit", "leaves": 1, "mib": 64}
  path = tmp_path / "links.json"
  monkeypatch.setattr(speed, "LINKS", path)
  assert judge(None).verdict == "not tested"
  told = (2.0, 1.0, "holds"), (1.0, 2.0, "does not"), (1.0, 1.04, "not tested")
  for a, b, expected in told:
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
  codec = "qsgd-8" if claim.endswith("8") else "qsgd-2-paper"
  found = verdict(claim, trained(codec, *ends, times=1))
  assert found.verdict == expected
  if expected == "not tested":
    assert found.numbers[1].endswith("(2 seeds): this does not tell")


@pytest.mark.parametrize(
  "other", [{"network": "lstm"}, {"optimizer": "adam"}, {"workers": 256}]
)
def test_a_claim_is_about_images_and_sgd(other):
  groups = trained("f32", 90, 91, **other) + trained("qsgd-8", 80, 81, **other)
  assert verdict("QSGD with 8", groups).verdict == "not tested"


def test_programs_that_send_the_same_bytes_are_not_compared():
  """Columns of convolutions travel in float32."""
  records = timed("onebit-column", 3.0, sent=9, network="resnet")
  records += timed("f32", 2.0, sent=9, network="resnet")
  found = verdict("1-bit SGD by columns is slower than float32", records)
  assert found.verdict == "not tested"


def test_workers_on_the_same_processors_are_no_twice_as_many():
  records = timed("f32", 4.0, 1.0) + timed("f32", 3.0, workers=4, hosts=4)
  assert verdict("Twice the workers", records).verdict == "not tested"


@pytest.mark.parametrize("many, expected", [(2, "holds"), (3, "does not")])
def test_a_claim_on_many_cells_must_hold_in_half_of_them(many, expected):
  records = timed("onebit-64", 2.0) + timed("qsgd-2", 1.0)
  for workers in range(3, 2 + many):
    records += timed("onebit-64", 1.0, workers=workers)
    records += timed("qsgd-2", 2.0, workers=workers)
  assert verdict("In many cases", records).verdict == expected


def test_the_claim_on_a_batch_a_worker_is_about_no_fixed_one():
  groups = trained("f32", 90, 91, optimizer="adam")
  groups += trained("terngrad", 80, 81, optimizer="adam")
  assert verdict("TernGrad with Adam", groups).verdict == "not tested"


def test_a_group_with_too_few_seeds_is_said():
  far = trained("f32", 90, 91, workers=4) + trained(
    "qsgd-8", 80, 91, times=1, workers=4
  )
  found = verdict("QSGD with 8", trained("qsgd-8", 90.0, 91.0) + far)
  assert found.verdict == "holds"
  assert found.numbers[0] == "It holds in 1 of 2"


def test_a_claim_must_hold_in_all_groups():
  other = trained("f32", 90, 91, workers=4) + trained("qsgd-8", 80, 81, workers=4)
  found = verdict("QSGD with 8", trained("qsgd-8", 90.0, 91.0) + other)
  assert found.verdict == "does not"
  assert found.numbers[0] == "It holds in 1 of 2"
