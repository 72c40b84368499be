"""A state that was saved goes on with the same bits."""

import json

import pytest

import gradcomp
from gradcomp._src.checkpoint import records
from tests.support import saved_format


def test_a_saved_state_goes_on(request):
  """If this fails, a saved state would go on with other bits.

  Then write the file anew by ``python -m tests.support.saved_format``; from the first
  release on raise records.FORMAT before.
  """
  file = saved_format.load(saved_format.FOLDER / f"format-{records.FORMAT}.npz")
  saved = json.loads(str(file["record"]))
  gradcomp.checkpoint.check_record(saved, saved_format.record())
  if request.config.getoption("--optimize"):
    pytest.skip("the hash is that of programs that contract no floats")
  assert saved_format.goes_on(file) == str(file["goes_on"])
