"""Records of other benchmarks decide the findings that they bear on."""

import json

import pytest

from benchmarks.study import analysis, findings
from benchmarks.study.judges import elsewhere, verdicts
from benchmarks.training.model_parallel.layer_errors import PAPER

NOTHING = analysis.Study([], [])
TYPES = ("dynamic_tree", "linear", "mantissa", "static_tree")


def accuracies(*, less=0.0, one_bit=10.0, gradients=97.5):
  """A record of training/model_parallel/dense.py: float32 has 97 to 98 %."""
  seeds = [0.0, 1.0, 0.5, 0.2, 0.8]
  ends = {name: [97.0 + x for x in seeds] for name in ("f32", *TYPES)}
  ends["linear"] = [97.05 - less + x - 0.1 * (i % 2) for i, x in enumerate(seeds)]
  coarse = {"gradients, with feedback": gradients, "activations": one_bit}
  return {
    "types": [
      {"unit": "relu", "way": way, "accuracy_percent": ends}
      for way in ("model", "data")
    ],
    "coarse": {what: {"1 bit": [x + y for y in seeds]} for what, x in coarse.items()},
  }


def network(name, more):
  """A record of training/model_parallel/nets.py: float32 has an error of 2.5 %."""
  seeds = [97.0, 98.0, 97.5]
  ends = {"f32": seeds} | {x: [y - more for y in seeds] for x in TYPES}
  return {"accuracy_percent": {name: ends}}


def weights(**changed):
  """A record of training/gradients.py, whose first layer is as the papers say."""
  good = {
    "zeros_clipped": 0.72,
    "shorter": 0.012,
    "turned": 2.5,
    "moment": 5.0,
    "moment_clipped": 1.7,
    "largest_exponent": -2,
  }
  return {"weights": {"first": good, "second": good | changed}}


def layers(times):
  """A record of model_parallel/dense.py, whose errors are so many times the paper's.

  Those of activations begin with the inputs, which the paper does not have.
  """
  errors = {
    kind: {
      name: [[99.0] * (kind == "activations") + [times * x for x in theirs]]
      for name, theirs in types.items()
    }
    for kind, types in PAPER.items()
  }
  return {"errors": errors}


def roundoff(least):
  errors = {f"sequential {x}": {"mean": 50.0 + (x != least)} for x in (8, 16, 32, 256)}
  return {"formats": {"(5, 2)": {"first convolution": errors}}}


def relative(tree):
  errors = {name: {"relative_percent": 2.0} for name in TYPES}
  return {
    "as_paper": {"U(0, 1)": errors | {"dynamic_tree": {"relative_percent": tree}}}
  }


def lars(points):
  ends = {"f32": [90, 91], "(5, 2), APS": [90, 91]}
  ends["(4, 3), APS"] = [90 + points, 91 + points]
  rows = [{"codec": name, "accuracy_percent": x} for name, x in ends.items()]
  return [{"title": "8 workers", "rows": []}, {"title": "LARS with", "rows": rows}]


def transfers(seconds):
  """A record of links/activations.py, in which float32 takes a second."""
  found = {"lax": 1.0, "f32": 1.0, "linear": seconds}
  programs = {
    json.dumps([way, name, 128, 768, 1]): {"median_seconds": x}
    for way in ("gather", "scatter")
    for name, x in found.items()
  }
  return {"runs": [{"hosts": 4, "rate": "1gbit", "programs": programs}]}


def selection(trimmed):
  seconds = {"exact": 1.0, "sampled, again": 0.1, "trimmed": trimmed}
  return {"machine": {}, "normal, 16777216, 0.001": {"seconds": seconds}}


def union(share):
  return {"workers": 16, "density": 0.001, "union": share}


# For each claim: what bears it out, and what does not.
CASES = {
  "Dettmers' four types of 8 bits on": (accuracies(), accuracies(less=7.0)),
  "Dettmers' four types of 8 bits in": tuple(
    network("locally connected", more) for more in (0.04, 0.06)
  ),
  "The dynamic tree in": tuple(
    network("like AlexNet, 4 sub-batches", more) for more in (0.05, 0.3)
  ),
  "One bit does": (accuracies(), accuracies(one_bit=97.0)),
  "Of four types": (relative(1.0), relative(3.0)),
  "Errors of 8 bits": (layers(1.9), layers(2.1)),
  "8 bits bring": (transfers(0.4), transfers(0.6)),
  "Most ternary": (weights(), weights(zeros_clipped=0.69)),
  "Clipping at": (weights(), weights(turned=4.0)),
  "Clipping brings": (weights(), weights(moment_clipped=6.0)),
  "Gradients of layers": (weights(largest_exponent=-4), weights(largest_exponent=-3)),
  "Sums of 256": (roundoff(16), roundoff(32)),
  "APS with 8 bits ends at most 0.06": (lars(0.1), lars(-2.0)),
  "Workers that send": (union(0.0155), union(0.005)),
  "Trimmed and": (selection(0.5), selection(2.0)),
}


