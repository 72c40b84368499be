"""States that earlier versions saved go on with the same bits, or are refused."""

import json

import pytest

import gradcomp
from gradcomp._src.checkpoint import records
from tests.support import saved_format
from tests.support.assertions import says

FILES = sorted(saved_format.FOLDER.glob("format-*.npz"))


def test_every_format_has_its_file():
  names = [f"format-{number}.npz" for number in range(1, records.FORMAT + 1)]
  assert {path.name for path in FILES} == set(names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_saved_state_goes_on_or_is_refused(path, request):
  """If this fails, a saved state would go on with other bits.

  Then raise records.FORMAT, and write the file of the new format by ``python -m
  tests.support.saved_format``.
  """
  file = saved_format.load(path)
  saved = json.loads(str(file["record"]))
  if saved["format"] == records.FORMAT:
    gradcomp.checkpoint.check_record(saved, saved_format.record())
    if request.config.getoption("--optimize"):
      pytest.skip("the hash is that of programs that contract no floats")
    assert saved_format.goes_on(file) == str(file["goes_on"])
  else:
    with pytest.raises(ValueError, match=says("of the format", "begin with the state")):
      gradcomp.checkpoint.check_record(saved, saved_format.record())
