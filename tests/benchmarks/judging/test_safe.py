"""A codec is safe in a training by the whole interval, on images and on texts."""

import pytest

from benchmarks.study import analysis
from benchmarks.study.judges import safe
from tests.benchmarks.study_records import trained

ENDS = (90.0, 91.0)


def cell(*more, **changed):
  """How a codec ends that is better by these points, each in half of the seeds."""
  own = {x: changed.pop(x) for x in ("loss",) if x in changed}
  records = trained("f32", *ENDS, **changed)
  ends = [a + b for a, b in zip(ENDS, more or (0.0, 0.0), strict=True)]
  records += trained("qsgd-4", *ends, **own, **changed)
  (group,) = analysis.grouped(records).groups
  return safe.cell(group, "qsgd-4")


@pytest.mark.parametrize(
  ("more", "says"),
  [
    ((0.0, 0.0), "safe"),
    ((0.0, -0.1), "safe"),
    ((0.0, -0.4), "open: -0.20 ± 0.23"),
    ((-1.0, -1.4), "-1.20 ± 0.23"),
  ],
)
def test_images_may_lose_a_fifth_of_a_point(more, says):
  assert cell(*more) == says


def test_a_text_may_have_one_percent_more_perplexity():
  text = {"network": "lstm", "dataset": "brown"}
  assert cell(**text) == "safe"
  assert cell(loss=1.005, **text) == "safe"
  assert cell(loss=1.02, **text) == "+2.02 ± 0.00 %"


def test_one_seed_or_none_says_nothing():
  records = trained("f32", 90.0, times=1) + trained("qsgd-4", 80.0, times=1)
  (group,) = analysis.grouped(records).groups
  assert safe.cell(group, "qsgd-4") == safe.cell(group, "qsgd-2") == ""


def test_the_table_has_the_trainings_that_were_run():
  """Others have no column, and a codec that was not trained has an empty row."""
  name = safe.TRAININGS["LeNet, 2"]
  common = {"dataset": "fashion-mnist/14", "batch": 128, "steps": 937, "epoch": 60_000}
  records = trained("f32", *ENDS, **common) + trained("aps-4-3", *ENDS, **common)
  study = analysis.grouped(records)
  assert [x.name for x in study.groups] == [name]
  header, rows = safe.table(study)
  assert header == ["", "LeNet, 2"]
  assert [x for x in rows if x[1]] == [["APS (4, 3)", "safe"]]
