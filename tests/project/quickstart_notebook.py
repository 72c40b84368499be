"""Writes the quickstart as a notebook: python -m tests.project.quickstart_notebook.

Blocks of consoles and doctests are cells, too, which jupytext would leave as text.
"""

import doctest
import json
import re
import textwrap
from urllib.parse import urljoin

from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "start" / "quickstart.md"
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
_SITE = "https://gradcomp.readthedocs.io/en/stable/start/"

_FIRST = """\
# Installs what is missing, as on a hosted notebook.
import importlib.util, shutil, subprocess, sys

is_there = lambda name: importlib.util.find_spec(name) is not None
device = "cuda12" if shutil.which("nvidia-smi") else "cpu"
missing = [] if is_there("gradcomp") else ["gradcomp", f"'jax[{device}]'"]
if not (is_there("orbax") and is_there("orbax.checkpoint")):
  missing.append("orbax-checkpoint")
if missing:
  packages = " ".join(missing)
  %pip install --quiet {packages}

import jax

jax.config.update("jax_platforms", "cpu")  # which emulates the workers
%config InteractiveShell.ast_node_interactivity = "all"
"""


def notebook():
  fences = re.compile(r"^```(\w+)\n(.*?)^```\n", re.M | re.S)
  title, *rest = fences.split(PAGE.read_text())
  cells = [_cell("markdown", _linked(title)), _cell("code", _FIRST)]
  for language, code, text in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
    cells.append(_cell("code", _CODE[language](code)))
    cells += [_cell("markdown", _linked(text))] if text.strip() else []
  for number, cell in enumerate(cells):
    cell["id"] = f"cell-{number}"
  kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
  whole = {"cells": cells, "metadata": {"kernelspec": kernel}}
  return json.dumps(whole | {"nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _in_a_process(block):
  program = f"[sys.executable, *{block.strip().removeprefix('python ')!r}.split()]"
  return f"print(subprocess.check_output({program}, text=True))"


def _without_prompts(block):
  code = ""
  for example in doctest.DocTestParser().get_examples(block):
    source = example.source
    if example.exc_msg is not None:
      body, error = textwrap.indent(source, "  "), example.exc_msg.partition(":")[0]
      source = f"try:\n{body}except {error} as error:\n  print(error)\n"
    code += source
  return code


# From a block of a language to the code of a cell.
_CODE = {"python": str, "console": _in_a_process, "pycon": _without_prompts}


def _linked(text):
  to_site = lambda x: f"]({urljoin(_SITE, x[1])}.html{x[2] or ''})"
  text = re.sub(r"\]\((?!\w+:)(\S+?)\.md(#\S+)?\)", to_site, text)
  return text.replace("](../../examples/", "](")  # where the notebook is


def _cell(kind, text):
  lines = text.strip().splitlines(keepends=True)
  more = {"execution_count": None, "outputs": []} if kind == "code" else {}
  return {"cell_type": kind, "metadata": {}, "source": lines, **more}


if __name__ == "__main__":
  NOTEBOOK.write_text(notebook())
