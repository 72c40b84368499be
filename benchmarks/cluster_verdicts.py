"""Judges what papers say of accuracy by the trainings of a study.

Each judge looks at every group that has what it needs. A claim holds if it holds in all
of them. Differences are means over seeds, seed by seed, with their intervals of 95 %. A
codec is as good as float32 within some points if the mean is. It is worse if the whole
interval is below 0.
"""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from arms import anova
from cluster_codecs import TYPES
from cluster_networks import TEXTS
from cluster_numbers import Group, Spread, Study

FAILS = 1.0  # points below float32


class Verdict(NamedTuple):
  """What the runs say of a claim, and the numbers that say it."""

  verdict: Literal["holds", "does not", "not tested"]
  numbers: str


Judge = Callable[[Study], Verdict]


class Finding(NamedTuple):
  """A claim of a paper.

  Attributes:
    claim: in one sentence.
    paper: where it is.
    said: the paper's number.
    judge: from a study to a verdict.
  """

  claim: str
  paper: str
  said: str
  judge: Judge


class Seen(NamedTuple):
  """What one group or cell says."""

  holds: bool
  numbers: str


def concluded(seen: Iterable[Seen], needs: str) -> Verdict:
  """Concludes from all that was seen, if there was anything.

  Args:
    seen: of each group or cell.
    needs: what has to be run, if nothing was seen.
  """
  found = list(seen)
  if not found:
    return Verdict("not tested", f"It needs {needs}.")
  numbers = "; ".join(x.numbers for x in found)
  if all(x.holds for x in found):
    return Verdict("holds", numbers)
  if any(x.holds for x in found):
    kept = sum(x.holds for x in found)
    numbers = f"It holds in {kept} of {len(found)}. {numbers}"
  return Verdict("does not", numbers)


def _any(group: Group) -> bool:
  return True


def recurrent(group: Group) -> bool:
  return group.setting.network in TEXTS


def _told(group: Group, what: str, found: Spread) -> str:
  return f"{group.name}: {what} {found} ({found.count} seeds)"


def within(
  codecs: Iterable[str], limit: float, chosen: Callable[[Group], bool] = _any
) -> Judge:
  """Returns a judge of whether codecs are at most ``limit`` points below float32."""
  names = list(codecs)

  def judge(study: Study) -> Verdict:
    return concluded(
      (
        Seen(found.mean >= -limit, _told(group, name, found))
        for group in filter(chosen, study.groups)
        for name in names
        if (found := group.difference(name))
      ),
      f"two seeds of f32 and {' or '.join(names)}",
    )

  return judge


def worse(codec: str, than: str) -> Judge:
  """Returns a judge of whether a codec is worse than another."""

  def judge(study: Study) -> Verdict:
    return concluded(
      (
        Seen(found.mean + found.half < 0, _told(group, f"{codec} - {than}", found))
        for group in study.groups
        if (found := group.difference(codec, than))
      ),
      f"two seeds of {codec} and {than}",
    )

  return judge


def fails(codecs: Iterable[str]) -> Judge:
  """Returns a judge of whether codecs end more than a point below float32."""
  names = list(codecs)

  def judge(study: Study) -> Verdict:
    return concluded(
      (
        Seen(found.mean < -FAILS, _told(group, name, found))
        for group in study.groups
        for name in names
        if (found := group.difference(name))
      ),
      f"two seeds of f32 and {' or '.join(names)}",
    )

  return judge


def later(codec: str) -> Judge:
  """Returns a judge of whether a codec is behind float32 more at first than at last."""

  def judge(study: Study) -> Verdict:
    return concluded(
      (
        Seen(
          early.mean + early.half < 0 and early.mean < last.mean,
          f"{group.name}: {early} in the first half, {last} at the end",
        )
        for group in study.groups
        if (early := group.early(codec)) and (last := group.difference(codec))
      ),
      f"two seeds of f32 and {codec}, with two points of a curve or more",
    )

  return judge


def alike(codecs: Iterable[str]) -> Judge:
  """Returns a judge of whether codecs and float32 end alike: p above 0.05."""
  names = ["f32", *codecs]

  def judge(study: Study) -> Verdict:
    seen = []
    for group in study.groups:
      ends = [list(group.ends(name).values()) for name in names]
      if all(len(values) > 1 for values in ends):
        found = anova(ends)
        means = ", ".join(
          f"{name} {sum(values) / len(values):.2f}"
          for name, values in zip(names, ends, strict=True)
        )
        numbers = f"{group.name}: F = {found['F']:.2f}, p = {found['p']:.2f}; {means}"
        seen.append(Seen(found["p"] > 0.05, numbers))
    return concluded(seen, f"two seeds of {', '.join(names)}")

  return judge


