"""The search for options, one a leaf, of least bytes within a bound on the error."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

PARTS = 1 << 15  # of the bound, in which errors are counted


class Option(NamedTuple):
  """The bytes of a way to send a leaf, and its squared error."""

  nbytes: int
  error: float


def least_bytes(leaves: Sequence[Sequence[Option]], bound: float) -> list[int] | None:
  """Returns the number of an option for each leaf, or None if it finds no sum in bound.

  It is L-GreCo's dynamic program. Errors count in parts of the bound, rounded up, so
  that the exact sum of the errors is never above it. With L leaves no choice within
  ``(1 - L / PARTS) * bound`` has fewer bytes: each leaf loses less than a part.
  """
  # The least bytes of the leaves so far, by the parts that they take together.
  least = np.full(PARTS + 1, np.inf)
  least[0] = 0
  chosen = []
  for options in leaves:
    found = np.full(PARTS + 1, np.inf)
    choice = np.zeros(PARTS + 1, np.int16)
    for number, option in enumerate(options):
      parts = _parts(option.error, bound)
      if parts > PARTS:
        continue
      reached = least[: PARTS + 1 - parts] + option.nbytes
      fewer = reached < found[parts:]
      found[parts:][fewer] = reached[fewer]
      choice[parts:][fewer] = number
    least = found
    chosen.append(choice)
  place = int(np.argmin(least))  # the fewest parts of those with equal bytes
  if not np.isfinite(least[place]):
    return None
  numbers = []
  for options, choice in zip(reversed(leaves), reversed(chosen), strict=True):
    numbers.append(int(choice[place]))
    place -= _parts(options[numbers[-1]].error, bound)
  return numbers[::-1]


def _parts(error: float, bound: float) -> int:
  """Returns the parts of the bound that cover an error, PARTS + 1 for too many."""
  if not error:
    return 0
  if error > bound:
    return PARTS + 1
  return math.ceil(Fraction(error) * PARTS / Fraction(bound))
