"""The quickstart's notebook is the page of today, and runs."""

import importlib.util
from unittest import mock

import nbclient
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from tests.project import quickstart_notebook
from tests.support.pages import ROOT


def test_the_notebook_is_the_page():
  """``python -m tests.project.quickstart_notebook`` writes it."""
  written = quickstart_notebook.NOTEBOOK.read_text()
  assert written == quickstart_notebook.notebook()
  nbformat.validate(nbformat.reads(written, as_version=4))


@pytest.mark.parametrize("missing", ["", "orbax", "orbax.checkpoint", "gradcomp"])
def test_the_first_cell_installs_what_is_missing(missing, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != missing or None)
  book = nbformat.read(quickstart_notebook.NOTEBOOK, as_version=4)
  code = next(cell.source for cell in book.cells if cell.cell_type == "code")
  names = {"get_ipython": mock.MagicMock()}
  exec(TransformerManager().transform_cell(code), names)
  magics = names["get_ipython"]().run_line_magic.call_args_list
  installs = [call.args[1] for call in magics if call.args[0] == "pip"]
  assert installs == ["install --quiet {packages}"] * bool(missing)
  if missing:
    found = names["packages"].split()
    assert ("orbax-checkpoint" in found) == missing.startswith("orbax")
    assert ("gradcomp" in found) == (missing == "gradcomp") == (len(found) > 1)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
  """In a kernel of its own; the test of the page checks its results."""
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  book = nbformat.read(quickstart_notebook.NOTEBOOK, as_version=4)
  place = {"metadata": {"path": str(tmp_path)}}
  nbclient.NotebookClient(book, timeout=200, resources=place).execute()
  last = [cell for cell in book.cells if cell.cell_type == "code"][-1].outputs
  assert "`saved` must be the record of a state" in "".join(x.text for x in last)
