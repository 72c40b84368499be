"""Judges what papers say of speed by the times of a study, and by those of links.

Each judge looks at every cell that has what it needs, and a claim must hold in all of
them, or in the share that the paper's words give. Times of one program differ by 5 %,
so numbers that are as close cannot tell. Whole exchanges without a network are those of
links/speed.py, which its results have.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator

from benchmarks.common import cli
from benchmarks.models.papers import grubic
from benchmarks.study.analysis import QSGD, Cell, Study, in_groups
from benchmarks.study.judges.verdicts import Bar, Judge, Limit, Seen, needing
from benchmarks.study.tasks import WIDENED

LINKS = cli.RESULTS / "links" / "link_speed.json"
_ERROR = 0.08  # of the line through a cell's times
_LOW = [codec for bits, codec in QSGD.items() if bits < 32]
_BOUND = 1 / grubic.wire_share(8)  # 3.97: what 8 bits gain without any computation
_NOISE = 0.05  # the share by which times of one program differ
# What links carry a second; of loopback, what JAX's float32 mean makes of it at most;
# of others all.
_GBIT = {"100mbit": 0.1, "1gbit": 1.0, "5gbit": 5.0, "10gbit": 10.0, "loopback": 8.0}
# A label, a ratio, how numbers say it, and the link, or "" where none matters.
Ratio = tuple[str, float, str, str]


def more(a: float, b: float) -> bool | None:
  """Says whether ``a`` is more than ``b``; None where noise may be all of it."""
  return None if abs(a - b) <= _NOISE * b else a > b


def timed(label: str, ratio: float, limit: Limit) -> Bar:
  """Returns the bar of a ratio of times, which holds the limit where ``more`` is None.

  Its length is the noise of one of the two, of that which would have to be more.
  """
  low, high = 1 - _NOISE, 1 + _NOISE
  if limit.above:
    low, high = 1 / high, 1 / low
  return Bar(label, low * ratio, ratio, high * ratio, limit)


def of_ratio(
  limit: Limit, label: str, ratio: float, numbers: str, link: str = ""
) -> Seen:
  """Returns whether a ratio of times is on the right side of its limit."""
  sides = (ratio, limit.value) if limit.above else (limit.value, ratio)
  bars = (timed(label, ratio, limit),)
  return Seen(more(*sides), numbers, bars=bars, gbit=_GBIT.get(link, math.inf))


def ratios(
  needs: str, unit: str, value: float = 1.0, above: bool = True
) -> Callable[[Callable[[Study], Iterable[Ratio]]], Judge]:
  """Makes a judge of what yields ratios of times, each with its label."""
  seen = functools.partial(of_ratio, Limit(value, above, unit))
  return lambda look: Judge(lambda study: itertools.starmap(seen, look(study)), needs)


@needing("times of f32 and three QSGD codecs or more")
def line(study: Study) -> Iterator[Seen]:
  """Judges whether times follow ``a + c w``."""
  for cell in study.cells:
    if cell.setting.workers > 1 and (found := cell.fit()):
      error = 100 * found.error
      limit = Limit(100 * _ERROR, above=False, unit="error of the line, %")
      numbers = (
        f"{cell.name}: a = {1e3 * found.computation:.3g} ms a sample, c = "
        f"{1e3 * found.communication:.3g} ms, error {found.error:.1%}"
      )
      bar = Bar(cell.name, error, error, error, limit)
      yield Seen(found.error <= _ERROR, numbers, bars=(bar,))


@ratios(
  "times of f32 and qsgd-4 where a fifth of a step is communication",
  "times as long in float32",
)
def falls(study: Study) -> Iterator[Ratio]:
  """Judges whether 4 bits communicate for less time than float32, where it counts."""
  for cell in study.cells:
    if {"f32", "qsgd-4"} <= cell.times.keys() and cell.share >= 0.2:
      a, b = (cell.times[name]["communication"] for name in ("f32", "qsgd-4"))
      numbers = f"{cell.name}: f32 {1e3 * a:.1f} ms, qsgd-4 {1e3 * b:.1f} ms"
      yield cell.name, a / b, numbers, cell.setting.link


def slower(codec: str, than: str, value: float = 1.0, above: bool = True) -> Judge:
  """Returns a judge of whether steps with a codec take longer than with another.

  Cells say it that exchange, and have both codecs.
  """
  unit = f"times as fast with {than} as with {codec}"

  @ratios(f"times of {codec} and {than}", unit, value, above)
  def judge(study: Study) -> Iterator[Ratio]:
    for cell in study.cells:
      if cell.setting.workers > 1 and cell.times.keys() >= {codec, than}:
        speeds = (f"{name} {cell.speed(name):.0f} samples/s" for name in (codec, than))
        ratio = cell.speed(than) / cell.speed(codec)
        yield cell.name, ratio, f"{cell.name}: {', '.join(speeds)}", cell.setting.link

  return judge


def _linked(study: Study) -> Iterator[tuple[Cell, Cell]]:
  """Yields cells that differ in their links alone, each slow one and the fastest."""
  linked = lambda x: x.setting.link and x.setting.workers > 1 and "f32" in x.times
  rest = lambda cell: cell.setting._replace(link="")
  for cells in in_groups(filter(linked, study.cells), rest).values():
    fast, *others = sorted(cells, key=lambda cell: cell.times["f32"]["step"])
    yield from ((slow, fast) for slow in others)


@ratios("times of f32 and QSGD on two links", "times as fast with f32 on the fast link")
def fast_link(study: Study) -> Iterator[Ratio]:
  """Judges whether f32 on the fast link can beat all codecs on the slow one."""
  for slow, fast in _linked(study):
    if low := [name for name in _LOW if name in slow.times]:
      best = max(low, key=slow.speed)
      speeds = fast.speed("f32"), slow.speed(best)
      numbers = f"f32 {speeds[0]:.0f} samples/s; {slow.link}: {best} {speeds[1]:.0f}"
      yield fast.name, speeds[0] / speeds[1], f"{fast.name}: {numbers}", ""


@ratios(
  "times of f32 and QSGD on two links", "the gain on the slow link over the fast one's"
)
def fades(study: Study) -> Iterator[Ratio]:
  """Judges whether few bits gain less on the fast link."""
  for slow, fast in _linked(study):
    if low := [name for name in _LOW if name in slow.times and name in fast.times]:
      gains = [max(map(cell.gain, low)) for cell in (slow, fast)]
      numbers = f"{slow.name}: {gains[0]:.2f} x; {fast.link}: {gains[1]:.2f} x"
      yield slow.name, gains[0] / gains[1], numbers, slow.setting.link


@needing("times of f32 and qsgd-8 on two widths of a network")
def rises(study: Study) -> Iterator[Seen]:
  """Judges whether 8 bits gain more with more MB a GFLOP, and 3.97 at most."""
  limit = Limit(1.0, above=True, unit="the gain of the last net over the first one's")
  wide = lambda x: x.setting.network in WIDENED and x.setting.workers > 1
  found = (x for x in study.cells if wide(x) and {"f32", "qsgd-8"} <= x.times.keys())
  alike = in_groups(found, lambda x: f"N = {x.setting.workers}, {x.link}")
  for where, cells in alike.items():
    cells.sort(key=lambda cell: cell.intensity)
    gains = [cell.gain("qsgd-8") for cell in cells]
    numbers = ", ".join(
      f"{cell.setting.network} {cell.intensity:.0f} MB/GFLOP: {gain:.2f} x"
      for cell, gain in zip(cells, gains, strict=True)
    )
    seen = of_ratio(limit, where, gains[-1] / gains[0], f"{where}: {numbers}")
    low = max(gains) <= _BOUND * (1 + _NOISE)
    if len(cells) > 1:
      yield seen if low else seen._replace(holds=False)


@ratios(
  "times with N and with 2 N workers, each on processors of its own, and a fixed batch",
  *("times as fast with twice the workers", 2.0, False),
)
def doubling(study: Study) -> Iterator[Ratio]:
  """Judges whether twice the workers are rarely twice as fast with the same batch.

  Only workers with processors of their own count: a share of the batch that is half as
  large takes them at most three quarters of the time.
  """
  at = {
    (*cell.setting._replace(workers=0, hosts=0), cell.setting.workers): cell
    for cell in study.cells
    if cell.setting.rule == "fixed"
  }
  for (*rest, workers), cell in at.items():
    if twice := at.get((*rest, 2 * workers)):
      for codec in cell.times.keys() & twice.times.keys():
        if twice.times[codec]["compute"] <= 0.75 * cell.times[codec]["compute"]:
          ratio = twice.speed(codec) / cell.speed(codec)
          label = f"{twice.name}: {codec}"
          yield label, ratio, f"{label} {ratio:.2f} x", ""


def of_links(first: str, second: str, rates: list[str], leaves: int | str = 1) -> Judge:
  """Returns a judge of whether an exchange of links/speed.py takes longer than another.

  It looks at all runs with the rates and the leaves.
  """
  needs = f"{first} and {second} of links/speed.py"

  @ratios(needs, "the first one's time over the second one's")
  def judge(study: Study) -> Iterator[Ratio]:
    del study
    runs = json.loads(LINKS.read_text())["runs"] if LINKS.exists() else []
    for run in runs:
      steps, rate = run["steps"], run["rate"]
      if rate in rates and run["leaves"] == leaves and {first, second} <= steps.keys():
        a, b = (steps[name]["median_seconds"] for name in (first, second))
        where = f"{run['hosts']} hosts, {rate}, {run['mib']:g} MiB"
        numbers = f"{first} {1e3 * a:.0f} ms, {second} {1e3 * b:.0f} ms"
        yield f"{where}: {first} / {second}", a / b, f"{where}: {numbers}", rate

  return judge
