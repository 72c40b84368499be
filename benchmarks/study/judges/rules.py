"""Decides by intervals over seeds: each rule is a function of numbers alone.

A claim holds where the whole interval of 95 % is on its side of a limit. Where a paper
has an effect, that is excluded only where the interval lies beyond half of it: one that
holds zero and most of the effect cannot tell.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scipy import stats

from benchmarks.study.analysis import Spread

LEVEL = 0.025  # of each of two one-sided tests, as an interval of 95 % shows them
EQUAL = 0.2  # points within which ends are equal where the paper has no number
LITTLE = 5.0  # % of errors, below which limits are shares of them
POINTS = "points of accuracy"  # the unit of most limits


class Limit(NamedTuple):
  """Says from where on a claim holds."""

  value: float
  above: bool  # whether it holds above it, and not below
  unit: str = POINTS  # of the value, and of the bars beside it
  half: float | None = None  # of the paper's effect, beyond which a claim does not hold


class Rule(NamedTuple):
  """Returns whether a claim holds when called with a ``Spread``."""

  yes: float  # it holds where the whole interval is beyond this,
  no: float  # does not where the whole interval is on the other side of this,
  above: bool  # and holds above, not below

  def __call__(self, found: Spread) -> bool | None:
    sign = 1 if self.above else -1
    if sign * (found.mean - self.yes) > found.half:
      return True
    return False if sign * (self.no - found.mean) > found.half else None

  def p(self, found: Spread) -> float:
    """Returns the p of the one-sided test that decides; 1 where none does."""
    holds = self(found)
    if holds is None:
      return 1.0
    apart = abs(found.mean - (self.yes if holds else self.no))
    freedom = max(found.count - 1, 1)
    error = found.half / stats.t.isf(LEVEL, freedom)
    return float(stats.t.sf(apart / error, freedom)) if error else 0.0

  def scaled(self, factor: float) -> "Rule":
    return self._replace(yes=factor * self.yes, no=factor * self.no)

  def limit(self, unit: str = POINTS) -> Limit:
    half = None if self.yes == self.no else self.no
    return Limit(self.yes, self.above, unit, half)


def rule(named: dict[str, float]) -> Rule:
  """Returns a rule by the name and the number that a claim gives it.

  ``at_least`` and ``at_most`` are limits. ``above`` and ``below`` are effects: more or
  less than nothing, by so much in the paper. ``loses`` is that much or more.

  >>> rule({"below": 1.0}), rule({"loses": 1.0})
  (Rule(yes=0.0, no=-0.5, above=False), Rule(yes=-1.0, no=-0.5, above=False))
  """
  ((name, number),) = named.items()
  return {
    "at_least": Rule(number, number, True),
    "at_most": Rule(number, number, False),
    "above": Rule(0.0, number / 2, True),
    "below": Rule(0.0, -number / 2, False),
    "loses": Rule(-number, -number / 2, False),
  }[name]


def share(error: float, theirs: float = LITTLE) -> float:
  """Returns how much of a limit is left where float32 errs in so few percents.

  ``theirs``: its error in the paper, where that is below 5 %, too.

  >>> share(12.0), share(1.0), share(1.0, theirs=0.8)
  (1.0, 0.2, 1.0)
  """
  return min(1.0, error / theirs)


def pooled(found: Sequence[Spread]) -> Spread:
  """Pools means over seeds by their inverse variances.

  Seeds count as if those of each mean had one deviation.

  >>> print(pooled([Spread(1.0, 0.5, 5), Spread(0.0, 0.5, 5)]))
  +0.50 ± 0.29
  """
  if len(found) == 1:
    return found[0]
  errors = [max(x.half, 1e-9) / stats.t.isf(LEVEL, x.count - 1) for x in found]
  weights = [error**-2 for error in errors]
  mean = math.fsum(w * x.mean for w, x in zip(weights, found, strict=True))
  freedom = sum(x.count - 1 for x in found)
  half = float(stats.t.isf(LEVEL, freedom)) / math.sqrt(math.fsum(weights))
  return Spread(mean / math.fsum(weights), half, sum(x.count for x in found))


def holm(ps: Sequence[float]) -> list[bool]:
  """Says which of several tests decide when they are corrected for their number.

  >>> holm([0.02, 0.001, 0.012])
  [True, True, True]
  >>> holm([0.02, 0.001, 0.013])
  [False, True, False]
  """
  told = [False] * len(ps)
  for rank, k in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
    if ps[k] > LEVEL / (len(ps) - rank):
      break
    told[k] = True
  return told


def can_fail(arms: Iterable[Spread | None], scale: float = 1.0) -> bool:
  """Says whether a setting can show a loss: the whole interval of some arm does."""
  return any(x is not None and x.mean + x.half < -EQUAL * scale for x in arms)
