"""Checks of the numbers that cost models take, and their files."""

import json
import math
import operator
import os
import pathlib
from collections.abc import Callable
from typing import Any, Self

from gradcomp._src.checks import Rule


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


class Kept:
  """A base of frozen dataclasses that are kept in files, as JSON."""

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes it to a file, as JSON."""
    pathlib.Path(path).write_text(json.dumps(self._content(), indent=1) + "\n")

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> Self:
    """Reads the file that :meth:`save` wrote.

    Raises:
      ValueError: the file holds something else.
    """
    try:
      return cls._made(json.loads(pathlib.Path(path).read_bytes()))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
      raise ValueError(
        f"`path` must be a file of {cls.__name__}.save, got {path}, which is cut or "
        f"damaged, or holds something else ({type(error).__name__}: {error}); measure "
        "anew and save."
      ) from error

  def _content(self) -> dict[str, Any]:
    return dict(vars(self))

  @classmethod
  def _made(cls, content: Any) -> Self:
    return cls(**content)


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


SECONDS = Rule(at_least_0)
ABOVE_0 = Rule(above_0)
COUNT = Rule(count)
