"""A study decides each finding of the papers."""

import json

import pytest

from benchmarks.study import analysis, findings, report
from benchmarks.study.judges import speed
from benchmarks.study.judges.verdicts import Verdict
from tests.benchmarks.study.records import (
  CASES,
  FULL,
  SAME,
  WEN,
  both,
  failing,
  link,
  timed,
  trained,
)


@pytest.fixture(autouse=True)
def no_other_records(tmp_path, monkeypatch):
  monkeypatch.setattr(findings, "RESULTS", tmp_path)


def verdict(start, records):
  [finding] = [x for x in findings.FINDINGS if x.claim.startswith(start)]
  records = FULL + list(records)
  return finding.judge(analysis.grouped(records + failing(records)))


@pytest.mark.parametrize("start", CASES)
def test_each_verdict_comes_out_each_way(start):
  good, bad = CASES[start]
  assert verdict(start, good).verdict == "holds"
  assert verdict(start, bad).verdict == "does not"
  nothing = verdict(start, [])
  assert nothing.verdict == "not tested"
  assert nothing.numbers[0].startswith("It needs ")


def test_claims_about_links_read_what_link_speed_measured(tmp_path, monkeypatch):
  judge = speed.of_links("a", "b", ["1gbit"])
  run = {"hosts": 2, "rate": "1gbit", "leaves": 1, "mib": 64}
  path = tmp_path / "links.json"
  monkeypatch.setattr(speed, "LINKS", path)
  assert judge(None).verdict == "not tested"
  told = (2.0, 1.0, "holds"), (1.0, 2.0, "does not"), (1.0, 1.04, "cannot tell")
  for a, b, expected in told:
    steps = {"a": {"median_seconds": a}, "b": {"median_seconds": b}}
    path.write_text(json.dumps({"runs": [run | {"steps": steps}]}))
    assert judge(None).verdict == expected


EIGHT, WORKERS = "QSGD with 8 bits in", "TernGrad ends at most 0.22"
AVERAGE, FAST = "TernGrad ends less than 2", "Float32 on a fast link"


def on_both(hosts, fast):
  slow = link("1gbit", hosts, f32=9, qsgd_4=3)
  return slow + link("loopback", hosts, f32=fast)


