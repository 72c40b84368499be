"""The deliberate breaks still fit the sources, and their tests are still there."""

import ast
from pathlib import Path

import breaks

ROOT = Path(__file__).parent.parent


def test_every_edit_applies_and_every_catcher_exists():
  names = {}
  for case in breaks.read(""):
    assert case.applied(ROOT) != (ROOT / case.file).read_text(), case.name
    file, _, test = case.catcher.partition("::")
    if file not in names:
      body = ast.parse((ROOT / file).read_text()).body
      names[file] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    assert test in names[file], case.name
