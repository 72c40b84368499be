"""Nothing changes a bit of any result or state, unless it means to."""

import itertools
import json

import numpy as np
import pytest

from gradcomp._src.version import WIRE
from gradcomp.codecs import QSGD
from tests.support import flips, golden, recomputed

FILE = golden.read()
HASHES = FILE["hashes"]


def _parameters():
  """Every case; in a plain run those of every other kind of sum, with four workers."""
  for case in golden.cases():
    if case.name not in HASHES:
      continue
    kind = (case.codec, case.exchange) in golden.KINDS[::2]
    plain = kind and case == golden.Case(case.codec, case.exchange, 4)
    marks = () if plain else pytest.mark.slow
    yield pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", list(_parameters()))
def test_outputs_and_states_have_the_bits_that_they_had(case):
  right = HASHES[case.name]
  assert golden.digest(case) == right, recomputed.difference(case, right)


def test_every_hash_has_its_case():
  """New codecs have none."""
  assert HASHES.keys() <= {case.name for case in golden.cases()}


def test_the_wire_has_the_number_of_the_hashes():
  """And of the page that specifies it."""
  assert FILE["wire"] == WIRE
  page = golden.FILE.parent.parent / "docs" / "inside" / "wire-format.md"
  assert f"This is wire {WIRE}," in page.read_text()


def test_other_bits_are_another_wire():
  """Against the file of its last two commits, where a history is there."""
  file = "tests/golden.json"
  older = recomputed.git("log", "-2", "--format=%H", "--", file).decode().split()
  for commit in older:
    was = json.loads(recomputed.git("show", f"{commit}:{file}"))
    # Before there was a number, all of the file was hashes, of wire 1.
    was = was if "wire" in was else {"wire": 1, "hashes": was}
    assert not golden.rewritten(was, FILE), commit


def test_a_changed_hash_asks_for_another_number():
  """New cases do not."""
  new = {"wire": 1, "hashes": {"a": "1", "b": "2"}}
  assert not golden.rewritten({"wire": 1, "hashes": {"a": "1"}}, new)
  assert golden.rewritten({"wire": 1, "hashes": {"a": "0"}}, new) == ["a"]
  assert not golden.rewritten({"wire": 0, "hashes": {"a": "0"}}, new)


FLIPPED = golden.Case(QSGD(bits=4, bucket_size=64), "two_shot", 4, "error")


def flipped(steps, number, bit):
  """The place of an array of the steps, in which it flips a bit, and both words."""
  arrays = [
    (f"step {k}, {kind} {path}", part, path)
    for k, step in enumerate(steps)
    for kind, part in zip(("output", "state"), step, strict=True)
    for path in part
  ]
  place, part, path = arrays[number]
  array = np.asarray(part[path])
  bit %= 8 * array.nbytes
  at = np.unravel_index(bit // 8 // array.itemsize, array.shape)
  part[path] = flips.flip(array, bit)
  words = (x[at].view(f"u{array.itemsize}") for x in (part[path], array))
  now, then = (f"0x{word:0{2 * array.itemsize}x}" for word in words)
  index = ", ".join(map(str, at))
  return f"{place}[{index}]: {now} instead of {then}; 1 of {array.size:,} differ"


def test_a_flipped_bit_is_found_in_every_array():
  """The message has its place and both bit patterns."""
  steps = list(golden.steps(FLIPPED))
  arrays = [x for step in steps for part in step for x in part.values()]
  expected = [golden._bytes(x) for x in arrays]
  assert recomputed.compared(steps, expected) == "the same bits"
  bits = itertools.count(31, 104729)
  for number, bit in zip(range(len(expected)), bits, strict=False):
    wrong = [tuple(dict(part) for part in step) for step in steps]
    place = flipped(wrong, number, bit)
    assert recomputed.compared(wrong, expected) == place


@pytest.mark.slow
@pytest.mark.skipif(not recomputed.git("log", "-1"), reason="no history is here")
def test_an_earlier_commit_says_which_bits_were_right(monkeypatch):
  steps = list(golden.steps(FLIPPED))
  place = flipped(steps, 17, 12345)
  monkeypatch.setattr(golden, "steps", lambda case: steps)
  right = HASHES[FLIPPED.name]
  assert golden.digest(FLIPPED) != right
  assert place in recomputed.difference(FLIPPED, right)
