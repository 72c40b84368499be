"""The deliberate breaks still fit the sources, and plain runs have their tests."""

import ast

from tests.breaks import run as breaks
from tests.support.pages import ROOT


def plain_tests(path):
  """The names of functions that are not slow in all of their cases."""
  return {
    node.name
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
    and "pytest.mark.slow" not in map(ast.unparse, node.decorator_list)
  }


def test_every_edit_applies_and_every_catcher_exists():
  names, wrong = {}, []
  for case in breaks.read(""):
    file, _, test = case.catcher.partition("::")
    try:
      case.applied(ROOT)
      if file not in names:
        names[file] = plain_tests(ROOT / file)
    except (OSError, SyntaxError, ValueError) as error:
      wrong.append(f"{case.name}: {error}")
    else:
      if test not in names[file]:
        wrong.append(f"{case.name}: {case.catcher} does not exist, or is slow.")
  assert not wrong, "\n".join(wrong)
