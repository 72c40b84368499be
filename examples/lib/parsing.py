"""Parsers of numbers on command lines, whose errors give the rule, and their help."""

import argparse
from collections.abc import Callable
from typing import Any


def number(kind: Any, rule: str, allowed: Callable[[Any], bool]) -> Callable[..., Any]:
  """Returns a parser of the integers or floats that are allowed; NaN never is."""

  def parse(text: str) -> Any:
    try:
      value = kind(text)
    except ValueError:
      said = f"must be {'an integer' if kind is int else 'a number'}, got {text!r}"
      raise argparse.ArgumentTypeError(said) from None
    if not allowed(value):
      raise argparse.ArgumentTypeError(f"must be {rule}, got {text}")
    return value

  return parse


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], Any]:
  """Returns a parser of integers from ``least`` to ``most``."""
  return number(int, f"from {least} to {most}", lambda x: least <= x <= most)


class Help(
  argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
  """Leaves the description as it is, and adds what defaults there are to options."""

  def _get_help_string(self, action: argparse.Action) -> str | None:
    return action.help if action.default is None else super()._get_help_string(action)


_MOST = 1e9  # below which float32 holds squares and sums of a few

positive = whole(1)
natural = whole(0)
seed = whole(0, 2**32 - 1)
devices = whole(1, 4096)
bucket = number(int, "a multiple of 32", lambda x: 0 < x < 2**31 and x % 32 == 0)
positive_float = number(float, f"above 0, at most {_MOST:g}", lambda x: 0 < x <= _MOST)
at_least_0 = number(float, f"from 0 to {_MOST:g}", lambda x: 0 <= x <= _MOST)
fraction = number(float, "in (0, 1)", lambda x: 0 < x < 1)
share = number(float, "in [0, 1)", lambda x: 0 <= x < 1)
part = number(float, "in (0, 1]", lambda x: 0 < x <= 1)
