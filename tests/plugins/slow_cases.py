"""Gives tests the cases that a plain run leaves out."""

import pytest


def one_in(step, cases):
  """Returns parameters for one name; all but every ``step``-th are ``slow``."""
  marks = lambda number: pytest.mark.slow if number % step else ()
  return [pytest.param(case, marks=marks(i)) for i, case in enumerate(cases)]


def slow(*cases):
  """Returns parameters marked ``slow``; a tuple holds the values of several names."""
  values = [x if isinstance(x, tuple) else (x,) for x in cases]
  return [pytest.param(*x, marks=pytest.mark.slow) for x in values]
