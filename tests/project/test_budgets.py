"""Budgets only fall: nothing is above one, and none stands far above what is there."""

import tomllib

from tests.project import budgets

BUDGETS = tomllib.loads(budgets.FILE.read_text())


def test_nothing_is_above_its_budget_and_none_stands_idle():
  assert not budgets.problems(budgets.counts(), BUDGETS)


def changed(**lines):
  """Counts and budgets of 1,000 lines in `kernels`, but for these lines."""
  found = {"lines": {"kernels": 1000, **lines}, "words": {}, "names": {"gradcomp": 100}}
  old = {"lines": {"kernels": 1000}, "words": {}, "names": {"gradcomp": 100}}
  return found, {**old, "programs": {"make test": 5}, "raised": {}}


def test_a_budget_is_a_bound_from_both_sides():
  said = lambda lines: budgets.problems(*changed(kernels=lines))
  assert said(1001) == ["kernels has 1001 lines, and may have 1000"]
  assert not said(1000) and not said(971)
  assert said(970) == ["kernels has 970 lines: run make budgets, it may 1000"]
  found, old = changed(new=40)
  assert budgets.problems(found, old) == ["new has 40 lines, and may have 0"]
  small = {**old, "lines": {"kernels": 1000, "new": 60}}
  assert not budgets.problems(found, small)
  small["lines"]["new"] = 61
  assert budgets.problems(found, small)


def test_they_are_written_down_and_never_up():
  found, old = changed(kernels=900, new=40)
  old["lines"]["gone"] = 5
  assert budgets.lowered(found, old)["lines"] == {"kernels": 900, "new": 40}
  found, old = changed(kernels=1001)
  assert budgets.lowered(found, old) == old
  raised = budgets.lowered(found, old, "A decoder for a format.")
  assert raised["lines"] == {"kernels": 1001}
  assert raised["raised"] == {"kernels": "1000 to 1001 lines: A decoder for a format."}
  assert not budgets.problems(found, raised)


def test_the_file_is_what_is_written():
  text = budgets.FILE.read_text()
  assert budgets.written(text, BUDGETS) == text
  other = budgets.written(text, {**BUDGETS, "raised": {"kernels": 'Says "why".'}})
  assert tomllib.loads(other)["raised"] == {"kernels": 'Says "why".'}
