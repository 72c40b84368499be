"""The deliberate breaks still fit the sources, and plain runs have their tests."""

import ast
import functools

from tests.breaks import run as breaks
from tests.support.pages import ROOT


@functools.cache
def plain_tests(file):
  """The names of functions that are not slow in all of their cases."""
  of = lambda x: map(ast.unparse, getattr(x, "decorator_list", ()))
  body = ast.parse((ROOT / file).read_text()).body
  decorators = {name: [*of(x)] for x in body for name in breaks.names(x)}
  return {name for name, x in decorators.items() if "pytest.mark.slow" not in x}


def test_every_edit_applies_and_every_catcher_exists():
  wrong = []
  for case in breaks.read():
    file, _, test = case.catcher.partition("::")
    try:
      case.applied(ROOT)
      if test not in plain_tests(file):
        wrong.append(f"{case.law}: {case.catcher} does not exist, or is slow.")
    except (OSError, SyntaxError, ValueError) as error:
      wrong.append(f"{case.law}: {error}")
  assert not wrong, "\n".join(wrong)
