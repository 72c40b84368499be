"""Records of other benchmarks decide the findings that they bear on."""

import json

import pytest

from benchmarks.study import analysis, findings
from benchmarks.study.judges import elsewhere, verdicts

NOTHING = analysis.Study([], [])


def weights(**changed):
  """The record of gradients, whose first layer is as the papers say."""
  good = {"zeros_clipped": 0.72, "shorter": 0.012, "turned": 2.5, "moment": 5.0}
  good |= {"moment_clipped": 1.7, "largest_exponent": -2}
  return {"weights": {"first": good, "second": good | changed}}


def roundoff(least):
  sizes = (8, 16, 32, 256)
  errors = {f"sequential {x}": {"mean": 50.0 + 9 * (x != least)} for x in sizes}
  return {"formats": {"(5, 2)": {"first convolution": errors}}}


UNION = {"workers": 16, "density": 0.001}
# For claims whose looks are not those of accuracies: what bears them out, and what not.
CASES = {
  "Most ternary": (weights(), weights(zeros_clipped=0.69)),
  "Clipping at 2.5 sigma changes": (weights(), weights(turned=4.0)),
  "Clipping brings": (weights(), weights(moment_clipped=6.0)),
  "Gradients of layers": (weights(largest_exponent=-4), weights(largest_exponent=-3)),
  "Sums of 256": (roundoff(16), roundoff(32)),
  "Workers that send": (UNION | {"union": 0.0155}, UNION | {"union": 0.005}),
}


@pytest.mark.parametrize("start", CASES)
def test_each_verdict_comes_out_each_way(tmp_path, monkeypatch, start):
  (finding,) = (x for x in findings.ELSEWHERE if x.claim.startswith(start))
  monkeypatch.setattr(findings, "RESULTS", tmp_path)
  nothing = finding.judge(NOTHING)
  assert nothing.verdict == "not tested"
  path = tmp_path / nothing.numbers[0].removeprefix("It needs ").split(",")[0]
  path.parent.mkdir()
  for expected, found in zip(("holds", "does not"), CASES[start], strict=True):
    path.write_text(json.dumps(found))
    assert finding.judge(NOTHING).verdict == expected


def test_a_long_training_says_how_perplexed_a_sparse_codec_is():

  def part(title, key, steps, **ends):
    rows = {
      codec: {"runs": {str(i): {"points": [{key: x}]} for i, x in enumerate(xs)}}
      for codec, xs in ends.items()
    }
    return {"title": title, "metric": key, "steps": steps, "rows": rows}

  for more, holds in (((0.7, 0.8), True), ((0.2, 1.6), None), ((1.7, 1.8), False)):
    worse = [4.0 * (1 + x / 100) for x in (*more, sum(more) / 2)]
    found = part("A net, of", "perplexity", 12_000, f32=[4.0] * 3, RedSync=worse)
    for learned, rank in ((True, verdicts.COUNTS), (False, verdicts.BLIND)):
      look = elsewhere.redsync("long", ["RedSync"], {"at_most": 1.0}, learned)
      (seen,) = look({"long": found})
      assert (seen.holds, seen.rank) == (holds, rank)
    assert seen.numbers.startswith("A net, 12,000 steps: RedSync, % of perplexity: +")
  for full, holds in ((90.0, True), (99.0, False)):  # where float32 errs in 1 %
    ends = dict(f32=[full, full + 0.5], RedSync=[full - 0.9, full - 0.4])
    found = part("A net", "accuracy", 200, **ends)
    look = elsewhere.redsync("digits", ["RedSync"], {"at_least": -1.0})
    (seen,) = look({"digits": found})
    said = "A net, 200 steps: RedSync -0.90 ± 0.00 (2 seeds)"
    assert seen[:3] == (holds, said, verdicts.COUNTS)


@pytest.mark.parametrize(
  "ends, least, holds, rank",
  [
    ([90.0, 91.0, 92.0], -0.2, True, verdicts.COUNTS),
    ([80.0, 81.0, 82.0], -0.2, False, verdicts.COUNTS),
    ([89.0, 91.0, 93.0], -0.2, None, verdicts.FEW),
    # A lone seed has the largest deviation of others: 4.3 times 10 points.
    ([80.0], -60.0, True, verdicts.COUNTS),
    ([80.0], -40.0, None, verdicts.FEW),
  ],
)
def test_digits_count_where_they_tell(ends, least, holds, rank):
  full = [90.0, 91.0, 92.0][: len(ends)]
  arms = {"f32": full, "a": ends, "failed": [x - 70 for x in full]}
  part = lambda arms: [{"codec": x, "accuracy_percent": y} for x, y in arms.items()]
  other = {"f32": [90.0, 90.0, 90.0], "a": [90.0, 80.0, 100.0]}
  titles = {"8 workers; mean": arms, "LARS": other if len(ends) == 1 else {}}
  look = elsewhere.on_digits(["a", "b"], {"at_least": least}, of="8 workers")
  (seen,) = look([{"title": x, "rows": part(y)} for x, y in titles.items() if y])
  assert (seen.holds, seen.rank) == (holds, rank)
  (seen,) = look([{"title": "8 workers", "rows": part({"f32": full, "a": full})}])
  assert seen.rank == verdicts.BLIND  # no arm of it fails
