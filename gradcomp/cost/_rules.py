"""Checks the numbers of performance models, without JAX."""

import math
from typing import Any

AT_LEAST_0 = "a finite number of 0 or more"
ABOVE_0 = "a finite number above 0"


def at_least_0(name: str, value: Any) -> float:
  """Returns a finite float of 0 or more; ValueError for all else."""
  number = _number(name, AT_LEAST_0, value)
  if number < 0:
    raise ValueError(f"`{name}` must be {AT_LEAST_0}, got {value!r}.")
  return number


def above_0(name: str, value: Any) -> float:
  """Returns a finite float above 0; ValueError for all else."""
  number = _number(name, ABOVE_0, value)
  if number <= 0:
    raise ValueError(f"`{name}` must be {ABOVE_0}, got {value!r}.")
  return number


def count(name: str, value: Any) -> int:
  """Returns a Python integer of 1 or more; ValueError for all else."""
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise ValueError(f"`{name}` must be an integer of 1 or more, got {value!r}.")
  return value


def _number(name: str, rule: str, value: Any) -> float:
  try:
    if isinstance(value, bool | str):
      raise TypeError
    number = float(value)
  except (TypeError, ValueError, OverflowError):
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.") from None
  if not math.isfinite(number):
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
  return number
