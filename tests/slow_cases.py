"""Gives tests the cases that a plain run leaves out."""

import pytest


def slow(*cases):
  """Returns parameters marked ``slow``; a tuple holds the values of several names."""
  return [
    pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow)
    for x in cases
  ]
