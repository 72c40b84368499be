"""Groups the runs of a study, and computes what figures and findings share.

A codec with another exchange than its own is a codec of its own: ``"qsgd-4 ring"``.
Trainings that differ in nothing but the codec and the seed are a group. Times that
differ in nothing but the codec are a cell.
"""

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from benchmarks.models.papers import grubic
from benchmarks.study import methods, settings
from benchmarks.study.records import Record

_RATES = {"lstm": 1.0, "gru": 2.0, "transformer": 0.5}  # the usual, which no name has
LATE = 0.2  # points of accuracy that a codec may lack to have reached float32's
# Those of Grubic's line, by bits.
QSGD = {32: "f32", 16: "qsgd-16", 8: "qsgd-8", 4: "qsgd-4", 2: "qsgd-2"}
Curve = list[dict[str, float]]
Times = dict[str, Any]


class Spread(NamedTuple):
  """The mean over seeds, and half of its interval of 95 %; NaN for one seed."""

  mean: float
  half: float
  count: int

  def __str__(self) -> str:
    half = "" if math.isnan(self.half) else f" ± {self.half:.2f}"
    return f"{self.mean:+.2f}{half}"

  @property
  def seeds(self) -> str:
    return f"{self.count} seed{'s'[: self.count - 1]}"


def spread(values: Sequence[float]) -> Spread:
  """Returns the mean of some values and half of its interval.

  >>> print(spread([1.0, 2.0, 3.0]))
  +2.00 ± 2.48
  """
  count = len(values)
  quantile = stats.t.ppf(0.975, count - 1)
  half = float(quantile * stats.sem(values)) if count > 1 else math.nan
  return Spread(statistics.fmean(values), half, count)


