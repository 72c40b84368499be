"""Budgets only fall: nothing is above one, and none stands far above what is there."""

import tomllib

from tests.project import budgets

BUDGETS = tomllib.loads(budgets.FILE.read_text())


def test_nothing_is_above_its_budget_and_none_stands_idle():
  assert not budgets.problems(budgets.counts(), BUDGETS)


def changed(**lines):
  """Counts and budgets of 1,000 lines in `kernels`, but for these lines."""
  same = {"words": {}, "names": {"gradcomp": 100}, "programs": {}, "raised": {}}
  old = {"lines": {"kernels": 1000}, **same}
  return {**same, "lines": {"kernels": 1000, **lines}}, old


def test_a_budget_is_a_bound_from_both_sides():
  said = lambda lines: budgets.problems(*changed(kernels=lines))
  assert said(1001) == ["kernels has 1001 lines, and may have 1000"]
  assert not said(1000) and not said(971)
  assert said(970) == ["kernels has 970 lines: run make budgets, it may 1000"]
  found, old = changed(new=40)
  for new, wrong in ((0, True), (60, False), (61, True)):  # a small one
    old["lines"]["new"] = new
    assert bool(budgets.problems(found, old)) is wrong


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
