"""A study decides each finding of the papers."""

import json

import pytest

from benchmarks.study import analysis, findings, report
from benchmarks.study.judges import speed
from benchmarks.study.judges.verdicts import Verdict
from tests.benchmarks.study_records import CASES, FULL, SAME, timed, trained


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


def test_every_claim_has_a_case_but_those_of_other_benchmarks():
  """Which test_study_elsewhere.py has; those of links, and of what needs GPUs."""
  claims = [x.claim for x in findings.FINDINGS]
  assert len(set(claims)) == len(claims)
  left = {x for x in claims if not x.startswith(tuple(CASES))}
  assert len(left - {x.claim for x in findings.ELSEWHERE}) == 9


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


def test_one_seed_is_not_enough():
  found = verdict("QSGD with 8 bits in", trained("qsgd-8", 90.0, times=1))
  assert found.verdict == "not tested"


@pytest.mark.parametrize(
  "claim, codec, ends, expected",
  [
    ("QSGD with 8 bits in", "qsgd-8", (89.0, 91.5), "cannot tell"),
    ("QSGD with 8 bits in", "qsgd-8", (90.0, 91.01), "holds"),
    ("QSGD with 8 bits in", "qsgd-8", (80.0, 81.1), "does not"),
    ("QSGD with 2 bits in", "qsgd-2-paper", (89.0, 91.0), "cannot tell"),
    ("QSGD with 2 bits in", "qsgd-2-paper", (88.9, 89.91), "holds"),
    ("TernGrad is worse without", "terngrad-noclip", (90.0, 91.01), "does not"),
    ("TernGrad is worse without", "terngrad-noclip", (89.0, 90.01), "holds"),
    ("TernGrad is worse without", "terngrad-noclip", (89.0, 91.0), "cannot tell"),
  ],
)
def test_two_seeds_tell_where_their_interval_does(claim, codec, ends, expected):
  """t of one degree of freedom is 12.706."""
  records = trained(codec, *ends, times=1) + trained("terngrad", 90, 91, times=1)
  found = verdict(claim, records)
  assert found.verdict == expected
  if expected == "cannot tell":
    assert found.numbers[0].endswith("(2 seeds): cannot tell")


@pytest.mark.parametrize(
  "other", [{"network": "lstm"}, {"optimizer": "adam"}, {"workers": 256}]
)
def test_a_claim_is_about_images_and_sgd(other):
  groups = trained("f32", 90, 91, **other) + trained("qsgd-8", 80, 81, **other)
  assert verdict("QSGD with 8 bits in", groups).verdict == "not tested"


def test_programs_that_send_the_same_bytes_are_not_compared():
  """Columns of convolutions travel in float32."""
  records = timed("onebit-column", 3.0, sent=9, network="resnet")
  records += timed("f32", 2.0, sent=9, network="resnet")
  found = verdict("1-bit SGD by columns is slower than float32", records)
  assert found.verdict == "not tested"


def test_workers_on_the_same_processors_are_no_twice_as_many():
  records = timed("f32", 4.0, 1.0) + timed("f32", 3.0, workers=4, hosts=4)
  assert verdict("Twice the workers", records).verdict == "not tested"


@pytest.mark.parametrize("last, expected", [(3.0, "does not"), (1.0, "holds")])
def test_widths_of_one_net_decide_on_its_own_claim(last, expected):
  """Nets of different kinds are shown beside them."""
  records = CASES["The gain rises"][0]
  for network, step in (("lenet-x2", 1.5), ("lenet-x8", last)):
    sizes = {"network": network, "megabytes": 9.0 + len(network)}
    records = [*records, *timed("f32", 4.0, **sizes), *timed("qsgd-8", step, **sizes)]
  found = verdict("The gain rises", records)
  assert found.verdict == expected
  assert "does not count" in found.numbers[-2]


def test_one_host_has_no_link():
  """Its steps are as long on any."""
  records = []
  for link in ("1gbit", "100mbit"):
    records += timed("f32", 4.0, link=link, workers=1, hosts=1)
    records += timed("qsgd-4", 2.0, link=link, workers=1, hosts=1)
  assert verdict("Float32 on a fast link", records).verdict == "not tested"


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
  assert verdict("TernGrad with Adam and", groups).verdict == "not tested"