NOTHING, CANNOT, HOLDS, NOT = "not tested", "cannot tell", "holds", "does not"
GOOD, BAD = trained("qsgd-8", *SAME), (80, 81)
FEW = trained("f32", *SAME, workers=4) + trained("qsgd-8", 80, 91, times=1, workers=4)
UNSURE = both("qsgd-8", 89, 91, 92, like=(90, 91, 90), times=1, workers=4)
WORSE = both("qsgd-8", 89.35, 90.75, workers=4)  # p is 0.02
TEXT = both("qsgd-2", *SAME, network="lstm", epoch=9999)
READ = [x._replace(setting=x.setting._replace(epoch=99)) for x in TEXT]
OTHERS = both("terngrad", *SAME, workers=64, schedule="polynomial")
TERNGRAD = trained("terngrad", *SAME)
ONE = link("1gbit", onebit_64=2, qsgd_2=1)
OTHER, THIRD = (link("1gbit", n, onebit_64=1, qsgd_2=2) for n in (3, 4))
# The verdict on a claim and what its first number says, by the records.
RECORDS = [
  (NOT, "It holds in 1 of 2", EIGHT, GOOD + both("qsgd-8", *BAD, workers=4)),
  (NOTHING, "", EIGHT, trained("qsgd-8", 90.0, times=1)),  # one seed
  # Of two seeds: t of one degree of freedom is 12.706.
  (CANNOT, "(2 seeds): cannot tell", EIGHT, trained("qsgd-8", 89.0, 91.5, times=1)),
  (HOLDS, "", EIGHT, trained("qsgd-8", 90.0, 91.01, times=1)),
  (NOT, "", EIGHT, trained("qsgd-8", 80.0, 81.1, times=1)),
  # Of images and SGD, with as many workers as usual, and of no fixed batch.
  (NOTHING, "", EIGHT, both("qsgd-8", *BAD, network="lstm")),
  (NOTHING, "", EIGHT, both("qsgd-8", *BAD, optimizer="adam")),
  (NOTHING, "", EIGHT, both("qsgd-8", *BAD, workers=256)),
  (NOTHING, "", "TernGrad with Adam and", both("terngrad", *BAD, optimizer="adam")),
  # Two seeds that cannot tell do not count beside others; three keep them from telling.
  (HOLDS, "(2 seeds): cannot tell, and does not count", EIGHT, GOOD + FEW),
  (CANNOT, "It holds in 1 of 2", EIGHT, GOOD + UNSURE),
  # Trainings that differ in their length are one setting: -0.2 and +0.2 points.
  (
    *(HOLDS, "and lenet on digits, N = 8, batch 64, 10 epochs: qsgd-8 -0.02", EIGHT),
    trained("qsgd-8", 89.75, 90.84) + both("qsgd-8", 90.25, 91.15, steps=200),
  ),
  # Where float32 errs in 1 %, a tenth of a point is no small loss.
  (NOT, "", EIGHT, both("qsgd-8", 98.88, 98.99, like=(99.0, 99.1))),
  # Of several settings one that does not hold by p = 0.02 is chance.
  (CANNOT, "It holds in 1 of 2", EIGHT, GOOD + WORSE),
  (NOT, "", EIGHT, WORSE),
  # Where nothing fails nothing is told, and a text must be read once.
  (CANNOT, "and does not count", "A recurrent", TEXT),
  (HOLDS, "", "A recurrent", READ),
  # A claim of 2 to 64 workers on MNIST.
  (CANNOT, "It holds in 1 of 2", WORKERS, both("terngrad", *SAME, workers=2, **WEN)),
  (CANNOT, "and does not count", WORKERS, OTHERS),
  # On average one setting may lose more: three points with 4 workers, none with 8.
  (
    *(HOLDS, "the mean of 2 settings: -1.50 ± 0.00", AVERAGE),
    TERNGRAD + both("terngrad", 87, 88, workers=4),
  ),
  # Workers on the same processors are no twice as many.
  (
    *(NOTHING, "", "Twice the workers"),
    timed("f32", 4.0, 1.0) + timed("f32", 3.0, workers=4, hosts=4),
  ),
  # One host has no link. What can be holds in one case.
  (NOTHING, "", FAST, link("1gbit", 1, f32=4, qsgd_4=2) + link("100mbit", 1, f32=4)),
  (HOLDS, "", FAST, on_both(2, fast=2) + on_both(4, fast=9)),
  # A claim on many cells must hold in half of them.
  (HOLDS, "", "In many cases", ONE + OTHER),
  (NOT, "", "In many cases", ONE + OTHER + THIRD),
]


@pytest.mark.parametrize("expected, words, claim, records", RECORDS)
def test_which_records_decide_a_claim(expected, words, claim, records):
  found = verdict(claim, records)
  assert found.verdict == expected
  assert words in found.numbers[0]


def test_a_claim_reads_other_records_beside_the_study(tmp_path):
  rows = [{"codec": "f32", "accuracy_percent": [90.0, 91.0, 92.0]}]
  rows.append({"codec": "QSGD, 8 bits", "accuracy_percent": [80.0, 81.0, 82.1]})
  (tmp_path / "training").mkdir()
  path = tmp_path / "training" / "codec_study.json"
  title = "8 workers, momentum, 200 steps; mean"
  path.write_text(json.dumps([{"title": title, "rows": rows}]))
  found = verdict(EIGHT, trained("qsgd-8", *SAME))
  assert found.verdict == "does not"
  assert found.numbers[-1].startswith("digits, 8 workers, momentum, 200 steps: QSGD")


def test_own_claims_are_counted_apart():
  verdicts = [Verdict("holds", ()), Verdict("cannot tell", ()), Verdict("holds", ())]
  paper, own = (findings.FINDINGS[0]._replace(ours=ours) for ours in (False, True))
  assert report.summary(list(zip((paper, paper, own), verdicts, strict=True))) == (
    "2 findings of papers: 1 holds, 0 does not, 0 not seen here, 1 cannot tell, "
    "0 not tested; 1 own: 1, 0, 0, 0, 0"
  )


@pytest.mark.parametrize("place", ["yes", "near", "far"])
def test_far_from_the_papers_setting_nothing_is_refuted(place):
  (finding,) = (x for x in findings.FINDINGS if x.claim.startswith(EIGHT))
  finding = finding._replace(place=place)
  for ends, expected in ((SAME, "holds"), (BAD, "does not")):
    records = FULL + trained("qsgd-8", *ends)
    study = analysis.grouped(records + failing(records))
    far = place == "far" and expected == "does not"
    assert finding.verdict(study).verdict == ("not seen here" if far else expected)
    if expected == "holds":  # and where nothing fails
      assert finding.verdict(analysis.grouped(records)).verdict == "cannot tell"
