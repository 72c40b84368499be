"""Concludes from runs that a claim holds, that it does not, or that they cannot tell.

Each judge looks at all that bears on its claim: trainings, times, and records of other
benchmarks. What was seen in one setting holds where the whole interval of 95 % is on
the claim's side of its limit, does not where the whole interval is on the other side,
and cannot tell where the interval holds the limit.

Two one-sided tests at 5 % would take the interval of 90 %. It is that of 95 % here,
which all tables print, so that a reader can check a verdict by eye. That is stricter:
each test is at 2.5 %.
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
Rule = Callable[[Spread], bool | None]


class Verdict(NamedTuple):
  """Holds what the runs say of a claim, and lines with the numbers that say it."""

  verdict: Word
  numbers: tuple[str, ...]


class Seen(NamedTuple):
  """Holds what one setting says.

  Attributes:
    holds: whether the claim does; None if the numbers cannot tell.
    numbers: that say it.
    rank: ``OWN`` in the paper's own setting, as far as there is one here; ``FEW`` where
      two seeds or few data cannot tell; and else ``USUAL``.
  """

  holds: bool | None
  numbers: str
  rank: int = USUAL


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
  ((name, limit),) = named.items()
  return lambda found: getattr(found, name)(limit)


def judged(found: Spread, decide: Rule, numbers: str, own: bool = False) -> Seen:
  """Returns the answer of an interval over seeds, with its rank."""
  holds = decide(found)
  few = holds is None and found.count < ENOUGH
  return Seen(holds, numbers, FEW if few else OWN if own else USUAL)


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
  if 0 < yes < len(told):
    numbers = (f"It holds in {yes} of {len(told)}", *numbers)
  least = max(1, math.ceil(share * len(told)))
  if yes >= least:
    return Verdict("holds", numbers)
  return Verdict("does not" if yes + unknown < least else "cannot tell", numbers)


def _said(seen: Seen, top: int) -> str:
  note = ": cannot tell" if seen.holds is None else ""
  return f"{seen.numbers}{note}{', and does not count' if seen.rank < top else ''}"
