"""A study decides each finding of the papers."""

import json

import pytest

from benchmarks.study import analysis, findings, report
from benchmarks.study.judges import speed
from benchmarks.study.judges.verdicts import Verdict
from tests.benchmarks.study.records import CASES, FULL, SAME, both, link, timed, trained


@pytest.fixture(autouse=True)
def no_other_records(tmp_path, monkeypatch):
  monkeypatch.setattr(findings, "RESULTS", tmp_path)


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


EIGHT, GAIN = "QSGD with 8 bits in", "The gain rises"
AVERAGE, FAST = "TernGrad ends less than 2", "Float32 on a fast link"


def widths(last):
  """Adds times on one net of two widths to those of nets of other kinds."""
  cells = list(CASES[GAIN][0])
  for network, step in (("lenet-x2", 1.5), ("lenet-x8", last)):
    sizes = {"network": network, "megabytes": 9.0 + len(network)}
    cells += timed("f32", 4.0, **sizes) + timed("qsgd-8", step, **sizes)
  return cells


def on_both(hosts, fast):
  slow = link("1gbit", hosts, f32=9, qsgd_4=3)
  return slow + link("loopback", hosts, f32=fast)


NOTHING, CANNOT, HOLDS, NOT = "not tested", "cannot tell", "holds", "does not"
GOOD, BAD = trained("qsgd-8", *SAME), (80, 81)
FEW = trained("f32", *SAME, workers=4) + trained("qsgd-8", 80, 91, times=1, workers=4)
UNSURE = both("qsgd-8", 89, 91, 92, like=(90, 91, 90), times=1, workers=4)
ENDED = dict(steps=200)
TERNGRAD = trained("terngrad", *SAME)
FREE = dict(sent=9, network="resnet")
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
  # Trainings to their end decide alone.
  (
    *(HOLDS, "6 seeds), and does not count", EIGHT),
    trained("qsgd-8", *BAD) + both("qsgd-8", *SAME, **ENDED),
  ),
  (
    *(HOLDS, "the mean of 1 settings: +0.00", AVERAGE),
    trained("terngrad", *BAD) + both("terngrad", *SAME, **ENDED),
  ),
  # On average one setting may lose more: three points with 4 workers, none with 8.
  (
    *(HOLDS, "the mean of 2 settings: -1.50 ± 0.00", AVERAGE),
    TERNGRAD + both("terngrad", 87, 88, workers=4),
  ),
  # Programs that send the same bytes: columns of convolutions travel in float32.
  (
    *(NOTHING, "", "1-bit SGD by columns is slower than float32"),
    timed("onebit-column", 3.0, **FREE) + timed("f32", 2.0, **FREE),
  ),
  # Workers on the same processors are no twice as many.
  (
    *(NOTHING, "", "Twice the workers"),
    timed("f32", 4.0, 1.0) + timed("f32", 3.0, workers=4, hosts=4),
  ),
  (NOT, "", GAIN, widths(last=3.0)),
  (HOLDS, "", GAIN, widths(last=1.0)),
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
    "3 findings; 2 of papers: 1 holds, 0 does not, 1 cannot tell, 0 not tested; 1 of "
    "our own: 1, 0, 0, 0"
  )
