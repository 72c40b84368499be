"""Parsers of numbers on command lines, with errors that give the rule.

The errors are argparse's, which puts the option before them.
"""

import argparse
from collections.abc import Callable


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
  """Returns a parser of integers from ``least`` to ``most``."""

  def parse(text: str) -> int:
    try:
      value = int(text)
    except ValueError:
      raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
    if value < least:
      raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    if value > most:
      raise argparse.ArgumentTypeError(f"must be at most {most}, got {text}")
    return value

  return parse


def real(rule: str, allowed: Callable[[float], bool]) -> Callable[[str], float]:
  """Returns a parser of numbers that are allowed; NaN never is."""

  def parse(text: str) -> float:
    try:
      value = float(text)
    except ValueError:
      raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not allowed(value):
      raise argparse.ArgumentTypeError(f"must be {rule}, got {text}")
    return value

  return parse


def bucket(text: str) -> int:
  """Parses the size of a bucket, a multiple of 32."""
  value = whole(32)(text)
  if value % 32:
    raise argparse.ArgumentTypeError(f"must be a multiple of 32, got {text}")
  return value


_MOST = 1e9  # below which float32 holds squares and sums of a few

positive = whole(1)
natural = whole(0)
seed = whole(0, 2**32 - 1)
devices = whole(1, 4096)
positive_float = real(f"above 0 and at most {_MOST:g}", lambda x: 0 < x <= _MOST)
at_least_0 = real(f"from 0 to {_MOST:g}", lambda x: 0 <= x <= _MOST)
fraction = real("in (0, 1)", lambda x: 0 < x < 1)
share = real("in [0, 1)", lambda x: 0 <= x < 1)
part = real("in (0, 1]", lambda x: 0 < x <= 1)
