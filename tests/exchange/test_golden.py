"""Nothing changes a bit of any result or state, unless it means to."""

import json
import subprocess

import pytest

from gradcomp._src.version import WIRE
from tests.support import golden

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
  assert golden.digest(case) == HASHES[case.name]


def test_every_hash_has_its_case():
  """New codecs have none."""
  assert HASHES.keys() <= {case.name for case in golden.cases()}


def test_the_wire_has_the_number_of_the_hashes():
  """And of the page that specifies it."""
  assert FILE["wire"] == WIRE
  page = golden.FILE.parent.parent / "docs" / "inside" / "wire-format.md"
  assert f"This is wire {WIRE}," in page.read_text()


def committed(*command):
  """What git prints in the folder of the hashes, or nothing without a history."""
  git = ["git", "-C", str(golden.FILE.parent), *command]
  try:
    return subprocess.run(git, capture_output=True, text=True).stdout
  except FileNotFoundError:
    return ""


def test_other_bits_are_another_wire():
  """Against the file of its last two commits, where a history is there."""
  older = committed("log", "-2", "--format=%H", "--", golden.FILE.name).split()
  for commit in older:
    was = json.loads(committed("show", f"{commit}:./{golden.FILE.name}"))
    # Before there was a number, all of the file was hashes, of wire 1.
    was = was if "wire" in was else {"wire": 1, "hashes": was}
    assert not golden.rewritten(was, FILE), commit


def test_a_changed_hash_asks_for_another_number():
  """New cases do not."""
  new = {"wire": 1, "hashes": {"a": "1", "b": "2"}}
  assert not golden.rewritten({"wire": 1, "hashes": {"a": "1"}}, new)
  assert golden.rewritten({"wire": 1, "hashes": {"a": "0"}}, new) == ["a"]
  assert not golden.rewritten({"wire": 0, "hashes": {"a": "0"}}, new)
