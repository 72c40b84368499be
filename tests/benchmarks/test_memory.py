"""An update needs little more temporary memory than its messages and 1.5 gradients."""

import json

import pytest

from benchmarks.codecs import memory
from benchmarks.codecs.memory import Case
from benchmarks.common import cli
from tests.plugins.slow_cases import slow

pytestmark = pytest.mark.bits  # programs that XLA optimizes as for users

ROWS = json.loads((cli.RESULTS / "codecs" / "memory.json").read_text())["rows"]
RECORD = memory.read(ROWS)
PLAIN = [
  Case("bfloat16", "all_gather", "momentum"),
  Case("1-bit SGD", "all_gather", "momentum"),
  Case("8 bits, dynamic tree", "all_gather", "error"),
  Case("TopK, 0.1 %", "all_gather", "momentum"),
  Case("RandomK, 1 %", "psum", "error"),
  Case("TernGrad", "two_shot", None, memory.SEVERAL),
]
# Residuals that are stored in float32, or not at all.
CASES = [x for x in memory.cases() if x.feedback in (None, "error", "momentum")]


@pytest.mark.parametrize(
  "case", [*PLAIN, *slow(*((x,) for x in CASES if x not in PLAIN))], ids=str
)
def test_temporaries_are_the_payloads_and_one_and_a_half_gradients(case):
  """With feedback XLA holds more in some, as the record and its page say."""
  excess = memory.measure(case).excess
  assert (excess > memory.LIMIT) == (RECORD[case].excess > memory.LIMIT), excess
  if case in PLAIN:
    assert excess <= memory.LIMIT


def test_groups_hold_at_most_a_gradient_more_than_a_mean():
  """Also of several leaves, whose tiles they once joined all at a time."""
  grouped, mean = (
    memory.measure(Case(codec, exchange, None, memory.SEVERAL)).temporary
    for codec, exchange in (("QSGD, 4 bits", "hierarchical"), ("float32", "psum"))
  )
  assert grouped <= mean + 1.01


def test_what_residuals_of_fewer_bits_need():
  """A payload more than bfloat16 saves; for int8 the unsent part and random bits."""
  floats, half, quarter = (
    memory.measure(Case("QSGD, 4 bits", "two_shot", feedback)).temporary
    for feedback in ("error", "error, bfloat16", "error, int8")
  )
  assert half <= floats + 0.5 + 520 / 4096  # a payload's share of a tile's words
  assert floats + 1 < quarter < floats + 1.5
