"""The deliberate breaks still fit the sources, and their tests are still there."""

import ast

from tests.breaks import run as breaks
from tests.support.pages import ROOT


def test_every_edit_applies_and_every_catcher_exists():
  names, wrong = {}, []
  for case in breaks.read(""):
    file, _, test = case.catcher.partition("::")
    try:
      case.applied(ROOT)
      if file not in names:
        body = ast.parse((ROOT / file).read_text()).body
        names[file] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    except (OSError, SyntaxError, ValueError) as error:
      wrong.append(f"{case.name}: {error}")
    else:
      if test not in names[file]:
        wrong.append(f"{case.name}: {case.catcher} does not exist.")
  assert not wrong, "\n".join(wrong)
