"""Nothing changes a bit of any result or state, unless it means to."""

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
