"""Concludes from runs that a claim holds, that it does not, or that they cannot tell.

Each judge looks at all that bears on its claim: trainings, times, and records of other
benchmarks. What was seen in one setting holds, does not, or cannot tell by ``rules``,
and what decides several settings is corrected for their number. Where there is an
interval, or a number, a picture can show it beside its limit: so each answer has
``Bar``s.
"""

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, get_args

from benchmarks.study.analysis import Spread, Study
from benchmarks.study.judges.rules import POINTS, Limit, Rule, holm

Word = Literal["holds", "does not", "not seen here", "cannot tell", "not tested"]
WORDS: tuple[Word, ...] = get_args(Word)
ENOUGH = 3  # seeds; the interval of two is 12.7 standard errors to each side
# Ranks of what was seen. Only those of the highest rank decide, and below FEW none.
FAR, BLIND, FEW, COUNTS = range(4)
_SLOW = 10  # times slower than the paper's is a link that says nothing of it
# How a row of a picture is called, by what its setting says.
_CALLED = {True: "holds", False: "does not", None: "cannot tell"}
APART = "does not count"


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
  label: str,
  numbers: str = "{label} {found} ({found.seeds})",
  *,
  unit: str = POINTS,
  rank: int = COUNTS,
) -> Seen:
  """Returns the answer of an interval over seeds, with its rank and its bar.

  ``label``: of the setting and the codec. ``numbers``: how they are said with it.
  """
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
