"""A plan compares bits for each leaf with the other candidates."""

import numpy as np
import pytest

import gradcomp
from gradcomp import __main__
from gradcomp._src.cost.planner.candidates import packaged_speeds
from gradcomp.codecs import QSGD, Sign
from gradcomp.cost import allocate
from tests.support.cases.plan import BY_NAME, QSGD4, pair, plan

SHAPE = (512, 512)
RANDOM = np.random.default_rng(0)
LIKE = {
  name: scale * RANDOM.normal(size=SHAPE).astype(np.float32)
  for name, scale in (("a", 1), ("b", 0.01), ("c", 0.01))
}
FOUR, EIGHT = BY_NAME["QSGD-4"], BY_NAME["QSGD-8"]


@pytest.fixture(scope="module")
def found():
  return allocate([LIKE], candidates=[QSGD(bits=bits) for bits in (2, 3, 5)])


def test_a_plan_takes_it_where_it_is_faster(found):
  own = found.candidate
  options = {"budget": "aggressive", "candidates": [*QSGD4, own], "gradients": LIKE}
  planned = plan(LIKE, **options)
  assert pair(planned)[0] == "allocated"
  rows = {x.candidate.name: x for x in planned.rows if x.exchange.name == "all_gather"}
  four, less = rows["QSGD-4"], rows["allocated"]
  assert less.explanation.bytes_sent < four.explanation.bytes_sent
  # The uniform codec's loss is measured by another drawing of bits.
  assert less.error <= four.error * 1.02
  chosen = {x.path: x.codec for x in planned.explanation.leaves}
  assert chosen == {f"['{leaf.path}']": leaf.codec for leaf in found.leaves}


def test_its_speeds_are_those_of_the_nearest_bits(found):
  """Leaves of 2 and 5 bits have the seconds of 4 bits each, where 4 and 8 are known."""
  speeds = {x.name: packaged_speeds("cpu")[x.name] for x in (FOUR, EIGHT)}
  options = {"budget": "aggressive", "candidates": [found.candidate], "speeds": speeds}
  planned = plan(LIKE, **options)
  assert {leaf.codec.bits for leaf in found.leaves} == {2, 5}
  elements = 3 * 512 * 512
  at_one_speed = elements * speeds["QSGD-4"].encode
  row = next(x for x in planned.rows if x.exchange.name == "all_gather" and x.error)
  assert row.predicted.breakdown.encode == pytest.approx(at_one_speed)


def test_it_is_refused_with_a_reason(found):
  options = {"candidates": [found.candidate]}
  (refusal,) = plan(LIKE, **options).refused
  assert "no training of the study" in refusal.reason
  low = allocate([LIKE], candidates=[Sign(), QSGD(bits=5)]).candidate
  assert low.biased and low.feedback
  refused = plan(LIKE, budget="aggressive", candidates=[low]).refused
  assert any("none of a codec like Sign()" in x.reason for x in refused)


def test_the_command_line_reads_gradients(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(gradcomp.cost, "CANDIDATES", (FOUR,), raising=False)
  file = tmp_path / "step.npz"
  np.savez(file, **LIKE)
  words = f"plan --gradients {file} --workers 4 --gbit 1 --budget aggressive".split()
  __main__.main(words)
  said = capsys.readouterr().out
  assert "fewer bytes than QSGD()." in said
  assert "compress: allocated" in said
  np.savez(file, a=np.full(SHAPE, np.nan))
  wrong = {
    "must be finite, but number 0 has nan in a": words,
    "--gradients, and not both": [*words, "--params", "1e6"],
    "No such file": [*words[:2], "none.npz", *words[3:]],
  }
  for message, given in wrong.items():
    with pytest.raises(SystemExit) as ended:
      __main__.main(given)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
