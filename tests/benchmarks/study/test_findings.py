"""A study decides each finding of the papers."""

import json

import pytest

from benchmarks.study import analysis, findings, report
from benchmarks.study.judges import speed
from benchmarks.study.judges.verdicts import Verdict
from tests.benchmarks.study.records import CASES, FULL, SAME, timed, trained


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
ON_AVERAGE, FAST = "TernGrad ends less than 2", "Float32 on a fast link"
NOTHING, CANNOT = "not tested", "cannot tell"


def both(codec, *ends, like=SAME, **options):
  return trained("f32", *like, **options) + trained(codec, *ends, **options)


def widths(last):
  """Adds times on one net of two widths to those of nets of other kinds."""
  cells = list(CASES[GAIN][0])
  for network, step in (("lenet-x2", 1.5), ("lenet-x8", last)):
    sizes = {"network": network, "megabytes": 9.0 + len(network)}
    cells += timed("f32", 4.0, **sizes) + timed("qsgd-8", step, **sizes)
  return cells


def link(rate, hosts, **steps):
  return [
    record
    for codec, step in steps.items()
    for record in timed(
      codec.replace("_", "-"), step, link=rate, workers=hosts, hosts=hosts
    )
  ]


def cell(workers, *, slow, fast):
  return timed(slow, 2.0, workers=workers) + timed(fast, 1.0, workers=workers)


ENDED = both("qsgd-8", *SAME, steps=200)
ONE, OTHER = (
  dict(slow="onebit-64", fast="qsgd-2"),
  dict(slow="qsgd-2", fast="onebit-64"),
)
# A claim, its records, the verdict, and what the first number says.
RECORDS = [
  (
    EIGHT,
    trained("qsgd-8", *SAME) + both("qsgd-8", 80, 81, workers=4),
    *("does not", "It holds in 1 of 2"),
  ),
  (EIGHT, trained("qsgd-8", 90.0, times=1), NOTHING, ""),  # one seed
  # Of two seeds: t of one degree of freedom is 12.706.
  *(
    (EIGHT, trained("qsgd-8", *ends, times=1), told, words)
    for ends, told, words in (
      ((89.0, 91.5), CANNOT, "(2 seeds): cannot tell"),
      ((90.0, 91.01), "holds", ""),
      ((80.0, 81.1), "does not", ""),
    )
  ),
  # Of images and SGD, with as many workers as usual, and of no fixed batch.
  (EIGHT, both("qsgd-8", 80, 81, network="lstm"), NOTHING, ""),
  (EIGHT, both("qsgd-8", 80, 81, optimizer="adam"), NOTHING, ""),
  (EIGHT, both("qsgd-8", 80, 81, workers=256), NOTHING, ""),
  ("TernGrad with Adam and", both("terngrad", 80, 81, optimizer="adam"), NOTHING, ""),
  # Two seeds that cannot tell do not count beside others; three keep them from telling.
  (
    EIGHT,
    trained("qsgd-8", *SAME)
    + trained("f32", *SAME, workers=4)
    + trained("qsgd-8", 80, 91, times=1, workers=4),
    *("holds", "(2 seeds): cannot tell, and does not count"),
  ),
  (
    EIGHT,
    trained("qsgd-8", *SAME)
    + trained("f32", 90, 91, 90, times=1, workers=4)
    + trained("qsgd-8", 89, 91, 92, times=1, workers=4),
    *(CANNOT, "It holds in 1 of 2"),
  ),
  # Trainings to their end decide alone.
  (EIGHT, trained("qsgd-8", 80, 81) + ENDED, "holds", "6 seeds), and does not count"),
  (
    ON_AVERAGE,
    trained("terngrad", 80, 81) + both("terngrad", *SAME, steps=200),
    *("holds", "the mean of 1 settings: +0.00"),
  ),
  # On average one setting may lose more: three points with 4 workers, none with 8.
  (
    ON_AVERAGE,
    trained("terngrad", *SAME) + both("terngrad", 87, 88, workers=4),
    *("holds", "the mean of 2 settings: -1.50 ± 0.00"),
  ),
  # Programs that send the same bytes: columns of convolutions travel in float32.
  (
    "1-bit SGD by columns is slower than float32",
    timed("onebit-column", 3.0, sent=9, network="resnet")
    + timed("f32", 2.0, sent=9, network="resnet"),
    *(NOTHING, ""),
  ),
  # Workers on the same processors are no twice as many.
  (
    "Twice the workers",
    timed("f32", 4.0, 1.0) + timed("f32", 3.0, workers=4, hosts=4),
    *(NOTHING, ""),
  ),
  (GAIN, widths(last=3.0), "does not", ""),
  (GAIN, widths(last=1.0), "holds", ""),
  # One host has no link. What can be holds in one case.
  (FAST, link("1gbit", 1, f32=4, qsgd_4=2) + link("100mbit", 1, f32=4), NOTHING, ""),
  (
    FAST,
    link("1gbit", 2, f32=9, qsgd_4=3)
    + link("loopback", 2, f32=2)
    + link("1gbit", 4, f32=9, qsgd_4=3)
    + link("loopback", 4, f32=9),
    *("holds", ""),
  ),
  # A claim on many cells must hold in half of them.
  ("In many cases", cell(2, **ONE) + cell(3, **OTHER), "holds", ""),
  (
    "In many cases",
    cell(2, **ONE) + cell(3, **OTHER) + cell(4, **OTHER),
    "does not",
    "",
  ),
]


@pytest.mark.parametrize("claim, records, expected, words", RECORDS)
def test_which_records_decide_a_claim(claim, records, expected, words):
  found = verdict(claim, records)
  assert found.verdict == expected
  assert words in found.numbers[0]


def test_a_claim_reads_other_records_beside_the_study(tmp_path):
  """Digits refute what the images of the study bear out."""
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