def test_two_seeds_that_cannot_tell_do_not_count_beside_others():
  far = trained("f32", *SAME, workers=4)
  far += trained("qsgd-8", 80, 91, times=1, workers=4)
  found = verdict("QSGD with 8 bits in", trained("qsgd-8", *SAME) + far)
  assert found.verdict == "holds"
  assert found.numbers[0].endswith("(2 seeds): cannot tell, and does not count")


def test_three_seeds_that_cannot_tell_keep_others_from_telling():
  far = trained("f32", 90, 91, 90, times=1, workers=4)
  far += trained("qsgd-8", 89, 91, 92, times=1, workers=4)
  found = verdict("QSGD with 8 bits in", trained("qsgd-8", *SAME) + far)
  assert found.verdict == "cannot tell"
  assert found.numbers[0] == "It holds in 1 of 2"


def test_trainings_to_their_end_decide_alone():
  ended = trained("f32", *SAME, steps=200) + trained("qsgd-8", *SAME, steps=200)
  found = verdict("QSGD with 8 bits in", trained("qsgd-8", 80, 81) + ended)
  assert found.verdict == "holds"
  assert found.numbers[0].endswith("-10.00 ± 0.00 (6 seeds), and does not count")


def test_a_claim_reads_other_records_beside_the_study(tmp_path):
  """Digits refute what the images of the study bear out."""
  rows = [{"codec": "f32", "accuracy_percent": [90.0, 91.0, 92.0]}]
  rows.append({"codec": "QSGD, 8 bits", "accuracy_percent": [80.0, 81.0, 82.1]})
  (tmp_path / "training").mkdir()
  path = tmp_path / "training" / "codec_study.json"
  title = "8 workers, momentum, 200 steps; mean"
  path.write_text(json.dumps([{"title": title, "rows": rows}]))
  found = verdict("QSGD with 8 bits in", trained("qsgd-8", *SAME))
  assert found.verdict == "does not"
  assert found.numbers[-1].startswith("digits, 8 workers, momentum, 200 steps: QSGD")


def test_on_average_one_setting_may_lose_more():
  """Three points are lost with 4 workers, none with 8."""
  many = trained("f32", *SAME, workers=4) + trained("terngrad", 87, 88, workers=4)
  found = verdict("TernGrad ends less than 2", trained("terngrad", *SAME) + many)
  assert found.verdict == "holds"
  assert found.numbers[0].startswith("the mean of 2 settings: -1.50 ± 0.00")


def test_on_average_trainings_to_their_end_decide_alone():
  ended = trained("f32", *SAME, steps=200) + trained("terngrad", *SAME, steps=200)
  found = verdict("TernGrad ends less than 2", trained("terngrad", 80, 81) + ended)
  assert found.verdict == "holds"
  assert found.numbers[0].startswith("the mean of 1 settings: +0.00")
  assert found.numbers[1].endswith(", and does not count")


def test_what_can_be_holds_in_one_case():
  records = []
  for workers, fast in ((2, 2.0), (4, 9.0)):
    for codec, step, link in (
      ("f32", 9.0, "1gbit"),
      ("qsgd-4", 3.0, "1gbit"),
      ("f32", fast, "loopback"),
    ):
      records += timed(codec, step, link=link, workers=workers, hosts=workers)
  assert verdict("Float32 on a fast", records).verdict == "holds"


def test_own_claims_are_counted_apart():
  verdicts = [Verdict("holds", ()), Verdict("cannot tell", ()), Verdict("holds", ())]
  paper, own = (findings.FINDINGS[0]._replace(ours=ours) for ours in (False, True))
  assert report.summary(list(zip((paper, paper, own), verdicts, strict=True))) == (
    "3 findings; 2 of papers: 1 holds, 0 does not, 1 cannot tell, 0 not tested; 1 of "
    "our own: 1, 0, 0, 0"
  )


def test_every_claim_names_the_papers_setting():
  assert all(len(x.setting) > 5 and x.said for x in findings.FINDINGS)


def test_a_claim_must_hold_in_all_groups():
  other = trained("f32", 90, 91, workers=4) + trained("qsgd-8", 80, 81, workers=4)
  found = verdict("QSGD with 8 bits in", trained("qsgd-8", 90.0, 91.0) + other)
  assert found.verdict == "does not"
  assert found.numbers[0] == "It holds in 1 of 2"
