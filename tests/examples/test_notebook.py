"""The quickstart's notebook is the page of today, and runs."""

import nbclient
import nbformat
import pytest

from tests.project import quickstart_notebook
from tests.support.pages import ROOT


def test_the_notebook_is_the_page():
  """``python -m tests.project.quickstart_notebook`` writes it."""
  written = quickstart_notebook.NOTEBOOK.read_text()
  assert written == quickstart_notebook.notebook()
  nbformat.validate(nbformat.reads(written, as_version=4))


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
  """In a kernel of its own; the test of the page checks its results."""
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  book = nbformat.read(quickstart_notebook.NOTEBOOK, as_version=4)
  place = {"metadata": {"path": str(tmp_path)}}
  nbclient.NotebookClient(book, timeout=200, resources=place).execute()
  last = book.cells[-1].outputs
  assert "`saved` must be the record of a state" in "".join(x.text for x in last)