def any_workers(codec: str, limit: float) -> Judge:
  """Returns a judge of whether a codec is as good with any number of workers."""

  def judge(study: Study) -> Verdict:
    seen, counts = [], set()
    for group in study.groups:
      if found := group.difference(codec):
        seen.append(Seen(found.mean >= -limit, _told(group, codec, found)))
        counts.add(group.setting.workers)
    return concluded(
      seen if len(counts) > 1 else [],
      f"two seeds of f32 and {codec} with two numbers of workers or more",
    )

  return judge


_DETTMERS = [name.replace("_", "-") for name in TYPES]
FINDINGS = (
  Finding(
    "QSGD with 8 bits in buckets of 512 ends as float32.",
    "Grubic 5.1",
    "equal",
    within(["qsgd-8"], 0.2),
  ),
  Finding(
    "QSGD with 4 bits in buckets of 512 ends within 0.2 points.",
    "Grubic 5.1",
    "0.1",
    within(["qsgd-4"], 0.2),
  ),
  Finding(
    "1-bit SGD in buckets of 64 ends less than 0.3 points below.",
    "Grubic 5.1",
    "0.3",
    within(["onebit-64"], 0.3),
  ),
  Finding(
    "1-bit SGD converges later than float32.",
    "Grubic 5.1",
    "curve",
    later("onebit-64"),
  ),
  Finding(
    "1-bit SGD is worse in buckets of 512 than of 64.",
    "Grubic 5.1",
    "1 point",
    worse("onebit-512", "onebit-64"),
  ),
  Finding(
    "QSGD with 2 bits in buckets of 128 is worse than float32.",
    "Grubic 5.1",
    "1 point or more",
    worse("qsgd-2", "f32"),
  ),
  Finding(
    "QSGD with 4 bits is worse in buckets of 8192 than of 512.",
    "Grubic 5.1",
    "more than 0.6 points below float32",
    worse("qsgd-4-8192", "qsgd-4"),
  ),
  Finding(
    "QSGD with 1 bit and uniform levels fails.",
    "Grubic 5.1",
    "accuracy not reached",
    fails(["qsgd-1-uniform"]),
  ),
  Finding(
    "QSGD with the l2 norm as its scale fails.",
    "Grubic 5.1",
    "accuracy not reached",
    fails(["qsgd-4-l2", "qsgd-2-l2"]),
  ),
  Finding(
    "QSGD with 2 bits and one scale a tensor fails.",
    "Grubic 3.2.2",
    "buckets are needed",
    fails(["qsgd-2-tensor"]),
  ),
  Finding(
    "Convolutions are more sensitive to 2 bits than dense layers.",
    "Grubic 5.1",
    "no number",
    worse("qsgd-2:conv", "qsgd-2:dense"),
  ),
  Finding(
    "A recurrent net stands 2 bits.",
    "Grubic 5.1",
    "equal",
    within(["qsgd-2"], 0.2, recurrent),
  ),
  Finding(
    "1-bit SGD without residuals fails.",
    "Grubic 2.2",
    "feedback is needed",
    fails(["onebit-64-nofeedback"]),
  ),
  Finding(
    "TernGrad ends at most 0.22 points below float32, for 2 to 64 workers.",
    "Wen 4.1, figure 3",
    "0.22 on LeNet",
    any_workers("terngrad", 0.22),
  ),
  Finding(
    "TernGrad ends at most 2 points below float32.",
    "Wen abstract, 4.2",
    "2 on GoogLeNet",
    within(["terngrad"], 2.0),
  ),
  Finding(
    "TernGrad is worse without clipping.",
    "Wen 4.2, table 2",
    "2.7 points",
    worse("terngrad-noclip", "terngrad"),
  ),
  Finding(
    "Dettmers' four types of 8 bits end as float32 (analysis of variance).",
    "Dettmers 3.4",
    "p = 0.59",
    alike(_DETTMERS),
  ),
  Finding(
    "APS with 8 bits ends at most 0.3 points below float32.",
    "Han 4.1, table 4",
    "0.3",
    within(["aps-5-2", "aps-4-3"], 0.3),
  ),
  Finding(
    "Casts to 4 bits (3, 0) fail without APS.",
    "Han table 6",
    "diverges",
    fails(["cast-3-0"]),
  ),
  Finding(
    "4 bits (3, 0) with APS are worse than float32 in the last layer.",
    "Han table 7",
    "no number",
    worse("aps-3-0", "aps-3-0:body"),
  ),
  Finding(
    "RedSync with 1 % and 0.1 % ends within a point of float32.",
    "Fang table 1",
    "within 1 %",
    within(["redsync-1", "redsync-0.1"], 1.0),
  ),
  Finding(
    "The largest 1 % without residuals fail.",
    "Fang 2",
    "residuals are needed",
    fails(["topk-1-noresidual"]),
  ),
)
