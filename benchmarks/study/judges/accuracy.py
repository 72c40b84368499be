"""Judges what papers say of accuracy by the trainings of a study.

Each judge looks at every group that has what it needs, among those that the claim is
about: by default, of images and SGD. Differences are means over seeds, seed by seed,
with their intervals of 95 %.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
from scipy import stats

from benchmarks.study.analysis import Group, Study, in_groups, spread
from benchmarks.study.judges import verdicts
from benchmarks.study.judges.verdicts import (
  BLIND,
  COUNTS,
  ENOUGH,
  EQUAL,
  FAR,
  LITTLE,
  POINTS,
  Seen,
  judged,
  rule,
)
from benchmarks.study.settings import Setting
from benchmarks.study.tasks import TEXTS

Chosen = Callable[[Setting], bool]
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


# Which trainings a claim is about: with SGD, of images and 64 workers at most.
of_images = lambda x, optimizer: x.network not in TEXTS and x.optimizer == optimizer
images = lambda x: of_images(x, "sgd") and x.workers <= 64
usual_batches = lambda x: images(x) and x.batch <= 256  # of a step
large_batches = lambda x: images(x) and x.batch > 256
# As many workers as Han et al. have, 256.
images_of_many = lambda x: of_images(x, "sgd") and x.workers >= 256
recurrent = lambda x: x.network in ("gru", "lstm")
# MNIST, and LeNet with a polynomial, as Wen et al.'s figure 3.
on_mnist = lambda x: x.dataset.startswith("mnist")
lenet_of_wen = lambda x: (
  images(x) and x.network == "lenet" and x.schedule == "polynomial"
)
# Adam, and a batch for each worker.
images_by_adam = lambda x: of_images(x, "adam") and x.rule == "per-worker"
# Gradients of images, with SGD or with RMSProp, and activations of dense layers.
images_as_dettmers = lambda x: (
  (images(x) or of_images(x, "rmsprop")) and x.way != "model"
)
dense_model_parallel = lambda x: x.way == "model" and x.network.startswith("dense-")
# A text was read once or more; images are learned sooner.
learned = lambda x: x.network not in TEXTS or x.steps * x.batch >= 0.99 * x.epoch


def without_dropout(study: Study) -> Iterator[tuple[Group, Group]]:
  """Yields groups of ``images`` that drop nothing, each with the one that does."""
  found = {x.setting: x for x in study.about(images)}
  for setting, group in found.items():
    usual = found.get(setting._replace(dropout=None))
    if setting.dropout == 0 and usual:
      yield group, usual


def of_more_workers(study: Study) -> Iterator[tuple[Group, Group]]:
  """Yields groups of ``images_by_adam`` with most workers, each with that of fewest."""
  where = lambda group: (group.setting.network, group.setting.dataset)
  same = in_groups(study.about(images_by_adam), where)  # ordered by their workers
  for few, *_, many in (x for x in same.values() if len(x) > 1):
    if few.setting.workers < many.setting.workers:
      yield many, few


def _counts(group: Group, unit: str) -> bool:
  """Says whether a group learned, and can show a loss where points are compared."""
  arms = (group.difference(x) for x in group.runs if x != "f32")
  scale = verdicts.share(100 - group.ends("f32").mean())
  shows = not unit.startswith(POINTS) or verdicts.can_fail(arms, scale)
  return learned(group.setting) and shows


def compared(
  codecs: Sequence[str],  # each of which should
  ends: dict[str, float],  # a rule, and its number
  *,
  than: str = "f32",  # the codec beside which they end
  of: str = "difference",  # the method of ``Group`` that compares
  groups: Chosen = images,  # that the claim is about
  own: Chosen = lambda setting: True,  # those of them that decide; others are shown
  counts: Sequence[int] = (),  # of workers, all of which must be there
  error: float = LITTLE,  # float32's in the paper, in percent, where that is below 5
) -> verdicts.Judge:
  """Returns a judge of whether codecs end as they should.

  Trainings that differ in their length alone are pooled.
  """
  decide = rule(ends)
  less = "" if than == "f32" else f" - {than}"
  text, unit = OF[of]
  numbers = f"{text} ({{found.seeds}})"
  with_workers = f" with {' and '.join(map(str, counts))} workers" if counts else ""

  @verdicts.needing(f"seeds of {than} and {' or '.join(codecs)}{with_workers}")
  def judge(study: Study) -> Iterator[Seen]:
    length = lambda group: group.setting._replace(steps=0, points=0)
    pools = in_groups(study.about(groups), length)
    there: set[int] = set()
    for setting, same in pools.items():
      for codec in codecs:
        pairs = [(x, y) for x in same if (y := getattr(x, of)(codec, than))]
        if not pairs:
          continue
        found, spreads = zip(*pairs, strict=True)
        there.add(setting.workers if own(setting) else 0)
        full = 100 - statistics.fmean(x.ends("f32").mean() for x in found)
        scale = verdicts.share(full, error) if unit.startswith(POINTS) else 1.0
        rank = COUNTS if any(_counts(x, unit) for x in found) else BLIND
        label = f"{' and '.join(x.name for x in found)}: {codec}{less}"
        given = verdicts.pooled(spreads), decide.scaled(scale), label, numbers
        yield judged(*given, unit=unit, rank=rank if own(setting) else FAR)
    for missing in sorted({*counts} - there if there else ()):
      yield Seen(None, f"{missing} workers: no training")

  return judge


def on_average(codecs: Sequence[str], limit: float) -> verdicts.Judge:
  """Returns a judge of whether codecs lose at most ``limit`` points on average.

  The mean of all groups is taken seed by seed, over the seeds that all of them have:
  three or more.
  """

  @verdicts.needing(f"{ENOUGH} seeds of f32 and {' or '.join(codecs)}")
  def judge(study: Study) -> Iterator[Seen]:
    every = [
      found
      for group in study.about(images)
      for codec in codecs
      if len(found := group.differences(codec)) >= ENOUGH
    ]
    if every:
      means = pd.concat(every, axis=1, join="inner").mean(axis=1)
      ends = [x.mean() for x in every]
      label = f"the mean of {len(every)} settings"
      numbers = (
        f"{{label}}: {{found}} ({{found.seeds}}); the worst {min(ends):+.2f}, "
        f"the best {max(ends):+.2f}"
      )
      yield judged(spread(means.tolist()), rule({"at_least": -limit}), label, numbers)

  return judge


def gains(
  codecs: Sequence[str], effect: float, pairs: Callable[..., Any]
) -> verdicts.Judge:
  """Returns a judge of whether codecs lose less in one setting than in another."""
  where = f"in two settings, {pairs.__name__}"

  @verdicts.needing(f"seeds of f32 and {' or '.join(codecs)} {where}")
  def judge(study: Study) -> Iterator[Seen]:
    for group, other in pairs(study):
      for codec in codecs:
        if more := group.gained(codec, other):
          label, numbers = f"{group.name}: {codec}", "{label} {found} points better"
          yield judged(more, rule({"above": effect}), label, numbers)

  return judge


def later(codec: str) -> verdicts.Judge:
  """Returns a judge of whether a codec is behind float32 at first, and catches up."""

  @verdicts.needing(f"seeds of f32 and {codec}, with two points of a curve or more")
  def judge(study: Study) -> Iterator[Seen]:
    for group in study.about(images):
      for what, ends, found in (
        ("in the first half", {"below": EQUAL}, group.early(codec)),
        ("of that come back", {"above": EQUAL}, group.caught_up(codec)),
      ):
        if found:
          numbers = f"{group.name}: {{found}} {what} ({{found.seeds}})"
          yield judged(found, rule(ends), f"{group.name}: {what}", numbers)

  return judge


def blocked(where: str, arms: dict[str, Sequence[float]]) -> Seen:
  """Says whether arms end as float32, by an analysis of variance with seeds as blocks.

  It is Friedman's. They do not if p is 0.05 or less. They do if it is more,
  and the intervals of all arms are above float32 less 0.2 points. Else it cannot be
  told: that no difference was found does not say that there is none.

  >>> arms = {"f32": [1, 2, 3], "a": [1.1, 2, 3], "b": [1, 2.1, 3.1]}
  >>> found = blocked("a net", arms)
  >>> found.holds, found.numbers
  (True, 'a net: p = 0.368; f32 2.00, a 2.03, b 2.07')
  """
  # By ranks: all arms of a seed begin alike and see the same batches.
  p = float(stats.friedmanchisquare(*arms.values()).pvalue)
  differences = {
    name: spread([a - b for a, b in zip(ends, arms["f32"], strict=True)])
    for name, ends in arms.items()
    if name != "f32"
  }
  no_loss = rule({"at_least": -EQUAL})
  bars = tuple(
    verdicts.bar(f"{where}: {name}", found, no_loss.limit())
    for name, found in differences.items()
  )
  holds = False if p <= 0.05 else all(map(no_loss, differences.values())) or None
  means = ", ".join(f"{name} {statistics.fmean(x):.2f}" for name, x in arms.items())
  # Half of p, beside the one-sided tests of others.
  return Seen(holds, f"{where}: p = {p:.3f}; {means}", bars=bars, p=p / 2)


def alike(
  arms: Sequence[Sequence[str]], groups: Chosen = images_as_dettmers
) -> verdicts.Judge:
  """Returns a judge of whether codecs and float32 end alike: see ``blocked``.

  ``arms``: of the codecs, and of such that are as good a test; the first that is there.
  """

  @verdicts.needing(f"five seeds of f32, {', '.join(arms[0])}")
  def judge(study: Study) -> Iterator[Seen]:
    for group in study.about(groups):
      for codecs in arms:
        ends = pd.DataFrame({x: group.ends(x) for x in ["f32", *codecs]}).dropna()
        if len(ends) > 4:
          yield blocked(group.name, {x: ends[x].tolist() for x in ends})
          break

  return judge


def untested(needs: str) -> verdicts.Judge:
  """Returns a judge of what nothing here can decide."""
  return verdicts.Judge(lambda study: (), needs)
