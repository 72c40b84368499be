"""Concludes from runs that a claim holds, that it does not, or that they cannot tell.

Each judge looks at all that bears on its claim: trainings, times, and records of other
benchmarks. What was seen in one setting holds, does not, or cannot tell by a ``Rule``:
a claim holds where the whole interval of 95 % is on its side of a limit. Where a paper
has an effect, that is excluded only where the interval lies beyond half of it: one that
holds zero and most of the effect cannot tell. What decides several settings is
corrected for their number. Where there is an interval, or a number, a picture can show
it beside its limit: so each answer has ``Bar``s.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from scipy import stats

from benchmarks.study.analysis import Spread, Study

LEVEL = 0.025  # of each of two one-sided tests, as an interval of 95 % shows them
EQUAL = 0.2  # points within which ends are equal where the paper has no number
LITTLE = 5.0  # % of errors, below which limits are shares of them
POINTS = "points of accuracy"  # the unit of most limits
Word = Literal["holds", "does not", "not seen here", "cannot tell", "not tested"]
WORDS: tuple[Word, ...] = get_args(Word)
ENOUGH = 3  # seeds; the interval of two is 12.7 standard errors to each side
# Ranks of what was seen. Only those of the highest rank decide, and below FEW none.
FAR, BLIND, FEW, COUNTS = range(4)
_SLOW = 10  # times slower than the paper's is a link that says nothing of it
# How a row of a picture is called, by what its setting says.
_CALLED = {True: "holds", False: "does not", None: "cannot tell"}
APART = "does not count"


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


class Bar(NamedTuple):
  """Holds a number, its interval, which may have no length, and its limit."""

  label: str
  low: float
  mean: float
  high: float
  limit: Limit


class Verdict(NamedTuple):
  """Holds what the runs say of a claim."""

  verdict: Word
  numbers: tuple[str, ...]  # lines that say it
  # The bars of a picture, each with what its setting says, or that it does not count.
  drawn: tuple[tuple[str, Bar], ...] = ()


class Seen(NamedTuple):
  """Holds what one setting says."""

  holds: bool | None  # whether the claim does; None if the numbers cannot tell
  numbers: str  # that say it
  # ``FAR`` in a setting that the claim is not about, ``BLIND`` where nothing can fail,
  # ``FEW`` where two seeds or few data cannot tell, and else ``COUNTS``.
  rank: int = COUNTS
  bars: tuple[Bar, ...] = ()  # that show it
  p: float = 0.0  # of the test that decides
  gbit: float = math.inf  # a second, that the link carries


class Judge(NamedTuple):
  """Returns a verdict when called with a study."""

  look: Callable[[Study], Iterable[Seen]]  # yields all that a study says of the claim
  needs: str  # says what is missing where that is nothing
  # Of the settings that decide, in which the claim must hold. With 0 one does, as where
  # a paper says that something can be.
  share: float = 1.0
  gbit: float = 0.0  # a second, that the paper's link carries

  def __call__(self, study: Study) -> Verdict:
    least = self.gbit / _SLOW
    found = self.look(study)
    seen = [x._replace(rank=FAR) if x.gbit < least else x for x in found]
    return concluded(seen, self.needs, self.share)

  def beside(self, others: Iterable["Judge"]) -> "Judge":
    """Returns a judge that looks at the records of others, too."""
    every = (self, *others)
    look = lambda study: (x for one in every for x in one.look(study))
    return self._replace(look=look)


def needing(needs: str) -> Callable[[Callable[[Study], Iterable[Seen]]], Judge]:
  """Makes a judge of what yields all that a study says."""
  return lambda look: Judge(look, needs)


def bar(label: str, found: Spread, limit: Limit) -> Bar:
  """Returns the bar of an interval over seeds; that of one seed has no length."""
  half = 0.0 if math.isnan(found.half) else found.half
  return Bar(label, found.mean - half, found.mean, found.mean + half, limit)


def judged(
  found: Spread,
  decide: Rule,
  label: str,  # of the setting and the codec
  numbers: str = "{label} {found} ({found.seeds})",  # how they are said with it
  *,
  unit: str = POINTS,
  rank: int = COUNTS,
) -> Seen:
  """Returns the answer of an interval over seeds, with its rank and its bar."""
  holds, shown = decide(found), bar(label, found, decide.limit(unit))
  if holds is None and found.count < ENOUGH:
    rank = min(rank, FEW)
  said = numbers.format(label=label, found=found)
  return Seen(holds, said, rank, (shown,), decide.p(found))


def concluded(seen: Iterable[Seen], needs: str, share: float = 1.0) -> Verdict:
  """Concludes from the highest rank of all that was seen.

  The claim holds where it does in the share of it, whatever those say that cannot tell;
  it does not where they could not make up the share. An answer that decides alone, a no
  or with a share of 0 a yes, must stand the correction for the number of them.
  """
  found = list(seen)
  if not found:
    return Verdict("not tested", (f"It needs {needs}",))
  top = max(FEW, *(x.rank for x in found))
  counted = [k for k, x in enumerate(found) if x.rank == top]
  alone = share == 0
  told = [x.holds for x in found]
  stands = holm([found[k].p if told[k] == alone else 1.0 for k in counted])
  for k, stood in zip(counted, stands, strict=True):
    told[k] = None if told[k] == alone and not stood else told[k]
  numbers, drawn = [], []
  for x, holds in zip(found, told, strict=True):
    unsure, apart = ": cannot tell" * (holds is None), x.rank < top
    numbers.append(f"{x.numbers}{unsure}{', and does not count' * apart}")
    drawn += [(APART if apart else _CALLED[holds], bar) for bar in x.bars]
  told = [told[k] for k in counted]
  yes, unknown = told.count(True), told.count(None)
  if 0 < yes < len(told):
    numbers.insert(0, f"It holds in {yes} of {len(told)}")
  least = max(1, math.ceil(share * len(told)))
  word: Word = "does not"
  if not counted:
    word = "cannot tell" if any(x.rank == BLIND for x in found) else "not tested"
  elif yes >= least:
    word = "holds"
  elif yes + unknown >= least:
    word = "cannot tell"
  return Verdict(word, tuple(numbers), tuple(drawn))
