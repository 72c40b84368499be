"""Judges what papers say of accuracy by the trainings of a study.

Each judge looks at every group that has what it needs, among those that the claim is
about: by default, of images and SGD. Trainings in the paper's own setting decide alone:
by default those that went to their end, since all papers' did. Differences are means
over seeds, seed by seed, with their intervals of 95 %.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pandas as pd
from scipy import stats

from benchmarks.study.analysis import Group, Spread, Study, spread
from benchmarks.study.judges import groups as chosen
from benchmarks.study.judges.groups import Chosen
from benchmarks.study.judges.verdicts import (
  ENOUGH,
  OWN,
  POINTS,
  USUAL,
  Bar,
  Judge,
  Rule,
  Seen,
  bar,
  judged,
  needing,
  of_all,
  ranked,
  rule,
)

EQUAL = 0.2  # points within which ends are equal where the paper has no number
# What is compared, by the methods of Group: how the numbers say it, and their unit.
OF = {
  "difference": ("{label} {found}", POINTS),
  "early": ("{label} {found} in the first half", f"{POINTS}, in the first half"),
  "perplexity": ("{label}, % of perplexity: {found}", "% of perplexity"),
  "training_loss": (
    "{label}, training loss: {found.mean:+.3f} ± {found.half:.3f}",
    "training loss",
  ),
}


_NO_LOSS = rule({"at_least": -EQUAL})


class Comparison(NamedTuple):
  """Says what is compared, and how it should end.

  Attributes:
    codecs: each of which should.
    ends: the rule of ``Spread`` that decides.
    than: the codec beside which they end.
    of: the method of ``Group`` that compares.
    groups: that the claim is about.
    own: those of them in the paper's own setting.
  """

  codecs: Sequence[str]
  ends: Rule
  than: str = "f32"
  of: str = "difference"
  groups: Chosen = chosen.images
  own: Chosen = chosen.trained

  def seen(self, study: Study) -> Iterator[tuple[Group, Seen]]:
    """Yields what each group says of each codec that was run in it."""
    less = "" if self.than == "f32" else f" - {self.than}"
    text, unit = OF[self.of]
    for group in filter(self.groups, study.groups):
      for codec in self.codecs:
        if found := getattr(group, self.of)(codec, self.than):
          yield (
            group,
            judged(
              found,
              self.ends,
              f"{group.name}: {codec}{less}",
              f"{text} ({{found.count}} seeds)",
              unit=unit,
              own=self.own(group),
            ),
          )

  @property
  def needs(self) -> str:
    return f"seeds of {self.than} and {' or '.join(self.codecs)}"


def compared(codecs: list[str], ends: dict[str, float], **options: Any) -> Judge:
  """Returns a judge of a ``Comparison``; ``ends``: a rule of ``Spread``: its limit."""
  found = Comparison(codecs, rule(ends), **options)
  return Judge(lambda study: (x for _, x in found.seen(study)), found.needs)


def any_workers(
  codecs: list[str], limit: float, counts: Iterable[int], groups: Chosen
) -> Judge:
  """Returns a judge of whether codecs are as good with few workers and with many.

  Trainings to their end decide alone if there are some of all counts.
  """
  needed = sorted(counts)
  every = Comparison(codecs, rule({"at_least": -limit}), groups=groups)

  @needing(f"{every.needs} with {' and '.join(map(str, needed))} workers")
  def judge(study: Study) -> Iterator[Seen]:
    found = list(every.seen(study))
    ended = [(group, x) for group, x in found if x.rank == OWN]
    usual = [(group, x._replace(rank=min(x.rank, USUAL))) for group, x in found]
    for part in (ended, usual):
      if {group.setting.workers for group, _ in part}.issuperset(needed):
        yield from (x for _, x in part)
        break

  return judge


def on_average(codecs: list[str], limit: float) -> Judge:
  """Returns a judge of whether codecs lose at most ``limit`` points on average.

  The mean of all groups is taken seed by seed, over the seeds that all of them have:
  three or more. Trainings to their end decide alone, as elsewhere.
  """

  @needing(f"{ENOUGH} seeds of f32 and {' or '.join(codecs)}")
  def judge(study: Study) -> Iterator[Seen]:
    every = [
      (chosen.trained(group), found)
      for group in filter(chosen.images, study.groups)
      for codec in codecs
      if len(found := group.differences(codec)) >= ENOUGH
    ]
    for ended in (True, False):
      found = [x for long, x in every if long or not ended]
      if found:
        means = pd.concat(found, axis=1, join="inner").mean(axis=1)
        ends = [x.mean() for x in found]
        mean = spread(means.tolist())
        label = f"the mean of {len(found)} settings"
        numbers = (
          f"{{label}}: {{found}} ({{found.count}} seeds); the worst {min(ends):+.2f}, "
          f"the best {max(ends):+.2f}"
        )
        yield judged(mean, rule({"at_least": -limit}), label, numbers, own=ended)

  return judge


def less_dropout(codec: str) -> Judge:
  """Returns a judge of whether a codec loses less where a net drops nothing."""

  @needing(f"seeds of f32 and {codec} with --dropout 0 and without")
  def judge(study: Study) -> Iterator[Seen]:
    groups = {x.setting: x for x in filter(chosen.images, study.groups)}
    for setting, group in groups.items():
      usual = groups.get(setting._replace(dropout=None))
      if setting.dropout == 0 and usual and (more := group.gained(codec, usual)):
        numbers = "{label}: {found} points better"
        own = chosen.trained(group)
        yield judged(more, rule({"above": EQUAL}), group.name, numbers, own=own)

  return judge


def larger_batch(codecs: list[str], limit: float) -> Judge:
  """Returns a judge of whether codecs lose less with more workers of a batch each."""

  @needing(f"seeds of f32 and {' or '.join(codecs)} with few and with many workers")
  def judge(study: Study) -> Iterator[Seen]:
    same: dict[Any, list[Group]] = {}
    for group in filter(chosen.images_by_adam, study.groups):
      x = group.setting
      same.setdefault((x.network, x.dataset), []).append(group)
    for groups in same.values():
      few, many = groups[0], groups[-1]  # groups are in the order of their workers
      for codec in codecs:
        if few.setting.workers < many.setting.workers and (
          more := many.gained(codec, few)
        ):
          label = f"{many.name}: {codec}"
          numbers = "{label} {found} points better than with few"
          own = chosen.trained(few)
          yield judged(more, rule({"above": limit}), label, numbers, own=own)

  return judge


def later(codec: str) -> Judge:
  """Returns a judge of whether a codec is behind float32 at first, and catches up."""

  @needing(f"seeds of f32 and {codec}, with two points of a curve or more")
  def judge(study: Study) -> Iterator[Seen]:
    for group in filter(chosen.images, study.groups):
      early, gained = group.early(codec), group.caught_up(codec)
      if early and gained:
        numbers = (
          f"{group.name}: {early} in the first half, of which {gained} come back"
        )
        parts = (
          ("in the first half", early, rule({"below": EQUAL})),
          ("what comes back", gained, rule({"above": EQUAL})),
        )
        holds = of_all([decide(found) for _, found, decide in parts])
        bars = tuple(
          bar(f"{group.name}: {part}", found, decide.limit())
          for part, found, decide in parts
        )
        rank = ranked(holds, early, chosen.trained(group))
        yield Seen(holds, numbers, rank, bars)

  return judge


class Blocked(NamedTuple):
  """Says whether arms end as float32, by which p, and by how much each differs."""

  holds: bool | None
  p: float
  differences: dict[str, Spread]

  @property
  def text(self) -> str:
    return f"p = {self.p:.3f}"

  def bars(self, where: str) -> tuple[Bar, ...]:
    """Returns a bar for each arm, beside the loss that is to be ruled out."""
    return tuple(
      bar(f"{where}: {name}", found, _NO_LOSS.limit())
      for name, found in self.differences.items()
    )


def blocked(arms: dict[str, Sequence[float]]) -> Blocked:
  """Says whether arms end as float32, by an analysis of variance with seeds as blocks.

  It is Friedman's. They do not if p is 0.05 or less. They do if it is more,
  and the intervals of all arms are above float32 less 0.2 points. Else it cannot be
  told: that no difference was found does not say that there is none.

  Example:
    >>> found = blocked({"f32": [1, 2, 3], "a": [1.1, 2, 3], "b": [1, 2.1, 3.1]})
    >>> found.holds, found.text
    (True, 'p = 0.368')
  """
  # By ranks: all arms of a seed begin alike and see the same batches.
  p = float(stats.friedmanchisquare(*arms.values()).pvalue)
  full = arms["f32"]
  differences = {
    name: spread([a - b for a, b in zip(ends, full, strict=True)])
    for name, ends in arms.items()
    if name != "f32"
  }
  within = all(_NO_LOSS(found) for found in differences.values())
  return Blocked(False if p <= 0.05 else True if within else None, p, differences)


def alike(arms: list[list[str]], groups: Chosen = chosen.images_as_dettmers) -> Judge:
  """Returns a judge of whether codecs and float32 end alike: see ``blocked``.

  ``arms``: of the codecs, and of such that are as good a test; the first that is there.
  """

  @needing(f"five seeds of f32, {', '.join(arms[0])}")
  def judge(study: Study) -> Iterator[Seen]:
    for group in filter(groups, study.groups):
      for codecs in arms:
        ends = pd.DataFrame({x: group.ends(x) for x in ["f32", *codecs]}).dropna()
        if len(ends) > 4:
          found = blocked({x: ends[x].tolist() for x in ends})
          means = ", ".join(f"{x} {statistics.fmean(ends[x]):.2f}" for x in ends)
          own = OWN if chosen.trained(group) else USUAL
          numbers = f"{group.name}: {found.text}; {means}"
          yield Seen(found.holds, numbers, own, found.bars(group.name))
          break

  return judge


def untested(needs: str) -> Judge:
  """Returns a judge of what nothing here can decide."""
  return Judge(lambda study: (), needs)
