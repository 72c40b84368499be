"""What the records of other benchmarks say of each finding that they bear on."""

import json

import pytest

from benchmarks.study import findings
from benchmarks.training.model_parallel.layer_errors import PAPER

TYPES = ("dynamic_tree", "linear", "mantissa", "static_tree")


def accuracies(*, types, one_bit=10.0, gradients=97.5):
  """A record of training/model_parallel/dense.py: float32 has 97 and 98 %."""
  ends = {name: [97.0, 98.0] for name in ("f32", *TYPES)}
  ends["linear"] = [types, types + 1]
  coarse = {"gradients, with feedback": gradients, "activations": one_bit}
  return {
    "types": [{"unit": "relu", "way": "model", "accuracy_percent": ends}],
    "coarse": {what: {"1 bit": [x, x + 1]} for what, x in coarse.items()},
  }


def network(name, more):
  """A record of training/model_parallel/nets.py: float32 has an error of 2.5 %."""
  ends = {"f32": [97, 98]} | {x: [97 - more, 98 - more] for x in TYPES}
  return {"accuracy_percent": {name: ends}}


def weights(**changed):
  """A record of training/gradients.py, whose first layer is as the papers say."""
  good = {
    "zeros_clipped": 0.71,
    "shorter": 0.012,
    "turned": 2.5,
    "moment": 5.0,
    "moment_clipped": 1.7,
    "largest_exponent": -2,
  }
  return {"weights": {"first": good, "second": good | changed}}


def perplexities(name, *less):
  f32 = [{"points": [{"perplexity": 4.0}]} for _ in less]
  runs = [{"points": [{"perplexity": 4.0 * (1 + x / 100)}]} for x in less]
  as_rows = lambda found: {"runs": {str(seed): x for seed, x in enumerate(found)}}
  rows = {"f32": as_rows(f32)}
  for density in ("1 %", "0.1 %"):
    rows[name.format(density)] = as_rows(runs)
  return {"language-long": {"steps": 12000, "rows": rows}}


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


def few(codec, than, points):
  rows = [
    {"codec": than, "accuracy_percent": [90, 91]},
    {"codec": codec, "accuracy_percent": [90 + points, 91 + points]},
  ]
  return [{"title": "momentum", "rows": []}, {"title": "Adam, 100", "rows": rows}]


def selection(trimmed):
  seconds = {"exact": 1.0, "sampled, again": 0.1, "trimmed": trimmed}
  return {"machine": {}, "normal, 16777216, 0.001": {"seconds": seconds}}


def union(share):
  return {"workers": 16, "density": 0.001, "union": share}


REDSYNC = "RedSync {}, dense first"
# For each claim: what bears it out, and what does not.
CASES = {
  "Dettmers' four types of 8 bits on": (accuracies(types=97.0), accuracies(types=90.0)),
  "Dettmers' four types of 8 bits in": tuple(
    network("locally connected", more) for more in (0.04, 0.06)
  ),
  "The dynamic tree in": tuple(
    network("like AlexNet, 4 sub-batches", more) for more in (0.1, 0.3)
  ),
  "One bit does": (accuracies(types=97.0), accuracies(types=97.0, one_bit=97.0)),
  "Of four types": (relative(1.0), relative(3.0)),
  "Errors of 8 bits": (layers(1.9), layers(2.1)),
  "Most ternary": (weights(), weights(zeros_clipped=0.69)),
  "Clipping at": (weights(), weights(turned=4.0)),
  "Clipping brings": (weights(), weights(moment_clipped=6.0)),
  "Gradients of layers": (weights(largest_exponent=-4), weights(largest_exponent=-3)),
  "Sums of 256": (roundoff(16), roundoff(32)),
  "With Adam and few images 2 bits": tuple(
    few("QSGD, 2 bits, buckets of 128", "f32", x) for x in (-1.0, 0.5)
  ),
  "With Adam and few images TernGrad": tuple(
    few("TernGrad, not clipped", "TernGrad", x) for x in (-1.0, 0.5)
  ),
  "APS with 8 bits ends within 0.2 points of float32 with": (lars(0.1), lars(-2.0)),
  "Workers that send": (union(0.0155), union(0.005)),
  "After long training RedSync has": (
    perplexities(REDSYNC, 0.7, 0.71),
    perplexities(REDSYNC, 1.3, 1.31),
  ),
  "After long training RedSync with": (
    perplexities(f"{REDSYNC}, ASQ", 0.7, 0.71),
    perplexities(f"{REDSYNC}, ASQ", 1.3, 1.31),
  ),
  "Trimmed and": (selection(0.5), selection(2.0)),
}


@pytest.mark.parametrize("start", CASES)
def test_each_verdict_comes_out_each_way(tmp_path, monkeypatch, start):
  (finding,) = (x for x in findings.ELSEWHERE if x.claim.startswith(start))
  monkeypatch.setattr(findings, "RESULTS", tmp_path)
  nothing = finding.judge(None)
  assert nothing.verdict == "not tested"
  record = nothing.numbers[0].removeprefix("It needs ").split(",")[0]
  for expected, found in zip(("holds", "does not"), CASES[start], strict=True):
    (tmp_path / record).parent.mkdir(exist_ok=True)
    (tmp_path / record).write_text(json.dumps(found))
    assert finding.judge(None).verdict == expected


def test_every_claim_has_a_case():
  assert len(CASES) == len(findings.ELSEWHERE)
