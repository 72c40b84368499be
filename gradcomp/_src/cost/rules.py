"""Checks of the numbers that cost models take, and their files."""

import functools
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Self

from gradcomp._src import checks


def _number(rule: str, least: float, name: str, value: Any) -> float:
  try:
    number = math.nan if isinstance(value, bool | str) else float(value)
  except (TypeError, ValueError, OverflowError):
    number = math.nan
  if not least <= number < math.inf:
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
  return number


# Each returns a number, also of NumPy's and JAX's; ValueError for other values.
at_least_0 = functools.partial(_number, "a finite number of 0 or more", 0.0)
above_0 = functools.partial(_number, "a finite number above 0", math.ulp(0.0))
count = checks.integer("an integer of 1 or more and at most 2**53", 1, 2**53).check
SECONDS, ABOVE_0 = checks.Rule(at_least_0), checks.Rule(above_0)
COUNT = checks.Rule(count)


class Kept:
  """A base of frozen dataclasses of numbers, and of dicts by pairs, kept as JSON."""

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes it to a file, as JSON."""
    listed = lambda x: [[*key, value] for key, value in sorted(x.items())]
    kept = lambda x: listed(x) if isinstance(x, Mapping) else x
    content = {name: kept(x) for name, x in vars(self).items()}
    pathlib.Path(path).write_text(json.dumps(content, indent=1) + "\n")

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> Self:
    """Reads the file that :meth:`save` wrote; ValueError for another."""
    paired = lambda x: {(name, workers): value for name, workers, value in x}
    try:
      content = json.loads(pathlib.Path(path).read_bytes())
      each = {k: paired(x) if isinstance(x, list) else x for k, x in content.items()}
      return cls(**each)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
      raise ValueError(
        f"`path` must be a file of {cls.__name__}.save, got {path}, which is cut or "
        f"damaged, or holds something else ({type(error).__name__}: {error}); measure "
        "anew and save."
      ) from error