@pytest.mark.parametrize("start", CASES)
def test_each_verdict_comes_out_each_way(tmp_path, monkeypatch, start):
  (finding,) = (x for x in findings.ELSEWHERE if x.claim.startswith(start))
  monkeypatch.setattr(findings, "RESULTS", tmp_path)
  nothing = finding.judge(NOTHING)
  assert nothing.verdict == "not tested"
  record = nothing.numbers[0].removeprefix("It needs ").split(",")[0]
  for expected, found in zip(("holds", "does not"), CASES[start], strict=True):
    (tmp_path / record).parent.mkdir(exist_ok=True)
    (tmp_path / record).write_text(json.dumps(found))
    assert finding.judge(NOTHING).verdict == expected


def test_every_claim_has_a_case():
  assert len(CASES) == len(findings.ELSEWHERE)


def perplexities(name, **percents):
  """A record of training/redsync_study.py, whose codec has so many percents more."""
  record = {}
  for part, more in percents.items():
    full = [4.0, 4.1, 4.2]
    ends = {
      "f32": full,
      name: [x * (1 + y / 100) for x, y in zip(full, more, strict=True)],
    }
    rows = {
      codec: {
        "runs": {str(i): {"points": [{"perplexity": x}]} for i, x in enumerate(xs)}
      }
      for codec, xs in ends.items()
    }
    record[part] = {
      "title": "A net, of some size",
      "metric": "perplexity",
      "steps": 12_000,
      "rows": rows,
    }
  return record


@pytest.mark.parametrize(
  "more, expected",
  [
    ([0.7, 0.8, 0.75], "holds"),
    ([0.2, 0.9, 1.6], None),
    ([1.7, 1.8, 1.75], "does not"),
  ],
)
def test_a_long_training_says_how_perplexed_a_sparse_codec_is(more, expected):
  record = perplexities("RedSync", long=more)
  look = elsewhere.redsync("long", ["RedSync"], {"at_most": 1.0}, trained=True)
  (seen,) = look(record)
  assert seen.holds is {"holds": True, "does not": False}.get(expected)
  assert seen.rank == verdicts.OWN
  assert seen.numbers.startswith("A net, 12,000 steps: RedSync, % of perplexity: +")


def test_images_of_a_sparse_codec_have_points_of_accuracy():
  ends = {"f32": [98.0, 98.5], "RedSync": [97.0, 97.5]}
  rows = {
    codec: {"runs": {str(i): {"points": [{"accuracy": x}]} for i, x in enumerate(xs)}}
    for codec, xs in ends.items()
  }
  part = {"title": "A net", "metric": "accuracy", "steps": 200, "rows": rows}
  (seen,) = elsewhere.redsync("digits", ["RedSync"], {"at_least": -1.0})(
    {"digits": part}
  )
  assert seen[:3] == (
    True,
    "A net, 200 steps: RedSync -1.00 ± 0.00 (2 seeds)",
    verdicts.USUAL,
  )


@pytest.mark.parametrize(
  "ends, holds, rank",
  [
    ([90.0, 91.0, 92.0], True, verdicts.USUAL),
    ([80.0, 81.0, 82.0], False, verdicts.USUAL),
    ([89.0, 91.0, 93.0], None, verdicts.FEW),
  ],
)
def test_digits_count_where_they_tell(ends, holds, rank):
  rows = [{"codec": "f32", "accuracy_percent": [90.0, 91.0, 92.0]}]
  rows += [{"codec": "a", "accuracy_percent": ends}]
  record = [{"title": "8 workers; mean", "rows": rows}, {"title": "LARS", "rows": rows}]
  look = elsewhere.on_digits(["a", "b"], {"at_least": -0.2}, of="8 workers")
  (seen,) = look(record)
  assert (seen.holds, seen.rank) == (holds, rank)
