"""Concludes from runs that a claim holds, that it does not, or that they cannot tell.

Each judge looks at all that bears on its claim: trainings, times, and records of other
benchmarks. What was seen in one setting holds where the whole interval of 95 % is on
the claim's side of its limit, does not where the whole interval is on the other side,
and cannot tell where the interval holds the limit.

Two one-sided tests at 5 % would take the interval of 90 %. It is that of 95 % here,
which all tables print, so that a reader can check a verdict by eye. That is stricter:
each test is at 2.5 %. Where there is an interval, or a number, a picture can show it
beside its limit: so each answer has ``Bar``s.
"""

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from benchmarks.study.analysis import Spread, Study

Word = Literal["holds", "does not", "cannot tell", "not tested"]
WORDS: tuple[Word, ...] = ("holds", "does not", "cannot tell", "not tested")
ENOUGH = 3  # seeds; the interval of two is 12.7 standard errors to each side
# Ranks of what was seen. Only those of the highest rank decide.
FEW, USUAL, OWN = 0, 1, 2
POINTS = "points of accuracy"  # the unit of most limits
# How a row of a picture is called, by what its setting says.
_CALLED: dict[bool | None, str] = {
  True: "holds",
  False: "does not",
  None: "cannot tell",
}
APART = "does not count"


class Limit(NamedTuple):
  """Says from where on a claim holds.

  Attributes:
    value: there.
    above: whether it holds above it, and not below.
    unit: of the value, and of the bars beside it.
    theirs: the paper's effect where the limit is none; a claim that something is worse
      does not hold where an interval excludes it.
  """

  value: float
  above: bool
  unit: str = POINTS
  theirs: float | None = None


class Bar(NamedTuple):
  """Holds a number, its interval, which may have no length, and its limit."""

  label: str
  low: float
  mean: float
  high: float
  limit: Limit


class Rule(NamedTuple):
  """Returns whether a claim holds when called with a ``Spread``.

  Attributes:
    name: of a method of ``Spread``.
    number: that it takes.
  """

  name: str
  number: float

  def __call__(self, found: Spread) -> bool | None:
    return getattr(found, self.name)(self.number)

  def limit(self, unit: str = POINTS) -> Limit:
    above = self.name in ("at_least", "above")
    if self.name in ("at_least", "at_most"):
      return Limit(self.number, above, unit)
    return Limit(0.0, above, unit, self.number if above else -self.number)


class Verdict(NamedTuple):
  """Holds what the runs say of a claim.

  Attributes:
    verdict: that they come to.
    numbers: lines with the numbers that say it.
    drawn: the bars of a picture, each with what its setting says, or that it does not
      count.
  """

  verdict: Word
  numbers: tuple[str, ...]
  drawn: tuple[tuple[str, Bar], ...] = ()


class Seen(NamedTuple):
  """Holds what one setting says.

  Attributes:
    holds: whether the claim does; None if the numbers cannot tell.
    numbers: that say it.
    rank: ``OWN`` in the paper's own setting, as far as there is one here; ``FEW`` where
      two seeds or few data cannot tell; and else ``USUAL``.
    bars: that show it.
  """

  holds: bool | None
  numbers: str
  rank: int = USUAL
  bars: tuple[Bar, ...] = ()


class Judge(NamedTuple):
  """Returns a verdict when called with a study.

  Attributes:
    look: yields all that a study says of the claim.
    needs: says what is missing where that is nothing.
    share: of the settings that decide, in which the claim must hold. With 0 one does,
      as where a paper says that something can be.
  """

  look: Callable[[Study], Iterable[Seen]]
  needs: str
  share: float = 1.0

  def __call__(self, study: Study) -> Verdict:
    return concluded(self.look(study), self.needs, self.share)

  def beside(self, others: Iterable["Judge"]) -> "Judge":
    """Returns a judge that looks at the records of others, too."""
    every = (self, *others)
    return self._replace(
      look=lambda study: (x for one in every for x in one.look(study))
    )


def needing(
  needs: str, share: float = 1.0
) -> Callable[[Callable[[Study], Iterable[Seen]]], Judge]:
  """Makes a judge of what yields all that a study says."""
  return lambda look: Judge(look, needs, share)


def rule(named: dict[str, float]) -> Rule:
  """Returns one of the rules of ``Spread`` with its limit, as claims name it.

  Example:
    >>> rule({"at_least": -0.2})(Spread(mean=-0.05, half=0.1, count=5))
    True
  """
  ((name, number),) = named.items()
  return Rule(name, number)


def bar(label: str, found: Spread, limit: Limit) -> Bar:
  """Returns the bar of an interval over seeds; that of one seed has no length."""
  half = 0.0 if math.isnan(found.half) else found.half
  return Bar(label, found.mean - half, found.mean, found.mean + half, limit)


def judged(
  found: Spread,
  decide: Rule,
  label: str,
  numbers: str = "{label} {found} ({found.count} seeds)",
  *,
  unit: str = POINTS,
  own: bool = False,
) -> Seen:
  """Returns the answer of an interval over seeds, with its rank and its bar.

  ``label``: of the setting and the codec. ``numbers``: how they are said with it.
  """
  return Seen(
    holds := decide(found),
    numbers.format(label=label, found=found),
    ranked(holds, found, own),
    (bar(label, found, decide.limit(unit)),),
  )


def ranked(holds: bool | None, found: Spread, own: bool) -> int:
  """Returns the rank of an answer by an interval over seeds."""
  few = holds is None and found.count < ENOUGH
  return FEW if few else OWN if own else USUAL


def of_all(told: Iterable[bool | None]) -> bool | None:
  """Says whether all of some answers are yes; None if that depends on unknown ones."""
  found = list(told)
  if False in found:
    return False
  return None if None in found else True


def concluded(seen: Iterable[Seen], needs: str, share: float = 1.0) -> Verdict:
  """Concludes from the highest rank of all that was seen.

  The claim holds where it does in the share of it, whatever those say that cannot tell;
  it does not where they could not make up the share.
  """
  found = list(seen)
  if not found:
    return Verdict("not tested", (f"It needs {needs}",))
  top = max(x.rank for x in found)
  told = [x.holds for x in found if x.rank == top]
  yes, unknown = told.count(True), told.count(None)
  numbers = tuple(_said(x, top) for x in found)
  drawn = tuple(
    (APART if x.rank < top else _CALLED[x.holds], bar) for x in found for bar in x.bars
  )
  if 0 < yes < len(told):
    numbers = (f"It holds in {yes} of {len(told)}", *numbers)
  least = max(1, math.ceil(share * len(told)))
  if yes >= least:
    return Verdict("holds", numbers, drawn)
  word: Word = "does not" if yes + unknown < least else "cannot tell"
  return Verdict(word, numbers, drawn)


def _said(seen: Seen, top: int) -> str:
  note = ": cannot tell" if seen.holds is None else ""
  return f"{seen.numbers}{note}{', and does not count' if seen.rank < top else ''}"