class Group(NamedTuple):
  """Trainings with the same settings: the records of each codec by its seeds."""

  setting: settings.Setting  # that all share, without a codec, an exchange and a seed
  runs: dict[str, dict[int, Record]]  # by codecs and seeds

  @property
  def name(self) -> str:
    """Says what the trainings are of, with all that is not the usual."""
    return self.named(f"N = {self.setting.workers}")

  def named(self, workers: str) -> str:
    x = self.setting
    usual = _RATES.get(x.network, 0.05) if x.optimizer == "sgd" else 1e-3
    parts = [
      f"{x.network} on {x.dataset}",
      workers,
      f"batch {x.batch}",
      f"{x.steps * x.batch / x.epoch:.3g} epochs",
      x.way in ("data", "model") and f"{x.way} parallel",
      x.optimizer != "sgd" and x.optimizer,
      x.learning_rate != usual and f"rate {x.learning_rate:g}",
      x.momentum is None and x.optimizer == "sgd" and "no momentum",
      x.nesterov and "Nesterov",
      x.clipping != "mean" and f"{x.clipping} clipping",
      x.weight_decay and f"weight decay {x.weight_decay:g}",
      x.dropout is not None and f"dropout {x.dropout:g}",
      x.schedule != "cosine" and x.schedule,
      x.ema is not None and f"mean by {x.ema:g}",
      x.rule != "fixed" and f"{x.batch // x.workers} a worker",
    ]
    return ", ".join(filter(None, parts))

  def curves(self, codec: str) -> dict[int, Curve]:
    found = sorted(self.runs.get(codec, {}).items())
    return {seed: record.results["points"] for seed, record in found}

  def ends(self, codec: str, number: str = "accuracy") -> pd.Series:
    """Returns a number at the end, by seed; the accuracy is in percent."""
    curves = self.curves(codec)
    return pd.Series({seed: x[-1][number] for seed, x in curves.items()}, dtype=float)

  def ratio(self, codec: str) -> float:
    """Returns the bytes of a training over float32's, with its dense first steps."""
    record = next(iter(self.runs[codec].values()))
    steps = self.setting.steps
    first = methods.first_steps(record.setting.codec, steps)
    return (first + (steps - first) * record.results["ratio"]) / steps

  def difference(self, codec: str, against: str = "f32") -> Spread | None:
    """Returns by how many points a codec is better at the end; None below two seeds."""
    return _paired(self.differences(codec, against))

  def differences(
    self, codec: str, against: str = "f32", number: str = "accuracy"
  ) -> pd.Series:
    """Returns by how much a number at the end is above another codec's, by seed."""
    return _less(self.ends(codec, number), self.ends(against, number))

  def perplexity(self, codec: str, against: str = "f32") -> Spread | None:
    """Returns the percents of perplexity above another's at the end, at most 1e300."""
    more = self.differences(codec, against, "test_loss")
    return _paired(100 * (np.exp(more.clip(upper=690.0)) - 1))

  def training_loss(self, codec: str, against: str = "f32") -> Spread | None:
    """Returns by how much a codec's training loss is above another's at the end."""
    return _paired(self.differences(codec, against, "train_loss"))

  def early(self, codec: str, against: str = "f32") -> Spread | None:
    """Returns the points above another codec in the first half of a training."""
    return _paired(_less(self._first_half(codec), self._first_half(against)))

  def caught_up(self, codec: str) -> Spread | None:
    """Returns the points by which ``difference`` is above ``early``."""
    late = lambda name: _less(self.ends(name), self._first_half(name))
    return _paired(_less(late(codec), late("f32")))

  def gained(self, codec: str, other: "Group") -> Spread | None:
    """Returns the points by which ``difference`` is above that of another group."""
    return _paired(_less(self.differences(codec), other.differences(codec)))

  def _first_half(self, codec: str) -> pd.Series:
    """Returns the mean accuracy of the first half of each curve that has one."""
    found = {
      seed: statistics.fmean(x["accuracy"] for x in curve[: len(curve) // 2])
      for seed, curve in self.curves(codec).items()
      if len(curve) > 1
    }
    return pd.Series(found, dtype=float)

  def steps_to(self, codec: str) -> float | None:
    """Returns the steps until the mean accuracy is float32's last less 0.2, or None."""
    ends, curves = self.ends("f32"), self.curves(codec)
    if ends.empty or not curves:
      return None
    goal = ends.mean() - LATE
    for points in zip(*curves.values(), strict=False):
      if statistics.fmean(point["accuracy"] for point in points) >= goal:
        return points[0]["step"]
    return None


def _less(ours: pd.Series, theirs: pd.Series) -> pd.Series:
  """Subtracts seed by seed, for the seeds that both have."""
  ours, theirs = ours.align(theirs, join="inner")
  return (ours - theirs).sort_index()


def _paired(differences: pd.Series) -> Spread | None:
  return spread(differences.tolist()) if len(differences) > 1 else None


class Cell(NamedTuple):
  """Times with the same settings: the results of each codec."""

  setting: settings.Setting
  times: dict[str, Times]

  @property
  def link(self) -> str:
    return self.setting.link or "one machine"

  @property
  def name(self) -> str:
    x = self.setting
    return f"{x.network} on {x.dataset}, N = {x.workers}, batch {x.batch}, {self.link}"

  def speed(self, codec: str) -> float:
    return self.setting.batch / self.times[codec]["step"]

  def gain(self, codec: str) -> float:
    """Returns how many times as fast a step is as float32's."""
    return self.times["f32"]["step"] / self.times[codec]["step"]

  @property
  def share(self) -> float:
    """The share of communication in float32's step."""
    return self.times["f32"]["communication"] / self.times["f32"]["step"]

  @property
  def intensity(self) -> float:
    """Megabytes of parameters for each billion operations of a sample."""
    found = self.times["f32"]
    return found["megabytes"] / found["gigaflops"]

  def fit(self) -> grubic.Fit | None:
    """Fits ``a + c w`` to the seconds of a sample; None below four rows."""
    speeds = {bits: self.speed(x) for bits, x in QSGD.items() if x in self.times}
    return grubic.fit(speeds) if len(speeds) > 3 else None


def in_groups(found: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
  """Groups what has the same key, in the order in which it is found."""
  groups: dict[Any, list[Any]] = {}
  for each in found:
    groups.setdefault(key(each), []).append(each)
  return groups


class Study(NamedTuple):
  """All that a folder of records has, and the runs without results."""

  groups: list[Group]
  cells: list[Cell]
  failed: Sequence[Record] = ()

  def about(self, chosen: Callable[[settings.Setting], bool]) -> list[Group]:
    return [group for group in self.groups if chosen(group.setting)]

  def matching(self, cell: Cell) -> Group | None:
    """Returns the trainings whose accuracies go with a cell's times.

    They are one group of the network and the data: that with most of the cell's
    codecs, and of several such one with as many workers.
    """
    x, same = cell.setting, operator.attrgetter("network", "dataset")
    found = self.about(lambda setting: same(setting) == same(x))
    common = lambda group: len(group.runs.keys() & cell.times.keys())
    close = lambda group: (common(group), group.setting.workers == x.workers)
    return max(found, key=close, default=None)


def grouped(records: Iterable[Record]) -> Study:
  """Groups the records of a folder, with codecs in the order of ``METHODS``."""
  groups: dict[settings.Setting, Group] = {}
  cells: dict[settings.Setting, Cell] = {}
  failed = []
  for record in sorted(records, key=lambda x: methods.place(x.setting.codec)):
    setting = record.setting
    if record.lacking is not None:
      failed.append(record)
      continue
    codec = setting.name
    if setting.way == "timed":
      key = setting._replace(codec="", exchange="", steps=0)
      cells.setdefault(key, Cell(setting, {})).times[codec] = record.results
    else:
      key = setting._replace(codec="", exchange="", seed=0)
      group = groups.setdefault(key, Group(key, {}))
      group.runs.setdefault(codec, {})[setting.seed] = record
  order = lambda x: (x.setting.network, x.setting.workers, x.setting.link)
  in_order = lambda found: sorted(found.values(), key=order)
  return Study(in_order(groups), in_order(cells), failed)
