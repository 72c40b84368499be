"""Checks of the numbers that cost models take, without JAX."""

import contextlib
import json
import math
import operator
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args

_Kind = TypeVar("_Kind")


def at_least_0(name: str, value: Any) -> float:
  """Returns a finite float of 0 or more; raises ValueError for other values."""
  return _number(name, "a finite number of 0 or more", value, operator.lt)


def above_0(name: str, value: Any) -> float:
  """Returns a finite float above 0; raises ValueError for other values."""
  return _number(name, "a finite number above 0", value, operator.le)


def count(name: str, value: Any) -> int:
  """Returns an integer from 1 to 2**53; raises ValueError for other values."""
  try:
    number = 0 if isinstance(value, bool) else operator.index(value)
  except TypeError:
    number = 0
  if not 1 <= number <= 2**53:
    rule = "an integer of 1 or more" + (" and at most 2**53" if number > 1 else "")
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
  return number


def one_of(name: str, choices: Any, value: Any) -> None:
  """Raises ValueError for values that a Literal does not have."""
  if value not in get_args(choices):
    raise ValueError(f"`{name}` must be one of {get_args(choices)}, got {value!r}.")


def instance_of(name: str, kind: type[_Kind], value: Any) -> _Kind:
  """Returns an instance of a class; raises TypeError for other values."""
  if not isinstance(value, kind):
    raise TypeError(f"`{name}` must be a {kind.__name__}, got {value!r}.")
  return value


@contextlib.contextmanager
def made_from(path: str | os.PathLike[str], writer: str) -> Iterator[Any]:
  """Yields the JSON in a file; raises ValueError if no object can be made of it."""
  # `writer` names the method that writes such files.
  try:
    yield json.loads(pathlib.Path(path).read_bytes())
  except (ValueError, TypeError, KeyError, RecursionError) as error:
    raise ValueError(
      f"`path` must be a file of {writer}, got {path}, which is cut or damaged, or "
      f"holds something else ({type(error).__name__}: {error}); measure anew and save."
    ) from error


def _number(
  name: str, rule: str, value: Any, refuses: Callable[[float, float], bool]
) -> float:
  try:
    if isinstance(value, bool | str):
      raise TypeError
    number = float(value)
    if not math.isfinite(number):
      raise OverflowError
    if refuses(number, 0.0):
      raise OverflowError
  except (TypeError, ValueError, OverflowError):
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.") from None
  return number
